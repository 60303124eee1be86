"""The way here from other guides: docs/guides.md."""

import re
import shlex

import deepspeed.launcher.runner
import torch.distributed.run
from conftest import ROOT

import configurator
from runtime.cluster.ranks import Ranks
from runtime.plan import run_plan
from runtime.plan.report import memory_report
from runtime.plan.run_plan import Problems, count_params, make_plan

SCRIPT = "train_deepspeed.py"
XL = "config/xl_shakespeare.py"


def launched(words):
    """(ranks, arguments of train_deepspeed.py) of a command."""
    words = [word for word in words if not re.match("[A-Z_]+=", word)]
    if words[0] == "torchrun" or words[1] == "launch_deepspeed.py":
        arguments = words[1:] if words[0] == "torchrun" else words[2:]
        args = torch.distributed.run.get_args_parser().parse_args(arguments)
        assert args.training_script == SCRIPT
        return int(args.nproc_per_node), args.training_script_args
    if words[0] == "deepspeed":
        args = deepspeed.launcher.runner.parse_args(words[1:])
        assert args.user_script == SCRIPT
        return max(args.num_gpus, args.include.count(",") + 1), args.user_args
    assert words[:2] == ["python", SCRIPT]
    return 1, words[2:]


def guide_commands():
    """The commands of the table's second column, as words. Those that begin with an option go after the config."""
    rows = re.findall(r"^\| .+? \| (.+) \|$", (ROOT / "docs" / "guides.md").read_text(encoding="utf-8"), re.M)[1:]
    codes = [shlex.split(code) for row in rows for code in re.findall(r"`([^`]+)`", row)]
    options = [["python", SCRIPT, XL, *words] for words in codes if "=" in words[0] and words[0].startswith("--")]
    return options + [words for words in codes if SCRIPT in words]


def test_the_guides_commands_pass_a_dry_run(monkeypatch):
    """But for the runs that some continue, which aren't there."""
    monkeypatch.chdir(ROOT)
    counts = {}  # counting GPT-2 XL's parameters takes 0.2 s
    monkeypatch.setattr(run_plan, "count_params", lambda *args: counts.get(str(args)) or counts.setdefault(
        str(args), count_params(*args)))
    done = 0
    for words in guide_commands():
        if "--help" in words:
            continue
        number, argv = launched(words)
        ranks, problems = Ranks(0, 0, number, number), Problems()
        settings = configurator.settings_of_script(SCRIPT, [*argv, "--dry_run=True", "--target_gpu=80"])
        plan = make_plan(settings, ranks, problems, [])
        if "--init_from=resume" in argv or "--init_from=out-stage1" in argv:
            assert re.search("has no checkpoint|out-stage1 is unknown", problems.pop()), words
            assert not [problem for problem in problems if "train.bin does not exist" not in problem], words
        else:
            assert not problems and memory_report(plan, ranks).startswith("each GPU"), words
            done += 1
    assert done > 17
