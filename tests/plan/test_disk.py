"""The checkpoints of a run on a small disk: how many there are at most, which are kept, and which make room."""

import itertools
import os
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
from conftest import EIGHT, ROOT, small_manifest

from configurator import settings_of_script
from runtime.checkpoint.manifest import sign_manifest
from runtime.checkpoint.saver import tag_bytes
from runtime.checkpoint.tags import TagStore
from runtime.cluster.ranks import Ranks
from runtime.errors import UserError
from runtime.plan import out_dir as planned
from runtime.plan.memory import ParamCount
from runtime.plan.out_dir import check_disk, expected_on_disk
from runtime.plan.start import Start


@pytest.fixture(scope="module")
def check():
    """check(out_dir, resume=tag, keep_last=2): call check_disk() for tags of 1 GB."""
    settings = settings_of_script(str(ROOT / "train_deepspeed.py"), ["--max_iters=20", "--eval_interval=5"])

    def run(out_dir, resume=None, max_iters=20, on_disk=0, **changes):
        start = Start("resume" if resume else "scratch", "", None, (), tag=resume)
        s = replace(settings, out_dir=str(out_dir), max_iters=max_iters, **changes)
        check_disk(s, start, 10**9, on_disk)

    return run


def set_free(monkeypatch, room):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=int(1.02e9 * room)))


def write_tags(out_dir, tags):
    """Write tags {name: iteration} of 1 GB. Those of the same iteration are links to the same files."""
    for name, iter_num in tags.items():
        same = [other for other in os.listdir(out_dir) if tags.get(other) == iter_num]
        if same:
            shutil.copytree(out_dir / same[0], out_dir / name, copy_function=os.link)
            continue
        (out_dir / name).mkdir()
        manifest = sign_manifest(small_manifest(iter_num, improved=iter_num == tags.get("best")))
        (out_dir / name / "manifest.json").write_text(manifest)
        (out_dir / name / "model.pt").write_bytes(b"")
        os.truncate(out_dir / name / "model.pt", 10**9 - len(manifest))  # takes no space


def most_at_once(tags, evals, always_save):
    """Play a run from these tags through every order of better and worse losses; -> the most checkpoints at once, if
    each save first deletes all but the newest, best and final."""
    most = len({tags[name] for name in tags if name in ("best", "final")} | set(sorted(tags.values())[-1:]))
    for improved in itertools.product((False, True), repeat=len(evals)):
        newest, best, final = max(tags.values(), default=None), tags.get("best"), tags.get("final")
        for iter_num, better in zip(evals, improved):
            better, last = better or best is None, iter_num == evals[-1]
            if better or last or always_save:
                most = max(most, len({newest, best, final, iter_num} - {None}))
                newest, best, final = iter_num, iter_num if better else best, iter_num if last else final
    return most


@pytest.mark.parametrize("tags", [
    {}, {"iter_5": 5, "best": 5}, {"iter_5": 5, "iter_10": 10, "best": 5}, {"iter_12": 12, "best": 5},
    {"iter_5": 5, "iter_10": 10, "best": 10}, {"iter_5": 5, "iter_10": 10, "best": 10, "final": 10},
    {"iter_10": 10, "best": 5, "final": 10}], ids=str)
def test_room_for_the_worst_run_and_no_more(check, monkeypatch, tmp_path, tags):
    write_tags(tmp_path, tags)
    resume = max(tags, key=tags.get, default=None)
    held = len({iter_num for name, iter_num in tags.items() if name in (resume, "best", "final")})
    deletable = len(set(tags.values())) - held
    for always_save, last in itertools.product((True, False), (15, 20, 28, 40)):
        evals = sorted({*range(5, last, 5), last} - set(range(tags.get(resume, 0) + 1)))
        worst = most_at_once(tags, evals, always_save)
        set_free(monkeypatch, worst - held - deletable + 0.1)
        check(tmp_path, resume, last, always_save_checkpoint=always_save)
        set_free(monkeypatch, worst - held - deletable - 0.1)
        with pytest.raises(UserError, match=f"{worst} checkpoints of 1.00 GB exist at the same time"):
            check(tmp_path, resume, last, always_save_checkpoint=always_save)


@pytest.mark.parametrize("room, changes, words", [
    (3.5, {}, None),
    (2.1, {}, "has room for 2: add --always_save_checkpoint=False, make room, or choose another --out_dir=DIR"),
    (1.9, {}, "has room for 1: save once, at the end, with --eval_interval=20, make room, or"),
    (1.9, {"eval_interval": 20}, None),
    (0.9, {}, "has room for 0: save none with --keep_last=0, make room, or")], ids=str)
def test_what_a_user_is_told(check, monkeypatch, tmp_path, room, changes, words):
    set_free(monkeypatch, room)
    try:
        check(tmp_path, **{"keep_last": 9, **changes})
        assert words is None
    except UserError as error:
        assert words in str(error)


@pytest.mark.parametrize("gb, muon, async_save, ranks, expected", [
    (30.0, 0, True, 1, 0),  # a copy of 21.81 GB fits, with a tenth that stays free and 2 GB for the process
    (25.9, 0, True, 1, 0), (25.9, 0, False, 1, 0),  # without a copy, the three tensors of 6.23 GB fit one by one
    (20.0, 0, True, 1, 6.23), (14.0, 0, True, 1, 12.46), (8.0, 0, True, 1, 18.69),
    (20.0, 1_475 * 10**6, True, 1, 0),  # Muon's moment is small
    (44.0, 0, True, 8, 0), (17.0, 0, True, 8, 18.69)])
def test_what_a_save_of_compact_xl_takes_on_the_disk(monkeypatch, gb, muon, async_save, ranks, expected):
    """GPT-2 XL's parameters, in GB."""
    monkeypatch.setattr(planned, "available_memory", lambda: gb * 1e9)
    params = ParamCount(total=1_557_611_200, stored=1_557_686_400, trainable=1_557_686_400, muon=muon)
    s = SimpleNamespace(compact_optimizer=True, target_gpu=None, async_save=async_save)
    of_ranks = Ranks(0, 0, ranks, ranks)
    size = tag_bytes(params, "bfloat16", 2)
    assert expected_on_disk(s, params, size, of_ranks) / 1e9 == pytest.approx(expected, abs=0.01)
    for other in ({"compact_optimizer": False}, {"target_gpu": "24"}):
        assert expected_on_disk(SimpleNamespace(**{**vars(s), **other}), params, size, of_ranks) == 0


def test_what_a_save_takes_besides_needs_room(check, monkeypatch, tmp_path):
    """Three tags of 1 GB, and 0.86 GB more while each is written."""
    set_free(monkeypatch, 3.95)
    check(tmp_path, on_disk=860_000_000)
    set_free(monkeypatch, 3.8)
    check(tmp_path)
    with pytest.raises(UserError) as error:
        check(tmp_path, on_disk=860_000_000)
    assert str(error.value) == (
        "3 checkpoints of 1.00 GB exist at the same time, and a save takes 860.00 MB more, for which host memory is "
        f"short, but the disk of {tmp_path} has room for 2: add --always_save_checkpoint=False, make room, or choose "
        "another --out_dir=DIR")
    set_free(monkeypatch, 0.5)  # less than what is taken besides
    with pytest.raises(UserError, match="has room for 0: save none with --keep_last=0"):
        check(tmp_path, on_disk=860_000_000)


def test_what_the_run_deletes_makes_room(check, monkeypatch, tmp_path):
    """What a killed save left, and with --overwrite=True the run before; but nothing that is the user's or damaged."""
    write_tags(tmp_path, {"iter_5": 5, "best": 5})
    set_free(monkeypatch, 2.05)
    check(tmp_path)
    set_free(monkeypatch, 1)
    for folder in ("mine", "iter_10.damaged", "iter_10.saving"):
        with pytest.raises(UserError):
            check(tmp_path, "iter_5")
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "model.pt").write_bytes(b"")
        os.truncate(tmp_path / folder / "model.pt", int(1.03e9))
    check(tmp_path, "iter_5")


def test_the_oldest_tag_that_is_neither_newest_nor_best_goes(tmp_path, capsys):
    """Whatever their names say: one is a user's copy."""
    write_tags(tmp_path, {"iter_500": 5, "iter_10": 10, "iter_15": 15, "iter_100": 100, "best": 10, "final": 15})
    store = TagStore(tmp_path)
    assert [store.delete_oldest() for _ in range(3)] == [True, True, False]
    assert capsys.readouterr().out == "".join(f"no room for the next checkpoint: deleted {tmp_path}/iter_{iter_num}\n"
                                              for iter_num in (500, 15))
    assert store.list() == ["iter_10", "iter_100", "best", "final"]


# Runs on a disk of `size` bytes, as the system reports it to rank 0. Rank 1 sees a large one

DISK = """
import shutil
from pathlib import Path
from types import SimpleNamespace
import torch
from runtime.checkpoint import tag_writer
from runtime.checkpoint.saver import Saver
size, taken = {size}, {taken}  # taken: by another program, from iteration 6 on
def disk_usage(path, save=Saver.save):
    if os.environ.get("RANK") == "1":
        return SimpleNamespace(free=10**12)
    used = {{file.stat().st_ino: file.stat().st_size for file in Path({folder!r}).rglob("*") if file.is_file()}}
    return SimpleNamespace(free=max(0, size - sum(used.values())))
def save(self, tag, *rest, save=Saver.save):
    global size
    size -= taken * (tag == "iter_6")
    save(self, tag, *rest)
def torch_save(content, path, save=torch.save):
    save(content, path)
    if is_full(path):
        raise RuntimeError("iostream error")
def is_full(path):
    return disk_usage(path).free == 0
shutil.disk_usage, Saver.save, torch.save, tag_writer.is_full = disk_usage, save, torch_save, is_full
"""


@pytest.fixture(scope="module")
def tag_size(whole):
    return sum(entry["bytes"] for entry in TagStore(whole(2).out_dir).find("iter_2").manifest["files"].values())


@pytest.mark.parametrize("rate, code, tags", [("1e-3", 0, ["iter_6", "iter_8", "best", "final"]),
                                              ("0", 2, ["iter_2", "iter_4", "best"])],
                         ids=["the oldest goes", "it is the best"])
def test_a_save_without_room_deletes_the_oldest(train, tag_size, tmp_path, rate, code, tags):
    """At iteration 6 and 8 there are two checkpoints, and half the space of another."""
    run = train(*EIGHT, f"--learning_rate={rate}", out_dir=tmp_path / "out", ranks=2,
                plant=DISK.format(size=9 * tag_size, taken=int(6.5 * tag_size), folder=str(tmp_path)))
    assert run.returncode == code and TagStore(run.out_dir).list() == tags, run.stdout + run.stderr
    gone = [f"no room for the next checkpoint: deleted {run.out_dir}/iter_{iter_num}" for iter_num in (2, 4)]
    assert [line for line in run.stdout.splitlines() if "deleted" in line] == (gone if code == 0 else [])
    assert (re.search(r"iter_[68] could not be saved \(the disk is full\)", run.stderr) is not None) == (code == 2)


COMPACT = (*EIGHT, "--learning_rate=1e-3", "--dtype=bfloat16", "--compact_optimizer=True",
           "--deepspeed_config=ds_config_zero2.json")
# Host memory is short at the saves, and the plan doesn't foresee it
NO_MEMORY = "from runtime.checkpoint import staging; staging.available_memory = lambda: 0\n"
# Files without a name take room on such a disk, until the file for which they are made is written
NAMELESS = """
import errno
named, nameless = disk_usage, 0
def disk_usage(path):
    return SimpleNamespace(free=max(0, named(path).free - nameless))
def check_room():
    if disk_usage("").free == 0:
        print("a file found no room", flush=True)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
def posix_fallocate(fd, offset, size):
    global nameless
    nameless += size
    check_room()
def torch_save(content, path, save=torch.save.__defaults__[0]):
    save(content, path)
    check_room()
def write_file(path, content, write=tag_writer.write_file):
    global nameless
    try:
        write(path, content)
    finally:
        nameless = 0
shutil.disk_usage, torch.save, os.posix_fallocate = disk_usage, torch_save, posix_fallocate
tag_writer.write_file = write_file
"""


@pytest.fixture(scope="module")
def compact_size(train):
    run = train(*COMPACT, "--max_iters=2", "--lr_decay_iters=2")
    assert run.returncode == 0, run.stdout + run.stderr
    return sum(entry["bytes"] for entry in TagStore(run.out_dir).find("iter_2").manifest["files"].values())


@pytest.mark.parametrize("memory", ["enough", "short", "short, and not foreseen"])
def test_a_save_that_decodes_on_the_disk_makes_room_for_that_too(train, compact_size, tmp_path, memory):
    """At iteration 6 there are two checkpoints, and space for 1.5 more. A tag has 14 bytes per parameter, of which 12
    are made on the disk first: that takes 1.86 tags. At iteration 8 there is as much."""
    plant = DISK.format(size=9 * compact_size, taken=int(5.5 * compact_size), folder=str(tmp_path))
    if memory != "enough":
        plant = NO_MEMORY + plant + NAMELESS
    if "not foreseen" in memory:
        plant += "from runtime.checkpoint import saver; saver.decoded_on_disk = lambda files: 0\n"
    run = train(*COMPACT, out_dir=tmp_path / "out", plant=plant)
    assert run.returncode == 0, run.stdout + run.stderr
    gone = [line for line in run.stdout.splitlines() if "deleted" in line]
    numbers = (2,) if memory == "enough" else (2, 4)
    assert ("a file found no room" in run.stdout) == (memory == "short, and not foreseen")
    assert gone == [f"no room for the next checkpoint: deleted {run.out_dir}/iter_{i}" for i in numbers]
