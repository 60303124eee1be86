"""Each training command of all pages is planned as a dry run plans it, in this process."""

import re

from conftest import ROOT
from test_readme import PAGES, commands

import configurator
from runtime.cluster.ranks import Ranks
from runtime.plan import run_plan
from runtime.plan.report import memory_report
from runtime.plan.run_plan import Problems, count_params, make_plan

SCRIPT = "train_deepspeed.py"
HEADLINE = "run_deepspeed_xl.sh"
RANKS = re.compile(r"--(?:nproc_per_node|num_gpus|nnodes)=(\d+)")
# What a command takes from an earlier one, or from the reader: runs, datasets, exported weights
MADE_BEFORE = re.compile(
    "has no checkpoint|train.bin does not exist|(?:out-stage1|my-weights|shakespeare-xl) is unknown"
)


def training_commands():
    """Return {command as text: (ranks, settings' arguments)} of all pages, each once."""
    found = {}
    for page in PAGES:
        for words in commands(page):
            script = next((word for word in words if word.endswith((SCRIPT, HEADLINE))), None)
            if script is None:
                continue
            place = words.index(script)
            # "..." stands for settings of the reader's, and ../ for another project
            arguments = [word for word in words[place + 1 :] if word != "..."]
            if "--help" in arguments or any(word.startswith("../") for word in arguments):
                continue
            if script.endswith(HEADLINE):
                arguments = ["config/xl_shakespeare.py", *arguments]
            ranks = 1
            for number in RANKS.findall(" ".join(words[:place])):
                ranks *= int(number)
            found[" ".join(words)] = (ranks, arguments)
    return found


def test_each_training_command_of_the_pages_can_be_planned(monkeypatch, capsys):
    """Nothing is wrong with it but what the reader makes first. Its memory is estimated."""
    monkeypatch.chdir(ROOT)
    counts = {}  # counting GPT-2 XL's parameters takes 0.2 s

    def count_once(*args):
        key = str(args)
        if key not in counts:
            counts[key] = count_params(*args)
        return counts[key]

    monkeypatch.setattr(run_plan, "count_params", count_once)
    planned = 0
    wrong = {}
    for text, (number, arguments) in training_commands().items():
        given = "" if "--target_gpu" in text else "--target_gpu=80"
        options = [word for word in ("--dry_run=True", given) if word]
        problems = Problems()
        ranks = Ranks(0, 0, number, min(number, 8))
        try:
            settings = configurator.settings_of_script(SCRIPT, [*arguments, *options])
            plan = make_plan(settings, ranks, problems, [])
        except SystemExit:
            wrong[text] = capsys.readouterr().err
            continue
        unexpected = [problem for problem in problems if not MADE_BEFORE.search(problem)]
        if unexpected:
            wrong[text] = unexpected
        elif not problems:
            assert memory_report(plan, ranks).startswith("each GPU"), text
            planned += 1
    assert wrong == {}
    assert planned >= 40
