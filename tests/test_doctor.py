"""doctor.py on this machine, on one with a wrong DeepSpeed, and for runs."""

import json
import os
import re
import shutil

import pytest
from conftest import ROOT, launch

from doctor import bytes_of_tag, cards, datasets, weights


def doctor(*args, **env):
    done = launch(ROOT / "doctor.py", *args, **env)
    assert "Traceback" not in done.stderr, done.stderr
    return done


@pytest.fixture(scope="module")
def here():
    """(exit code, {name: row}) of this machine, which has no GPU."""
    done = doctor("--json")
    return done.returncode, {row["name"]: row for row in json.loads(done.stdout)}


def test_a_machine_without_gpus_is_warned_of_that_alone(here):
    code, rows = here
    assert code == 0 and not [row for row in rows.values() if row["status"] == "FAIL"]
    assert rows["deepspeed"] == {"status": "OK", "name": "deepspeed", "found": "0.19.8", "mend": ""}
    assert rows["CUDA"]["status"] == "WARN" and "no GPU" in rows["CUDA"]["found"]
    assert rows["weights"]["status"] == "WARN" and "--init_from=DIR" in rows["weights"]["mend"]
    for name in ("Python", "torch", "all-reduce", "open files", "host memory"):
        assert rows[name]["status"] == "OK", rows[name]
    assert re.fullmatch(r"2 processes, gloo: \d+\.\d GB/s", rows["all-reduce"]["found"])
    assert all(row["mend"] for row in rows.values() if row["status"] != "OK")
    assert not [row for row in rows.values() if "could not be looked at" in row["found"]]


def test_another_deepspeed_fails_with_the_mend(tmp_path):
    """The environment is doctored: metadata of an older version stands before the real one's."""
    folder = tmp_path / "deepspeed-0.18.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.18.0\n")
    done = doctor(PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    assert done.returncode == 1
    at = next(i for i, line in enumerate(done.stdout.splitlines()) if line.startswith("FAIL"))
    assert "deepspeed" in done.stdout.splitlines()[at] and "0.18.0" in done.stdout.splitlines()[at]
    assert done.stdout.splitlines()[at + 1].strip() == "-> python -m pip install deepspeed==0.19.8"
    assert "1 to mend" in done.stdout


def test_no_ranks_are_refused():
    done = doctor("--num_gpus=0")
    assert done.returncode == 2 and "--num_gpus=0 must be at least 1" in done.stderr and done.stdout == ""


def test_a_run_elsewhere_is_looked_at_by_its_plan(characters):
    """Neither GPUs nor weights are here, which hinders no run elsewhere; but the plan does not fit."""
    done = doctor("config/xl_shakespeare.py", "--num_gpus=4", "--target_gpu=16", f"--dataset={characters}")
    assert done.returncode == 1 and "1 to mend" in done.stdout
    for words in ("OK    GPUs              0 here; the plan is for 4 of target_gpu=16", "WARN  weights",
                  "18,000 and 2,000 tokens, hashes as prepared", "FAIL  the run           does not fit",
                  "each GPU   16.20 GB of 16.00 GB: too much, as a tenth stays free",
                  "torchrun --nproc_per_node=4 train_deepspeed.py config/xl_shakespeare.py"):
        assert words in done.stdout, words


@pytest.mark.parametrize("changed, statuses", [
    ({}, ["FAIL", "FAIL"]), ({"target_gpu": 24.0}, ["OK", "WARN"]), ({"device": "cpu"}, ["OK", "FAIL"])])
def test_what_is_not_here_hinders_a_run_that_needs_it_here(changed, statuses):
    """Two GPUs, and weights in a folder."""
    run = {"device": "auto", "target_gpu": None, "init_from": "/nowhere", **changed}
    assert [row[0] for row in (*cards(run, 2), *weights(run))] == statuses


@pytest.mark.parametrize("init_from, tag", [("resume", "latest"), ("auto", "iter_2"), ("{}", "latest")])
def test_the_room_for_tags_is_that_of_the_run_which_goes_on(train, init_from, tag, tmp_path_factory):
    """27,392 parameters and 1,152 of padding: not GPT-2's. A second stage is reckoned in bfloat16, 14 bytes each."""
    out_dir = tmp_path_factory.getbasetemp() / "of-doctor"
    if not out_dir.exists():
        assert train("--max_iters=2", out_dir=out_dir).returncode == 0
    run = {"init_from": init_from.format(out_dir), "out_dir": str(out_dir), "resume_tag": tag}
    files = [path for path in (out_dir / "iter_2").iterdir() if path.name != "manifest.json"]
    assert bytes_of_tag(run) == (14 * 28_544 if init_from == "{}" else sum(path.stat().st_size for path in files))


def test_a_bin_that_has_changed_since_preparation_is_told_of(characters, tmp_path):
    copy = shutil.copytree(characters, tmp_path / "copy")
    content = bytearray((copy / "val.bin").read_bytes())
    content[0] ^= 1
    (copy / "val.bin").write_bytes(content)
    run = {"dataset": str(copy), "block_size": 32}
    assert list(datasets(run)) == [("FAIL", "data copy", "val.bin changed since preparation", "prepare it anew")]


def test_a_misspelt_setting_ends_it():
    done = doctor("--learing_rate=1")
    assert done.returncode == 2 and "did you mean 'learning_rate'" in done.stderr
