"""Records, weights and links that somebody else may have put in a run's folders: nothing runs,
hangs, ends in a traceback, or is written through a link.
"""

import functools
import json
import os

import pytest
import torch
from animals90_runs import ESCAPE, UTILS, one_sentence
from conftest import done, launch
from PIL import Image

pytest_plugins = ["animals90_runs"]  # fixtures

HUGE = "1" + "0" * 400

BAD_INFOS = {  # {name: (key, JSON, what the sentence says)}
    "NaN": ("best_val_acc", "NaN", "best_val_acc is nan: Input should be"),
    "infinity": ("time", "1e999", "time is inf: Input should be less than or equal to"),
    "number as text": ("steps", '"4"', "steps is '4': Input should be a valid integer"),
    "boolean": ("epoch", "true", "epoch is True: Input should be a valid integer"),
    "many digits": ("epoch", HUGE, "it holds a number of 401 digits"),
    "nesting": ("extra", "[" * 100_000 + "]" * 100_000, "it is nested more than 50 deep"),
    "ranks": ("saved_by", f'[{"9" * 30}, "float32", false]', "saved_by.0 is 99999999999"),
    "precision": (
        "saved_by",
        f'[1, "{"x" * 1000}", false]',
        "Input should be 'float32', 'float16' or 'bfloat16'",
    ),
    "epochs": ("epochs", "[[]]", "epochs.0 is []: Input should be a valid dictionary"),
    "escapes": (
        "image_size",
        json.dumps(ESCAPE),
        r"image_size is '\x1b]0;x\x07\x1b[2J\n': Input should",
    ),
}


@pytest.mark.parametrize("name", BAD_INFOS)
def test_a_json_of_others_is_one_sentence(train, tmp_path, name):
    key, value, sentence = BAD_INFOS[name]
    keys = {
        "saved_by": '[1, "float32", false]',
        "classes": "[]",
        "image_size": "32",
        "epoch": "1",
        "epochs": "[]",
        "steps": "1",
        "best_val_acc": "50",
        "best_epoch": "1",
        key: value,
    }
    text = ", ".join(f'"{name}": {json}' for name, json in keys.items())
    (tmp_path / "extra_info.json").write_text("{" + text + "}")
    refused = train(f"--resume={tmp_path}", timeout=60)
    one_sentence(refused, "extra_info.json can't be used (", sentence, "): change or drop --resume")


NO_FILES = {  # {name: (what makes it, what the sentence says)}
    "pipe": (os.mkfifo, "is a pipe or a device, not a file: replace it with a file"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "is a pipe or a device, not a file"),
    "large": (
        lambda path: (path.touch(), os.truncate(path, 20_000_001)),
        "has 20,000,001 bytes, and at most 20,000",
    ),
    "text": (
        lambda path: path.write_text(ESCAPE),
        "can't be used (Expecting value: line 1 column 1",
    ),
    "array": (
        lambda path: path.write_text("[]"),
        "can't be used (its content is []: Input should be a valid dict",
    ),
    "none": (lambda path: path.write_text('{"epochs": []}'), "List should have at least 1 item"),
    "text as number": (
        lambda path: path.write_text('{"epochs": [{"epoch": 1, "train_loss": "2"}]}'),
        "epochs.0.train_loss is '2': Input should be a valid number",
    ),
    "digits": (
        lambda path: path.write_text(f'{{"epochs": [{{"epoch": {HUGE}}}]}}'),
        "it holds a number of 401 digits",
    ),
}


@pytest.mark.parametrize("name", NO_FILES)
def test_a_history_of_others_is_one_sentence(tmp_path, name):
    make, sentence = NO_FILES[name]
    make(tmp_path / "history.json")
    drawn = launch(
        UTILS, f"--history={tmp_path}/history.json", f"--output={tmp_path}/curves.png", timeout=60
    )
    one_sentence(drawn, "can't draw: ", sentence)
    assert not (tmp_path / "curves.png").exists()


@pytest.mark.parametrize(
    "make",
    [
        os.mkfifo,
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.write_text("[" * 100_000),
    ],
    ids=["pipe", "device", "nesting"],
)
def test_what_cannot_be_read_in_checkpoint_dir_is_of_another_run(train, tmp_path, make):
    (tmp_path / "checkpoints" / "best_model").mkdir(parents=True)
    make(tmp_path / "checkpoints" / "best_model" / "extra_info.json")
    one_sentence(
        train(cwd=tmp_path, timeout=60),
        "best_model/extra_info.json is of another run or later epoch: use",
    )


@pytest.mark.parametrize(
    "make",
    [
        os.mkfifo,
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: torch.save(functools.partial(print), path),
    ],
    ids=["pipe", "device", "code"],
)
def test_pretrained_weights_of_others_are_one_sentence(train, tmp_path, make):
    make(tmp_path / "weights.pt")
    refused = train(f"--pretrained={tmp_path}/weights.pt", timeout=60)
    one_sentence(
        refused,
        f"pretrained={tmp_path}/weights.pt isn't available or doesn't fit (",
        "): use --pretrained",
    )
    assert "weights_only" not in refused.stderr


def test_training_writes_through_no_link(train, tmp_path):
    """Into a folder where others have put links to a file and to a folder of the user."""
    precious = tmp_path / "precious"
    (precious / "best").mkdir(parents=True)
    for name in ("latest", "best/mp_rank_00_model_states.pt", "zero_to_fp32.py", "extra_info.json"):
        (precious / name).write_text('{"epochs": []}')
    before = {path: path.stat().st_mtime_ns for path in precious.rglob("*")}
    for i, (link, target, sentence) in enumerate(
        (
            (
                "checkpoints/.saving",
                precious,
                "/.saving is a link or a file, not a folder with a checkpoint: remove",
            ),
            (
                "checkpoints/best_model",
                precious,
                "/best_model is a link or a file, not a folder with a checkpoint",
            ),
            (
                "checkpoints/epoch_1",
                tmp_path / "none",
                "/epoch_1 is a link or a file, not a folder with a checkpoint",
            ),
            (
                "logs/training_history.json",
                precious / "latest",
                "training_history.json is a link, and writing would",
            ),
        )
    ):
        path = tmp_path / str(i) / link
        path.parent.mkdir(parents=True)
        path.symlink_to(target)
        for arguments in ([], ["--overwrite"]):
            one_sentence(train(*arguments, cwd=tmp_path / str(i)), sentence)
        assert path.readlink() == target
    assert before == {path: path.stat().st_mtime_ns for path in precious.rglob("*")}
    assert not (tmp_path / "none").exists()


def test_curves_are_written_through_no_link(two_ranks, tmp_path):
    history = two_ranks.cwd / "logs" / "training_history.json"
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "link.png").symlink_to("precious")
    os.link(tmp_path / "precious", tmp_path / "hard_link.png")
    os.mkfifo(tmp_path / "pipe.png")
    for name, sentence in (
        ("link", "is a link, and writing would change its target: remove it"),
        ("pipe", "is a pipe or a device, not a file: replace it with a file"),
    ):
        refused = launch(
            UTILS, f"--history={history}", f"--output={tmp_path}/{name}.png", timeout=60
        )
        one_sentence(refused, f"{name}.png {sentence}")
    done(launch(UTILS, f"--history={history}", f"--output={tmp_path}/hard_link.png"))
    assert (tmp_path / "precious").read_text() == "mine"
    assert Image.open(tmp_path / "hard_link.png").size == (1200, 800)
