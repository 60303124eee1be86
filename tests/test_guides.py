"""The way here from other guides: docs/guides.md."""

import re
import shlex

import deepspeed.launcher.runner
import pytest
import torch.distributed.run
from conftest import ROOT

import configurator
from runtime.cluster.ranks import Ranks
from runtime.other_guides import INSTEAD, instead_of
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


def settings(*argv):
    return configurator.settings_of_script(str(ROOT / SCRIPT), argv)


@pytest.mark.parametrize("words, ours", [
    ("--fp16", "write --dtype=float16"), ("--bf16=True", "write --dtype=bfloat16"), ("--fp16=False", "drop it"),
    ("--lr=3e-5", "write --learning_rate=3e-5"), ("--lr", "write --learning_rate=VALUE"),
    ("--zero_stage=3", "write --deepspeed_config=ds_config_zero3.json"),
    ("--zero-stage=1", "drop it: ZeRO-2 is the default, and stages 0 and 1 run as it"),
    ("--fsdp", "write --deepspeed_config=ds_config_zero3.json"),
    ("--gpus=4", "start it by python launch_deepspeed.py --nproc_per_node=4 train_deepspeed.py"),
    ("--devices=auto", "start it by python launch_deepspeed.py --nproc_per_node=GPUS train_deepspeed.py"),
    ("--gradient_clipping=1.0", "write --grad_clip=1.0"), ("--max-seq-length 512", "write --block_size=512"),
    ("--output_dir=my runs", "write --out_dir='my runs'"),
    ("--train_file=a.txt", "prepare the text by python data/prepare.py a.txt --name=mine, and write --dataset=mine"),
    ("--save_strategy=epoch", "write --eval_epochs=1, or --eval_interval for steps: every evaluation saves"),
    ("--validation_file=v.txt",
     "prepare it by python data/prepare.py my.txt --val=v.txt --name=mine, and write --dataset=mine")])
def test_an_option_of_other_scripts_is_refused_with_ours(capsys, words, ours):
    words = [words] if "=" in words else words.split()
    with pytest.raises(SystemExit) as refusal:
        settings(*words)
    name = words[0].lstrip("-").partition("=")[0].replace("-", "_")
    assert refusal.value.code == 2
    assert capsys.readouterr().err == f"command line: there is no setting '{name}': {ours}\n"


@pytest.mark.parametrize("name", INSTEAD)
def test_each_hint_names_settings_and_files_that_there_are(name):
    assert name not in vars(settings())
    value = {"deepspeed": "ds_config_zero3.json"}.get(name, "7")
    hint = instead_of(name, value)
    for option in re.findall(r"(--(?!name|config|nproc|val=)\w+=[\w./-]+)", hint):
        key, _, given = option[2:].partition("=")
        assert str(getattr(settings(option), key)) in (given, f"{given}.0")
    for path in re.findall(r"[\w/]+\.(?:py|json)", hint):
        assert (ROOT / path).exists()


def test_a_config_file_gets_the_hints_too_and_other_scripts_their_own(tmp_path, capsys):
    (tmp_path / "mine.py").write_text("fp16 = True\n")
    with pytest.raises(SystemExit):
        settings(str(tmp_path / "mine.py"))
    assert capsys.readouterr().err == f"{tmp_path}/mine.py: there is no setting 'fp16': write --dtype=float16\n"
    with pytest.raises(SystemExit):
        configurator.settings_of_script(str(ROOT / "sample.py"), ["--output_dir=x"])
    assert capsys.readouterr().err == "command line: there is no setting 'output_dir': did you mean 'out_dir'?\n"
