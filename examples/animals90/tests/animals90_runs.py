"""What the tests of this example share: small pictures, small runs, and comparisons."""

import importlib.util
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, done, launch, planted
from transformers import ResNetConfig, ResNetForImageClassification

from runtime.files import write_atomic

torch.set_num_threads(1)  # conftest.py sets it, too, but perhaps after PyTorch was imported
EXAMPLE = ROOT / "examples" / "animals90"
SCRIPT = EXAMPLE / "src" / "train_deepspeed.py"
PLAIN = EXAMPLE / "measure" / "plain.py"
UTILS = EXAMPLE / "src" / "utils.py"
DEFAULT_JSON = EXAMPLE / "ds_config_rtx5090.json"
DEFAULT = json.loads(DEFAULT_JSON.read_text())
# Adam doesn't make steps of rounding errors, and weight decay is strong
SMOOTH = {**DEFAULT, "optimizer": {"type": "AdamW", "params": {"eps": 1e-1, "weight_decay": 0.5}}}
TWO_RANKS = ("--batch_size=8", "--gradient_accumulation_steps=2")
TIMES = ("seconds", "val_seconds", "images_per_s", "it_per_s", "waited_s", "memory_gb")

# Each rank keeps the model that its script makes, and saves it when the run ends as it should
SAVE_MODEL = """
import sys
sys.path.insert(0, {source!r})  # whose model.py is another one than the project's

import torch
import model as network
from runtime.cluster import ranks

made = []

class Kept(network.ResNet18Animals90):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        made.append(self)

def save_and_shut_down(code=0, shut_down=ranks.shut_down):
    for one in made:
        torch.save(one.state_dict(), "{folder}/model_%d.pt" % ranks.RANK)
    shut_down(code)

network.ResNet18Animals90 = Kept
ranks.shut_down = save_and_shut_down
"""
NO_COMPILER = """
from deepspeed.ops.op_builder import CPUAdamBuilder
def load(self):
    raise RuntimeError("no compiler")
CPUAdamBuilder.load = load
"""

ESCAPE = "\x1b]0;x\a\x1b[2J\n"  # a title, a clear screen and a new line


def load(name):
    """A module of the example. Its names model and data are the project's in this process."""
    spec = importlib.util.spec_from_file_location(f"animals90_{Path(name).stem}", EXAMPLE / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


model = load("src/model.py")
data = load("src/data.py")
figures = load(EXAMPLE / "measure" / "table.py")


def prepare(*args, to):
    return launch(EXAMPLE / "prepare.py", *args, f"--to={to}")


@pytest.fixture(scope="session")
def pictures(tmp_path_factory):
    """3 classes of 14 and 5 pictures: 42 in batches of 4 are 11 batches, the last one of 2."""
    folder = tmp_path_factory.mktemp("animals") / "data"
    sizes = ("--classes=3", "--train=14", "--val=5", "--size=40")
    done(prepare("--made_up", *sizes, to=folder))
    return folder


@pytest.fixture(scope="session")
def weights(tmp_path_factory):
    """A folder that transformers saved: a ResNet-18 for 3 classes with random weights."""
    folder = tmp_path_factory.mktemp("weights")
    torch.manual_seed(0)
    config = ResNetConfig(
        layer_type="basic",
        depths=[2, 2, 2, 2],
        hidden_sizes=[64, 128, 256, 512],
        num_labels=3,
    )
    ResNetForImageClassification(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def train(pictures, weights, tmp_path_factory):
    """train("--epochs=2", ranks=2, cwd=..., plant="code", config={...}): a small run.

    It returns returncode, stdout, stderr, cwd, epochs (the history's records without their times)
    and models (of each rank at the end).
    """

    def run(*args, ranks=1, cwd=None, plant="", script=SCRIPT, config=None, **options):
        cwd = cwd or tmp_path_factory.mktemp("run")
        small = [
            f"--train_dir={pictures}/train",
            f"--val_dir={pictures}/val",
            f"--pretrained={weights}",
            "--image_size=32",
            "--num_workers=0",
            "--batch_size=4",
            "--epochs=1",
            f"--log_dir={cwd}/logs",
        ]
        if script != PLAIN:
            small.append(f"--checkpoint_dir={cwd}/checkpoints")
        if config:
            (cwd / "ds.json").write_text(json.dumps(config))
            args = [*args, f"--config={cwd}/ds.json"]
        saving = SAVE_MODEL.format(source=str(script.parent), folder=cwd)
        if script == PLAIN:
            saving = SAVE_MODEL.format(source=str(SCRIPT.parent), folder=cwd)
        file = planted(cwd, f"{saving}\n{plant}", script)
        ended = launch(file, *small, *args, ranks=ranks, **options)

        history = cwd / "logs" / "training_history.json"
        epochs = []
        if history.exists():
            for record in json.loads(history.read_text())["epochs"]:
                epochs.append({key: value for key, value in record.items() if key not in TIMES})
        return SimpleNamespace(
            returncode=ended.returncode,
            stdout=ended.stdout,
            stderr=ended.stderr,
            cwd=cwd,
            epochs=epochs,
            models=[torch.load(path) for path in sorted(cwd.glob("model_*.pt"))],
        )

    return run


@pytest.fixture(scope="session")
def two_ranks(train):
    """4 epochs on 2 ranks: 42 pictures are 3 batches of each, and with 2 batches per step 4."""
    options = ("--epochs=4", "--save_interval=2", f"--deepspeed_config={DEFAULT_JSON}")
    return done(train(*options, *TWO_RANKS, ranks=2))


def link_tree(source, to):
    """Copy a folder by hard links: a checkpoint has 134 MB."""
    shutil.copytree(source, to, copy_function=os.link)


def edit_info(folder, **changes):
    path = folder / "extra_info.json"
    info = json.loads(path.read_text())
    write_atomic(path, json.dumps(info | changes))  # a new file: the old one has other links


def saved_module(folder):
    (file,) = folder.glob("*/mp_rank_00_model_states.pt")
    return torch.load(file)["module"]


def assert_same_tensors(one, other, tolerance=0.0):
    torch.testing.assert_close(dict(one), dict(other), rtol=tolerance, atol=tolerance)


def one_sentence(run, *parts):
    """Assert that a run ended with exit code 2 and one line, with these parts and no escapes."""
    assert run.returncode == 2, run.stdout + run.stderr
    assert run.stderr.count("\n") == 1 and "\x1b" not in run.stdout + run.stderr, run.stderr
    assert not [part for part in parts if part not in run.stderr], run.stderr
