"""Runs on CPU, against plain PyTorch: losses, settings, DeepSpeed's JSON, and how a run ends."""

import json
import re
import shlex
import shutil
import subprocess
import sys

import numpy as np
import psutil
import pytest
import torch
from animals90_runs import (
    DEFAULT,
    EXAMPLE,
    NO_COMPILER,
    PLAIN,
    SCRIPT,
    SMOOTH,
    UTILS,
    assert_same_tensors,
    figures,
    model,
    saved_module,
)
from conftest import done, kill, launch, patience, wait_until
from PIL import Image

import configurator

pytest_plugins = ["animals90_runs"]  # fixtures


def test_two_ranks_are_distributed_data_parallel(train):
    """Over two epochs, the first of which is the warm-up, against the baseline of table.py."""
    # With fewer pixels or pictures per batch norm, and steps that Adam makes of rounding errors, no
    # two programs agree
    options = (
        "--gradient_accumulation_steps=2",
        "--learning_rate=1e-4",
        "--image_size=48",
        "--batch_size=8",
        "--epochs=2",
    )
    ours = done(train(*options, ranks=2, config=SMOOTH))
    plain = done(train(*options, "--eps=1e-1", "--weight_decay=0.5", ranks=2, script=PLAIN))
    assert ours.epochs[0]["learning_rate"] == 1e-4
    for mine, theirs in zip(ours.epochs, plain.epochs, strict=True):
        for key in ("train_loss", "val_loss", "val_acc"):
            assert mine[key] == pytest.approx(theirs[key], abs=1e-5)
    assert_same_tensors(ours.models[0], plain.models[0], 1e-5)


def test_all_ranks_end_with_the_same_statistics(two_ranks):
    assert_same_tensors(*two_ranks.models)


def test_the_best_model_has_the_printed_accuracy(two_ranks, pictures):
    """Section 8's snippet, and a loop of its own over the pictures."""
    best = two_ranks.cwd / "checkpoints" / "best_model"
    net = model.ResNet18Animals90(num_classes=3, pretrained=False)
    net.load_state_dict(torch.load(best / "best" / "mp_rank_00_model_states.pt")["module"])
    net.eval()
    right = []
    for path in sorted(pictures.glob("val/*/*")):
        edge = 40 * 16 / 256
        image = Image.open(path).resize(
            (32, 32), Image.Resampling.BILINEAR, box=(edge, edge, 40 - edge, 40 - edge)
        )
        x = (np.asarray(image) / 255 - (0.485, 0.456, 0.406)) / (0.229, 0.224, 0.225)
        guess = net(torch.tensor(x, dtype=torch.float32).permute(2, 0, 1)[None]).argmax().item()
        right.append(path.parent.name == f"class_{guess:02d}")
    info = json.loads((best / "extra_info.json").read_text())
    assert len(right) == 15
    assert info["val_acc"] == info["best_val_acc"] == pytest.approx(100 * sum(right) / 15)
    assert info["best_epoch"] == info["epoch"]
    assert info["classes"] == ["class_00", "class_01", "class_02"]


FLOAT16 = """
from deepspeed.accelerator import get_accelerator
type(get_accelerator()).is_fp16_supported = lambda self: True
conv2d = torch.nn.functional.conv2d  # in float16, a hundred times slower on CPU
def in_float32(x, weight, *args):
    return conv2d(x.float(), weight.float(), *args).to(x.dtype)
torch.nn.functional.conv2d = in_float32
"""


@pytest.fixture
def float16(train, tmp_path):
    """float16({"loss_scale_window": 2}): 6 steps in float16, with these keys in the JSON's block.

    In a copy of the script that doesn't ask for a GPU.
    """
    copy = tmp_path / "examples" / "animals90"
    shutil.copytree(EXAMPLE, copy, ignore=shutil.ignore_patterns("data", "check*", "tests"))
    script = copy / "src" / "train_deepspeed.py"
    script.write_text(script.read_text().replace("fp16 and not on_gpu", "False"))

    def run(block):
        config = {**DEFAULT, "fp16": {**DEFAULT["fp16"], **block}}
        options = ("--fp16", "--batch_size=8")
        return done(train(*options, script=script, plant=FLOAT16, config=config))

    return run


def test_the_loss_scale_grows(float16):
    run = float16({"initial_scale_power": 4, "loss_scale_window": 2})
    assert run.epochs[0]["loss_scale"] == 2.0**6  # after 3 and 5 steps
    assert run.epochs[0]["skipped_steps"] == 0


def test_a_skipped_step_is_none_of_the_schedule_and_statistics_stay_float32(float16):
    run = float16({"initial_scale_power": 18, "hysteresis": 1})
    skipped = run.epochs[0]["skipped_steps"]
    assert 0 < skipped < 6
    assert run.epochs[0]["learning_rate"] == pytest.approx(0.001 * (6 - skipped) / 6)
    info = json.loads((run.cwd / "checkpoints" / "epoch_1" / "extra_info.json").read_text())
    assert info["steps"] == 6 - skipped
    module = saved_module(run.cwd / "checkpoints" / "epoch_1")
    for name, tensor in module.items():
        if "running" in name:
            assert tensor.dtype == torch.float32, name
        if "weight" in name:
            assert tensor.dtype == torch.float16, name


PRINT_RECIPE = """
import json
from runtime.engine import setup
def print_recipe(recipe, *args):
    print(json.dumps(vars(recipe)))
    raise SystemExit
setup.setup_device = print_recipe
"""


def test_the_json_says_which_adam_and_whether_there_is_a_warmup(train):
    def recipe(config, *args):
        config = {"zero_optimization": {"stage": 2}, **config}
        return json.loads(done(train(*args, plant=PRINT_RECIPE, config=config)).stdout)

    found = recipe(
        {
            "optimizer": {
                "type": "Adam",
                "params": {"lr": "auto", "betas": [0.8, 0.9], "eps": "auto"},
            },
            "flops_profiler": {"profile_step": 10, "module_depth": -1, "detailed": True},
        },
        f"--seed={9**30}",
    )
    assert (
        found["adamw"] == {"lr": 0.001, "weight_decay": 0.0, "betas": [0.8, 0.9]}
        and found["warmup_steps"] == 1
    )
    found = recipe(
        {
            "scheduler": {
                "type": "WarmupLR",
                "params": {"warmup_num_steps": "auto", "warmup_min_lr": 1e-4},
            }
        }
    )
    assert found["adamw"] == {"lr": 0.001, "weight_decay": 0.01}
    assert (found["start_lr"], found["warmup_steps"]) == (1e-4, 11)


@pytest.mark.parametrize(
    "config, sentences",
    [
        (
            {
                "optimizer": {
                    "type": "Lamb",
                    "params": {"learning_rate": 1, "weight_decy": 1, "lr": 0.1},
                },
                "scheduler": {"type": "OneCycle"},
                "train_batch_size": 5,
                "zero_optimization": {"stage": 3},
            },
            [
                '"optimizer.type" is "Lamb": write "AdamW" or "Adam"',
                '"optimizer.params.learning_rate" is not supported: remove it',
                '"optimizer.params.weight_decy" is not supported: did you mean',
                '"optimizer.params.lr" is 0.1: write 0.001 or "auto"',
                '"scheduler.type" is "OneCycle": write "WarmupLR"',
                '"train_batch_size" is 5, but the script sets it to 4',
                '"zero_optimization.stage" is 3: write 2',
            ],
        ),
        (
            {
                "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}},
                "optimizer": {"params": {"weight_decay": "0.1", "eps": float("inf")}},
                "fp16": {"enabled": True},
                "scheduler": {"params": {"warmup_num_steps": -3}},
                "flops_profiler": {"enabled": 1, "profile_step": "1"},
            },
            [
                "no effect below stage 3: remove it",
                '"optimizer.params.weight_decay" is "0.1": write a number of at least 0.0, or '
                '"auto"',
                '"optimizer.params.eps" is Infinity: write a number',
                '"scheduler.params.warmup_num_steps" is -3: write a number',
                '"fp16.enabled" is true, but dtype=float32: write "auto", or train in float16',
                '"flops_profiler.enabled" is 1: write true or false',
                '"flops_profiler.profile_step" is "1": write a whole number of at least 1',
            ],
        ),
        (
            {"zero_optimization": {"stage": 2}, "optimizer": {"params": {"betas": [0.9, 1]}}},
            ['"betas" is [0.9, 1]: write'],
        ),
        (
            {"zero_optimization": {"stage": 2}, "optimizer": {"params": 3}},
            ['"optimizer.params" must be an object'],
        ),
    ],
)
def test_jsons_are_refused(config, sentences, train):
    refused = train(config=config)
    assert refused.returncode == 2 and not [
        text for text in sentences if text not in refused.stderr
    ], refused.stderr
    assert refused.stderr.count("\n") == len(sentences)


@pytest.mark.long
def test_offload_does_without_a_compiler(train):
    run = done(train("--offload_optimizer", "--batch_size=14", plant=NO_COMPILER))
    assert (
        "cannot build DeepSpeed's CPU Adam (RuntimeError), so PyTorch's slower AdamW is used"
        in run.stdout
    )
    assert run.epochs[0]["train_loss"] > 0


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (
            ["--train_dir=nowhere"],
            r"nowhere does not exist: .*prepare.py --from FOLDER .*prepare.py --made_up .*",
        ),
        (
            ["--train_dir={pictures}/val/class_00"],
            "the class class_00 has no pictures .* has 0 classes: .* 2 or more",
        ),
        (
            [
                "--batch_size=0",
                "--learning_rate=0",
                "--image_size=31",
                "--fp16",
                "--bf16",
                "--config=x.json",
                "--offload_optimizer",
                "--resume=",
            ],
            "batch_size=0 is too small: .*\nlearning_rate=0.0 is too small: .*\n"
            "image_size=31 is too small: .*\n"
            "--resume has no value: write --resume PATH\n--fp16 and --bf16 exclude .*\n"
            "use one --config, or --offload_optimizer instead\n--fp16 needs a GPU: .*",
        ),
        (
            ["--batch_size=1", "--num_gpus=3"],
            "--num_gpus is an option of launch_deepspeed.py: .*\n--batch_size 1 needs .*",
        ),
        (
            ["--pretrained=nowhere"],
            "pretrained=nowhere isn't available or doesn't fit .*--pretrained none",
        ),
        (
            ["--resume={pictures}"],
            "resume=.* is not a complete checkpoint .*No such file.* drop --resume",
        ),
        (
            ["--log_dir={pictures}/train/class_00/00000.jpg"],
            "cannot write .*jpg .File exists.: .* another --log_dir=DIR",
        ),
    ],
)
def test_mistakes_are_refused_in_one_sentence(train, pictures, arguments, sentence):
    refused = train(*(argument.format(pictures=pictures) for argument in arguments))
    assert refused.returncode == 2 and re.search(f"^{sentence}\\n$", refused.stderr, re.S), (
        refused.stderr
    )
    assert not refused.stdout


@pytest.mark.long
def test_a_killed_worker_ends_the_run_in_one_sentence(train):
    """Also if PyTorch's signal handler raises inside a __del__, which Python can only report."""
    stopped = train(
        "--num_workers=1",
        plant="""
import data, signal, time
data.random_crop = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
class Slow:
    def __del__(self):
        time.sleep(600)
def load(self, epochs, load=data.Pictures.load):
    batches = load(self, epochs)
    if self.batches_per_epoch == 11:
        Slow()
    return batches
data.Pictures.load = load
""",
    )
    assert stopped.returncode == 2 and "Traceback" not in stopped.stderr
    *_, line = (
        stopped.stderr.splitlines()
    )  # the signal's exception may first meet tqdm, which prints a warning
    assert re.match(
        r"a file or a worker failed \(DataLoader worker .*\): .* fewer --num_workers", line
    )


def test_a_loss_that_is_not_finite_is_null_in_the_files(train, tmp_path):
    """The 3 batches of an epoch are too few to end the run.

    A resume takes the files, and curves have a gap there.
    """
    sizes = ("--batch_size=16", "--save_interval=1")
    first = done(train(*sizes, "--learning_rate=1e30", "--epochs=1"))
    history = first.cwd / "logs" / "training_history.json"
    info = first.cwd / "checkpoints" / "epoch_1" / "extra_info.json"
    for file in (history, info):
        assert not re.search("NaN|Infinity", file.read_text()), file
    assert json.loads(history.read_text())["epochs"][0]["val_loss"] is None

    resume = f"--resume={first.cwd}/checkpoints"
    second = done(train(*sizes, "--learning_rate=1e-3", "--epochs=2", resume, cwd=first.cwd))
    assert [epoch["epoch"] for epoch in second.epochs] == [1, 2]
    assert second.epochs[0] == first.epochs[0]
    done(launch(UTILS, f"--history={history}", f"--output={tmp_path}/curves.png"))


def test_a_loss_that_stays_nan_ends_the_run(train):
    """With 3 batches to train on and one to validate in each epoch."""
    stopped = train("--learning_rate=1e30", "--batch_size=16", "--epochs=9", "--save_interval=9")
    assert stopped.returncode == 2
    assert (
        stopped.stderr == "10 batches had no finite loss: lower --learning_rate, or drop --fp16\n"
    )


@pytest.mark.long
def test_a_killed_launcher_leaves_no_process_and_no_traceback(pictures, tmp_path):
    command = [
        sys.executable,
        EXAMPLE / "launch_deepspeed.py",
        "--num_gpus=2",
        f"--train_dir={pictures}/train",
        f"--val_dir={pictures}/val",
        "--pretrained=none",
        "--image_size=32",
        "--num_workers=1",
        "--epochs=5000",
    ]
    with open(tmp_path / "output", "w") as output:
        job = subprocess.Popen(
            command, cwd=tmp_path, stdout=output, stderr=output, start_new_session=True
        )
        try:
            wait_until(
                lambda: (
                    "Epoch 1/5000:" in (tmp_path / "output").read_text() or job.poll() is not None
                ),
                200,
            )
            processes = psutil.Process(job.pid).children(recursive=True)
            job.kill()
        finally:
            kill(job)
    assert "Traceback" not in (tmp_path / "output").read_text() and len(processes) >= 5
    assert not psutil.wait_procs(processes, timeout=patience(100))[1]


def test_every_command_of_the_readme_that_trains_is_accepted():
    blocks = re.findall(r"^```\n(.*?)^```", (EXAMPLE / "README.md").read_text(), re.M | re.S)
    commands = [
        shlex.split(line, comments=True)
        for line in "".join(blocks).replace("\\\n", " ").splitlines()
    ]
    trained = [
        words[words.index(script) + 1 :]
        for words in commands
        for script in ("launch_deepspeed.py", "src/train_deepspeed.py")
        if script in words
    ]
    for arguments in trained:
        configurator.settings_of_script(SCRIPT, arguments)
    assert len(trained) >= 18


def test_the_readme_shows_the_table_of_what_was_measured():
    assert (
        f"<!-- figures -->\n{figures.table()}\n<!-- end -->" in (EXAMPLE / "README.md").read_text()
    )
