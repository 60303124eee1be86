"""What a resume takes from a checkpoint, and which checkpoints are refused."""

import fcntl
import functools
import json
import re

import pytest
import torch
from animals90_runs import (
    NO_COMPILER,
    SMOOTH,
    TWO_RANKS,
    assert_same_tensors,
    edit_info,
    link_tree,
    saved_module,
)
from conftest import done

from runtime.files import write_atomic

pytest_plugins = ["animals90_runs"]  # fixtures


def test_a_resumed_run_is_the_run_that_never_stopped(train, two_ranks):
    cwd = two_ranks.cwd.with_name("resumed")
    cwd.mkdir()
    link_tree(two_ranks.cwd / "checkpoints" / "epoch_2", cwd / "checkpoints" / "epoch_2")
    resumed = done(train("--epochs=4", *TWO_RANKS, f"--resume={cwd}/checkpoints", ranks=2, cwd=cwd))
    assert "Epoch 3/4:" in resumed.stdout and "Epoch 2/4:" not in resumed.stdout
    assert resumed.epochs == two_ranks.epochs and len(resumed.epochs) == 4
    best = json.loads((cwd / "checkpoints" / "best_model" / "extra_info.json").read_text())
    assert best["epoch"] == best["best_epoch"] >= 3  # the best one in this folder
    assert_same_tensors(resumed.models[0], two_ranks.models[0])


@pytest.mark.long
@pytest.mark.parametrize("option, tolerance", [("--bf16", 0.0), ("--offload_optimizer", 1e-5)])
def test_a_resume_goes_on_in_bfloat16_and_with_offload(train, option, tolerance):
    """DeepSpeed's files have other names in bfloat16. Offload has PyTorch's AdamW on the CPU."""
    options = ("--epochs=2", "--save_interval=1", "--batch_size=8", option)
    whole = done(train(*options, plant=NO_COMPILER))
    resumed = done(train(*options, f"--resume={whole.cwd}/checkpoints/epoch_1", plant=NO_COMPILER))
    assert "Epoch 2/2:" in resumed.stdout and "Epoch 1/2:" not in resumed.stdout
    assert_same_tensors(resumed.models[0], whole.models[0], tolerance)
    assert resumed.epochs[1]["train_loss"] == pytest.approx(
        whole.epochs[1]["train_loss"], abs=tolerance
    )


PRINT_DECAY = """
from runtime.engine import setup
plain_adamw = setup.make_adamw
def adamw(*args, **options):
    optimizer = plain_adamw(*args, **options)
    atexit.register(lambda: print("weight decay", optimizer.param_groups[0]["weight_decay"]))
    return optimizer
import atexit
setup.make_adamw = adamw
"""


@pytest.mark.long
def test_the_json_counts_after_a_resume_too(train, two_ranks):
    """The checkpoint has the weight decay of its own run."""
    resume = f"--resume={two_ranks.cwd}/checkpoints/epoch_4"
    options = ("--epochs=4", *TWO_RANKS)
    resumed = done(train(resume, *options, ranks=2, config=SMOOTH, plant=PRINT_DECAY))
    assert "weight decay 0.5\n" in resumed.stdout


def test_another_number_of_ranks_takes_the_weights_of_the_newest_epoch(train, two_ranks, tmp_path):
    """The default JSON has round_robin_gradients, whose places in DeepSpeed's files are wrong."""
    for name in ("epoch_4", "best_model", "epoch_2"):  # in another order than they were saved in
        link_tree(two_ranks.cwd / "checkpoints" / name, tmp_path / name)
        edit_info(tmp_path / name)
    resumed = done(train(f"--resume={tmp_path}", "--epochs=4"))
    assert "Adam's moments begin anew" in resumed.stdout and not resumed.epochs
    assert "has 4 epochs: use --epochs 5 or more to train on" in resumed.stdout
    assert_same_tensors(resumed.models[0], two_ranks.models[0])


def test_a_resume_adds_the_epoch_that_a_kill_after_best_model_left_out(train, two_ranks, tmp_path):
    link_tree(two_ranks.cwd / "checkpoints" / "best_model", tmp_path / "checkpoints" / "best_model")
    best = json.loads((tmp_path / "checkpoints" / "best_model" / "extra_info.json").read_text())
    resumed = done(
        train(f"--epochs={best['epoch']}", f"--resume={tmp_path}/checkpoints", cwd=tmp_path)
    )
    added = tmp_path / "checkpoints" / f"epoch_{best['epoch']}"
    assert json.loads((added / "extra_info.json").read_text()) == best | {
        "saved_by": [1, "float32", False]
    }
    assert_same_tensors(saved_module(added), resumed.models[0])
    assert len([*added.glob("*/*_states.pt")]) == 2


@pytest.mark.long
def test_a_kill_in_the_middle_of_a_save_leaves_the_one_before(train):
    killed = train(
        "--epochs=3",
        "--save_interval=1",
        "--batch_size=16",
        plant="""
import runtime.files
replace_dir, calls = runtime.files.replace_dir, []
def die(new, path):
    calls.append(path)
    if len(calls) == 2:  # epoch_1, after best_model: half of the renames are done
        os.rename(path.with_name("best_model"), path.with_name("best_model.old"))
        os._exit(9)
    replace_dir(new, path)
runtime.files.replace_dir = die
""",
    )
    checkpoints = killed.cwd / "checkpoints"
    assert killed.returncode == 9 and {path.name for path in checkpoints.iterdir()} == {
        ".lock",
        ".saving",
        "best_model.old",
    }
    resumed = done(
        train("--epochs=2", "--batch_size=16", f"--resume={checkpoints}", cwd=killed.cwd)
    )
    assert [epoch["epoch"] for epoch in resumed.epochs] == [1, 2]
    assert not (checkpoints / ".saving").exists() and (checkpoints / "epoch_2").exists()


def test_overwriting_keeps_the_earlier_run_until_there_is_a_checkpoint(train, two_ranks, tmp_path):
    """The limit on a file's size makes torch.save raise what a full disk does."""
    for name in ("epoch_4", "best_model", "best_model.old"):
        link_tree(two_ranks.cwd / "checkpoints" / "epoch_4", tmp_path / "checkpoints" / name)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "training_history.json").write_text('{"epochs": 3}')
    stopped = train(
        "--overwrite",
        cwd=tmp_path,
        plant="""
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000_000, 10_000_000))
""",
    )
    assert stopped.returncode == 2 and re.fullmatch(
        "a file or a worker failed .*: make room, .*\n", stopped.stderr
    )
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {
        ".lock",
        "epoch_4",
        "best_model",
        "best_model.old",
    }
    done(train("--overwrite", "--batch_size=16", cwd=tmp_path))
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {
        ".lock",
        "best_model",
        "epoch_1",
    }


def test_a_checkpoint_of_other_pictures_or_of_another_run_is_refused(train, two_ranks, tmp_path):
    checkpoints = two_ranks.cwd / "checkpoints"
    lock = open(tmp_path / ".lock", "w")
    fcntl.lockf(lock, fcntl.LOCK_EX)
    for name in ("other", "later"):
        link_tree(checkpoints / "best_model", tmp_path / name / "best_model")
    edit_info(tmp_path / "other" / "best_model", epochs=[{"epoch": 1, "seconds": 1.0}])
    edit_info(tmp_path / "later" / "best_model", epoch=9)
    resume, other = (
        f"--resume={checkpoints}/epoch_4",
        "is of another run or later epoch: use --resume, other folders",
    )
    for arguments, sentence in (
        ([resume, "--image_size=48"], r"epoch_4 has other image_size \(32\): drop --resume"),
        ([], f"^[^\n]*checkpoints/\\w+/extra_info.json {other} or --overwrite\n$"),
        (
            [resume, f"--checkpoint_dir={tmp_path}/other"],
            f"other/best_model/extra_info.json {other}",
        ),
        (
            [resume, f"--checkpoint_dir={tmp_path}/later"],
            f"later/best_model/extra_info.json {other}",
        ),
        (
            [f"--checkpoint_dir={tmp_path}"],
            f"^another run is writing to {tmp_path}: .*--checkpoint_dir=DIR\n$",
        ),
        (
            [f"--checkpoint_dir={tmp_path}/x", f"--log_dir={tmp_path}"],
            f"writing to {tmp_path}: .*--log_dir=DIR\n$",
        ),
        (
            [f"--checkpoint_dir={tmp_path}/x", f"--log_dir={two_ranks.cwd}/logs"],
            f"training_history.json {other}",
        ),
    ):
        refused = train(f"--checkpoint_dir={checkpoints}", *arguments)
        assert refused.returncode == 2 and re.search(sentence, refused.stderr), refused.stderr


def test_an_incomplete_or_dangerous_checkpoint_is_refused(train, two_ranks, tmp_path):
    def dangerous(folder, file):
        file.unlink()
        torch.save({"x": functools.partial(print)}, file)

    for i, (damage, sentence) in enumerate(
        (
            (lambda folder, file: file.unlink(), "No such file or directory: '"),
            (
                lambda folder, file: write_atomic(file, file.read_bytes()[:-100]),
                "File is not a zip file): change",
            ),
            (lambda folder, file: (folder / "latest").unlink(), "latest'): change or drop"),
            (
                lambda folder, file: edit_info(folder, steps="4", classes=None),
                "classes is None: Input should be",
            ),
            (dangerous, "could run code: ['builtins.print', 'functools.partial']"),
        )
    ):
        folder = tmp_path / str(i)
        link_tree(two_ranks.cwd / "checkpoints" / "epoch_4", folder)
        damage(folder, next(folder.glob("epoch_4/*zero_pp_rank_1*")))
        refused = train(f"--resume={folder}")
        assert refused.returncode == 2 and sentence in refused.stderr, refused.stderr
        assert refused.stderr.count("\n") == 1
