"""Tags: their size, what DeepSpeed's tools and ours read from them, saving that waits, weights alone."""

import argparse
import errno
import json
import os
import re
import shutil
import subprocess
import sys
from unittest.mock import Mock

import pytest
import torch
from conftest import EIGHT, MOMENTS, ROOT, done, stage

from runtime import hardware
from runtime.checkpoint.errors import CheckpointError
from runtime.checkpoint.load import load_model
from runtime.checkpoint.saver import tag_bytes
from runtime.checkpoint.tag_reader import TagReader
from runtime.checkpoint.tags import TagStore
from runtime.files import write_atomic
from runtime.plan.memory import ParamCount

MEMORY = """
import sys, threading, time
from runtime.checkpoint.load import load_model

load_model(sys.argv[2])  # a small one, for what is imported on the way

def anonymous():
    return 1024 * int(next(line for line in open("/proc/self/status") if line.startswith("RssAnon")).split()[1])

before, peak = anonymous(), 0
def watch():
    global peak
    while True:
        peak = max(peak, anonymous())
        time.sleep(0.001)
threading.Thread(target=watch, daemon=True).start()
model, _ = load_model(sys.argv[1])
print((peak - before) / sum(4 * p.numel() for p in model.parameters()))
"""

WRITE_LATE = """
import time
from runtime.checkpoint.saver import Saver
write = Saver._write_and_commit
def late(self, files, manifest, *rest):
    while self.engine.deepspeed.global_steps == manifest["iter_num"] < 4:  # 4 is the last step
        time.sleep(0.01)
    return write(self, files, manifest, *rest)
Saver._write_and_commit = late
"""

# iter_2 is written 0.5 s after training has begun to wait for it
WAITS_FOR_ITER_2 = """
import threading, time
from runtime.checkpoint.saver import Saver

joined = threading.Event()
saves = []

def save(self, tag, *rest, plain=Saver.save):
    saves.append(tag)
    plain(self, tag, *rest)

def join(self, plain=Saver._join):
    if saves[-1:] == ["iter_4"]:
        joined.set()
    plain(self)

def write(self, files, manifest, *rest, plain=Saver._write_and_commit):
    if manifest["tag"] == "iter_2":
        joined.wait()
        time.sleep(0.5)
    plain(self, files, manifest, *rest)

Saver.save = save
Saver._join = join
Saver._write_and_commit = write
"""


def test_memory_in_a_container(monkeypatch, tmp_path):
    """A limit of 1,000,000 bytes, of which 600,000 are taken, 150,000 of them by files that can go."""
    monkeypatch.setattr(hardware, "CGROUP", tmp_path)
    free = hardware.available_memory()
    assert free > 10**8  # no limit
    (tmp_path / "memory.current").write_text("600000\n")
    (tmp_path / "memory.stat").write_text("anon 450000\ninactive_file 150000\n")
    (tmp_path / "memory.max").write_text("1000000\n")
    assert hardware.available_memory() == 550_000
    (tmp_path / "memory.max").write_text("max\n")
    assert hardware.available_memory() > 10**8


def test_a_manifest_that_was_changed_or_never_signed_is_refused(whole, tmp_path):
    out_dir = shutil.copytree(whole(2).out_dir, tmp_path / "out")
    _, manifest = TagStore(out_dir).find("iter_8")
    unsigned = {key: value for key, value in manifest.items() if key != "manifest_sha256"}
    for content in ({**manifest, "iter_num": 9}, unsigned, [unsigned]):
        write_atomic(out_dir / "iter_8" / "manifest.json", json.dumps(content, indent=1))
        with pytest.raises(CheckpointError, match="its sha256 differs"):
            TagStore(out_dir).find("iter_8")


@pytest.fixture(scope="module")
def wide(train):
    """The out_dir of a run of one step at stage 3 with 14 million parameters."""
    return done(train("--n_embd=768", "--max_iters=1", stage(3))).out_dir


@pytest.mark.parametrize("n", [2, 3])
def test_shards_read_what_deepspeeds_universal_checkpoint_holds(whole, tmp_path, n):
    """Weights and both moments of each parameter, to the last bit."""
    from deepspeed.checkpoint.ds_to_universal import main

    out_dir = whole(n).out_dir
    main(argparse.Namespace(input_folder=str(out_dir / "iter_8"), output_folder=str(tmp_path), num_extract_workers=1,
                            num_merge_workers=1, keep_temp_folder=False, strict=True, inject_missing_state=True))
    shards = TagReader(out_dir / "iter_8", TagStore(out_dir).find("iter_8").manifest)
    assert shards.step == 8 and len(shards.shapes) == 28
    for name in shards.shapes:
        for kind, file in (("weight", "fp32"), *((kind, kind) for kind in MOMENTS)):
            theirs = torch.load(tmp_path / "zero" / name / f"{file}.pt", weights_only=False)
            theirs = theirs["param"] if isinstance(theirs, dict) else theirs
            assert torch.equal(shards.get(name, kind).flatten(), theirs.flatten()), (name, kind)
            assert shards.get(name, kind).abs().max() > 0 or name.endswith("c_attn.bias")


@pytest.mark.parametrize("n, asynchronous, plant", [(2, False, ""), (3, False, ""), (2, True, WRITE_LATE)],
                         ids=["training waits", "training waits at stage 3", "written after the next step"])
def test_a_save_has_the_state_of_its_step(train, whole, n, asynchronous, plant):
    """To the last bit, weights and both moments. Once, a tag of stage 3 that training waited for had DeepSpeed's
    attributes of the parameters, and no reader took it."""
    run = done(train(*EIGHT, stage(n), "--max_iters=4", f"--async_save={asynchronous}", ranks=2, plant=plant))
    for tag in ("iter_2", "iter_4"):
        ours, theirs = (TagReader(r.out_dir / tag, TagStore(r.out_dir).find(tag).manifest) for r in (run, whole(n)))
        assert all(torch.equal(ours.get(name, kind), theirs.get(name, kind)) for name in theirs.shapes
                   for kind in ("weight", *MOMENTS))


def test_the_time_that_a_save_blocks_includes_the_wait_for_the_one_before(train):
    run = done(train(*EIGHT, "--max_iters=4", plant=WAITS_FOR_ITER_2))
    first, second = [record for record in run.history if "saved" in record]
    assert (first["saved"], second["saved"]) == ("iter_2", "iter_4")
    assert 0 < first["blocked_s"] < first["save_s"] - 0.5  # two steps and the wait
    assert second["blocked_s"] >= 0.5
    assert second["save_s"] > 0 and second["gb_per_s"] == second["bytes"] / second["save_s"] / 1e9
    assert f"saved iter_4 in {second['save_s']:.1f} s (" in run.stdout
    assert f"training was blocked for {second['blocked_s']:.2f} s" in run.stdout


@pytest.mark.parametrize("n, ranks", [(2, 2), (3, 1)])
def test_the_memory_for_a_save_is_reserved_before_it(train, n, ranks):
    """The first save's staging buffer, estimated before there is optimizer state, is less than a fifth too large."""
    run = done(train(stage(n), "--n_embd=64", "--max_iters=1", ranks=ranks, plant="""
from runtime.checkpoint.saver import Saver
from runtime.checkpoint.staging import Staging
init, allocate = Saver.__init__, Staging.allocate
def told(self, size):
    os.write(1, f"reserve {len(self.buffer)} {size}\\n".encode())  # whole, whatever the other rank prints
    return allocate(self, size)
def init_as_on_a_gpu(self, *args, **kwargs):
    init(self, *args, **kwargs)
    self.preallocate()
Staging.allocate, Saver.__init__ = told, init_as_on_a_gpu
"""))
    asked = [tuple(map(int, pair)) for pair in re.findall(r"reserve (\d+) (\d+)", run.stdout)]
    needed = {have: size for have, size in asked if have}
    assert len(asked) == 2 * ranks and len(needed) == ranks, asked
    assert all(size <= have < 1.2 * size for have, size in needed.items()), asked


@pytest.mark.parametrize("n", [2, 3])
def test_a_tags_size_is_estimated_to_a_twentieth(train, wide, n):
    out_dir = wide if n == 3 else done(train("--n_embd=256", "--max_iters=1", stage(n))).out_dir
    model, manifest = load_model(out_dir)
    size = sum(entry["bytes"] for entry in manifest["files"].values())
    n_params = sum(p.numel() for p in model.parameters())
    assert size == pytest.approx(tag_bytes(ParamCount(n_params, n_params, n_params), "float32", n), rel=0.05)


def test_a_model_is_loaded_in_little_more_memory_than_its_weights(wide, whole, tmp_path):
    """The process's own memory, without the pages of mapped files."""
    small = shutil.copytree(whole(3).out_dir, tmp_path / "small")
    run = done(subprocess.run([sys.executable, "-c", MEMORY, wide, small], cwd=ROOT, capture_output=True, text=True))
    assert float(run.stdout.split()[-1]) < 1.2


def test_a_tag_without_a_file_is_skipped_and_other_files_stay(train, whole, tmp_path):
    """Such as weights that the user has converted."""
    out_dir = shutil.copytree(whole(2).out_dir, tmp_path / "out")
    torch.save({"mine": torch.ones(3)}, out_dir / "iter_6" / "weights.pt")
    for tag in ("iter_8", "best", "final"):
        (out_dir / tag / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    plan = done(train(*EIGHT, stage(2), "--init_from=resume", "--dry_run=True", ranks=2, out_dir=out_dir))
    assert "resumed from iter_6" in plan.stdout
    with pytest.raises(CheckpointError, match=f"optim_states.pt is missing: choose another checkpoint of {out_dir}$"):
        load_model(out_dir, "best")
    back = done(train(*EIGHT, stage(2), "--init_from=resume", ranks=2, out_dir=out_dir))
    assert back.stdout.count("skipping") == 3 and f"resuming from {out_dir}/iter_6" in back.stdout
    assert back.losses == whole(2).losses and (out_dir / "iter_6" / "weights.pt").exists()


def test_two_damaged_tags_of_which_each_rank_finds_one_are_skipped(train, whole, tmp_path):
    """Rank 0 hashes the first file of a tag, and rank 1 the second one. The run resumes from the third newest tag."""
    out_dir = shutil.copytree(whole(2).out_dir, tmp_path / "out",
                              ignore=shutil.ignore_patterns("best", "final"))
    for tag, number in (("iter_8", 0), ("iter_6", 1)):
        name = list(TagStore(out_dir).find(tag).manifest["files"])[number]
        content = bytearray((out_dir / tag / name).read_bytes())
        content[len(content) // 2] ^= 1
        (out_dir / tag / name).write_bytes(content)
    run = done(train(*EIGHT, stage(2), "--init_from=resume", ranks=2, out_dir=out_dir))
    for tag in ("iter_8", "iter_6"):
        assert f"skipping {out_dir}/{tag}: {out_dir}/{tag}/" in run.stdout
        assert (out_dir / f"{tag}.damaged").is_dir()
    assert f"resuming from {out_dir}/iter_4, iteration 4" in run.stdout
    assert run.losses == whole(2).losses and run.evals == whole(2).evals


@pytest.mark.parametrize("links", [True, False])
def test_best_is_on_the_disk_before_it_has_its_name(monkeypatch, disk_calls, whole, tmp_path, links):
    out_dir = shutil.copytree(whole(2).out_dir, tmp_path / "out")
    if not links:
        monkeypatch.setattr(os, "link", Mock(side_effect=OSError(errno.EPERM, "Operation not permitted")))
    TagStore(out_dir).alias("iter_6", "best")
    work, names = str(out_dir / "best.saving"), os.listdir(out_dir / "best")
    before = disk_calls[:disk_calls.index(("rename", str(out_dir / "best")))]
    files = set() if links else {("fsync", os.path.join(work, name)) for name in names}
    assert files <= set(before) and ("fsync", work) in before and len(names) > 3
    assert disk_calls[-1] == ("fsync", str(out_dir))


def test_a_full_disk_when_best_is_linked_does_not_end_a_run_that_resumes(train):
    """On a file system without hard links, where best and final are copies."""
    out_dir = done(train("--max_iters=2")).out_dir
    run = done(train("--init_from=auto", out_dir=out_dir, plant="""
import errno, shutil
def full(source, to, **_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(to))
os.link = shutil.copy2 = full
"""))
    assert "best could not be linked to iter_2 (No space left on device); the run continues without it" in run.stdout
    assert TagStore(out_dir).find().name == "iter_4" and not list(out_dir.glob("*.saving"))
