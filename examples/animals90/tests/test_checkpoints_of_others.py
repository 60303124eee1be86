"""Checkpoints that somebody else may have written: nothing of them runs, hangs, or ends in a
traceback.
"""

import io
import os
import pkgutil
import shutil
import zipfile

import pytest
import torch
from animals90_runs import TWO_RANKS, assert_same_tensors, link_tree, one_sentence
from conftest import Payload, done

from runtime.engine.layout import save_stage_by_its_class
from runtime.torch_files import SAFE_GLOBALS

pytest_plugins = ["animals90_runs"]  # fixtures


def attack(folder, tag, file, payload):
    """Replace a file of a tag by one whose pickle leaves a mark."""
    path = folder / tag / file
    path.unlink()
    torch.save(payload, path)


@pytest.mark.parametrize("ranks", [1, 2])
def test_latest_cannot_name_another_folder_than_the_one_that_is_checked(
    train, two_ranks, tmp_path, ranks
):
    """DeepSpeed strips "best " to "best"."""
    folder, mark = tmp_path / "best_model", tmp_path / "ran"
    link_tree(two_ranks.cwd / "checkpoints" / "best_model", folder)
    link_tree(folder / "best", folder / "best ")
    for path in [*(folder / "best").iterdir()]:
        attack(folder, "best", path.name, Payload(mark))
    (folder / "latest").unlink()
    (folder / "latest").write_text("best ")
    refused = train(f"--resume={folder}", "--epochs=4", *TWO_RANKS, ranks=ranks)
    assert not mark.exists()
    one_sentence(
        refused,
        "/best_model/latest names 'best ', and this example writes best or epoch_N): change or ",
    )


@pytest.mark.parametrize(
    "tag",
    [
        "../epoch_4/epoch_4",
        "/tmp",
        "epoch_4/",
        "epoch_4\n",
        "epoch_4/../epoch_4",
        "",
        "epoch_\N{ARABIC-INDIC DIGIT FOUR}",
        "epoch_4" + 99 * " ",
        "\x1b[2J",
    ],
)
def test_latest_is_a_name_that_the_example_writes(train, two_ranks, tmp_path, tag):
    link_tree(two_ranks.cwd / "checkpoints" / "epoch_4", tmp_path / "epoch_4")
    (tmp_path / "epoch_4" / "latest").unlink()
    (tmp_path / "epoch_4" / "latest").write_text(tag)
    one_sentence(
        train(f"--resume={tmp_path}/epoch_4"),
        "is not a complete checkpoint (",
        "latest",
        "): change or drop",
    )


MODEL, FIRST, SECOND = (
    "mp_rank_00_model_states.pt",
    "zero_pp_rank_0_mp_rank_00_optim_states.pt",
    "zero_pp_rank_1_mp_rank_00_optim_states.pt",
)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("file", [MODEL, SECOND])
def test_no_pickle_of_a_checkpoint_runs_code(train, two_ranks, tmp_path, file, ranks):
    link_tree(two_ranks.cwd / "checkpoints" / "epoch_4", tmp_path / "epoch_4")
    attack(tmp_path / "epoch_4", "epoch_4", file, {"module": Payload(tmp_path / "ran")})
    refused = train(f"--resume={tmp_path}", "--epochs=4", *TWO_RANKS, ranks=ranks)
    assert not (tmp_path / "ran").exists()
    one_sentence(refused, f"{file} could run code: ['posix.mkdir']): change or drop --resume")


def test_a_checkpoint_that_changes_after_its_check_runs_no_code(train, two_ranks, tmp_path):
    """Each file is opened once. Here another user replaces it once the classes in it are listed."""
    link_tree(two_ranks.cwd / "checkpoints" / "epoch_4", tmp_path / "epoch_4")
    torch.save({"module": Payload(tmp_path / "ran")}, tmp_path / "evil.pt")
    resumed = train(
        f"--resume={tmp_path}/epoch_4",
        "--epochs=4",
        plant=f"""
import shutil, torch
check = torch.serialization.get_unsafe_globals_in_checkpoint
def check_and_replace(file):
    found = check(file)
    path = os.readlink(f"/proc/self/fd/{{file.fileno()}}") if hasattr(file, "fileno") else file
    os.unlink(path)
    shutil.copy({str(tmp_path / "evil.pt")!r}, path)
    return found
torch.serialization.get_unsafe_globals_in_checkpoint = check_and_replace
""",
    )
    assert not (tmp_path / "ran").exists()
    assert_same_tensors(done(resumed).models[0], two_ranks.models[0])
    assert (tmp_path / "epoch_4" / "epoch_4" / SECOND).read_bytes() == (
        tmp_path / "evil.pt"
    ).read_bytes()


def edit_states(path, change):
    """Change the content of one of DeepSpeed's files."""
    safe = [pkgutil.resolve_name(name) for name in SAFE_GLOBALS]
    with torch.serialization.safe_globals(safe):
        content = torch.load(path)
    change(content)
    path.unlink()
    save_stage_by_its_class()
    torch.save(content, path)


def pack(path):
    """Compress the records of a file, which torch.save doesn't do: 1 MB may unpack to 1 GB."""
    content = path.read_bytes()
    path.unlink()
    with (
        zipfile.ZipFile(io.BytesIO(content)) as old,
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for name in old.namelist():
            new.writestr(name, bytes(len(old.read(name))) if "/data/" in name else old.read(name))


def replace_by(make):
    """A damage: unlink a file, and make something else there."""

    def damage(path):
        path.unlink()
        make(path)

    return damage


def optimizer_with(**values):
    return lambda path: edit_states(
        path, lambda states: states["optimizer_state_dict"].update(values)
    )


def scaler_with(**values):
    return lambda path: edit_states(
        path, lambda states: vars(states["optimizer_state_dict"]["loss_scaler"]).update(values)
    )


def adam_with(**values):
    return lambda path: edit_states(
        path,
        lambda states: states["optimizer_state_dict"]["base_optimizer_state"]["state"][0].update(
            values
        ),
    )


DAMAGES = {  # {name: (ranks, file, damage, what the sentence says)}
    "pipe": (1, MODEL, replace_by(os.mkfifo), "is a pipe or a device, not a file"),
    "device": (
        1,
        SECOND,
        replace_by(lambda path: path.symlink_to("/dev/zero")),
        "is a link, which is not followed",
    ),
    "folder": (1, MODEL, replace_by(os.mkdir), "Is a directory"),
    "no pickle": (
        1,
        MODEL,
        replace_by(lambda path: path.write_bytes(b"nothing")),
        "File is not a zip file",
    ),
    "packed": (1, SECOND, pack, "_optim_states.pt unpacks to 67,071,189 bytes"),
    "large": (
        1,
        FIRST,
        lambda path: os.truncate(path, 1_000_000_001),
        "has 1,000,000,001 bytes, and at most",
    ),
    "no module": (
        1,
        MODEL,
        lambda path: edit_states(path, lambda states: states.pop("module")),
        "KeyError: 'module'",
    ),
    "list": (1, MODEL, replace_by(lambda path: torch.save([1], path)), "TypeError: list indices"),
    "other model": (
        1,
        MODEL,
        lambda path: edit_states(path, lambda states: states["module"].popitem()),
        "mp_rank_00_model_states.pt has another model",
    ),
    "other shape": (
        1,
        MODEL,
        lambda path: edit_states(
            path, lambda states: states["module"].update({"classifier.1.bias": torch.zeros(4)})
        ),
        "shape (4,), not (3,)",
    ),
    "expanded": (
        1,
        FIRST,
        optimizer_with(single_partition_of_fp32_groups=[torch.zeros(1).expand(2**40)]),
        "no tensor",
    ),
    "meta": (
        1,
        FIRST,
        optimizer_with(single_partition_of_fp32_groups=[torch.zeros(9, device="meta")]),
        "no tensor of",
    ),
    "short part": (
        1,
        FIRST,
        optimizer_with(single_partition_of_fp32_groups=[torch.zeros(9)]),
        " weights, not 11,178,051",
    ),
    "short rank": (
        2,
        FIRST,
        optimizer_with(single_partition_of_fp32_groups=[torch.zeros(9)]),
        "has shape (9,), not (",
    ),
    "moments": (
        2,
        SECOND,
        adam_with(exp_avg=torch.zeros(9), exp_avg_sq=torch.zeros(9)),
        "exp_avg has shape (9,), not",
    ),
    "step": (2, SECOND, adam_with(step=float("nan")), "step is no number from 0 to"),
    "loss scale": (
        2,
        FIRST,
        scaler_with(dynamic=True, cur_scale="1" * 99),
        "cur_scale is no number from -1 to",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_of_a_checkpoint_is_one_sentence(train, two_ranks, tmp_path, name):
    ranks, file, damage, sentence = DAMAGES[name]
    link_tree(two_ranks.cwd / "checkpoints" / "epoch_4", tmp_path / "epoch_4")
    path = tmp_path / "epoch_4" / "epoch_4" / file
    shutil.copy2(path, tmp_path / "copy")  # the other links stay as they are
    (tmp_path / "copy").replace(path)
    damage(path)
    refused = train(
        f"--resume={tmp_path}/epoch_4", "--epochs=4", *TWO_RANKS, ranks=ranks, timeout=60
    )
    one_sentence(
        refused,
        f"resume={tmp_path}/epoch_4 is not a complete checkpoint (",
        sentence,
        "): change or drop",
    )
