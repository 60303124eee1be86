"""doctor.py on this machine, on one with a wrong DeepSpeed, and for runs."""

import importlib.metadata
import os
import re
import shutil

import pytest
import torch
from conftest import ROOT, SMALL, done, launch, nvidia_smi

import doctor as checks
from configurator import settings_of_script
from runtime.files import format_bytes


def doctor(*args, **env):
    run = launch(ROOT / "doctor.py", *args, **env)
    assert "Traceback" not in run.stderr, run.stderr
    return run


@pytest.fixture(scope="module")
def here():
    """(exit code, {name: row}) of this machine, which has no GPU."""
    run = doctor()
    rows = re.findall(r"^(OK|WARN|FAIL) +(.+?)  +(.+)(?:\n +-> (.+))?", run.stdout, re.M)
    return run.returncode, {row[1]: dict(zip(("status", "name", "detail", "fix"), row)) for row in rows}


def test_a_machine_without_gpus_is_warned_of_that_alone(here):
    code, rows = here
    assert code == 0 and not [row for row in rows.values() if row["status"] == "FAIL"]
    assert rows["packages"]["status"] == "OK"
    assert re.fullmatch(r"[12]\d as in requirements(-volta)?\.txt", rows["packages"]["detail"])
    assert rows["CUDA"]["status"] == "WARN" and "no GPU" in rows["CUDA"]["detail"]
    assert rows["Python"]["status"] == rows["host memory"]["status"] == "OK"
    assert all(row["fix"] for row in rows.values() if row["status"] != "OK")


def test_a_card_that_this_pytorch_has_no_kernels_for_fails_with_the_fix(tmp_path):
    """nvidia-smi lists one with compute capability 7.0, or under requirements-volta.txt one with 10.0."""
    capability, file = ("10.0", "requirements.txt") if "sm_70" in torch._C._cuda_getArchFlags() else (
        "7.0", "requirements-volta.txt")
    path = os.pathsep.join([str(nvidia_smi(tmp_path, capability).parent), os.environ["PATH"]])
    run = doctor(PATH=path, CUDA_VISIBLE_DEVICES="0")
    assert run.returncode == 1 and "1 to fix" in run.stdout
    assert re.search(rf"^FAIL  CUDA +PyTorch \S+ has no kernels for GPUs of compute capability {capability}\n +-> "
                     rf"run python -m pip install -r {file}$", run.stdout, re.M), run.stdout


def test_packages_are_compared_with_the_file_that_has_their_pytorch(monkeypatch):
    old, new = (dict(re.findall(r"^(\S+)==([\w.]+)", (ROOT / file).read_text(), re.M))
                for file in ("requirements-volta.txt", "requirements.txt"))
    for installed, status, detail, fix in (
            (new, "OK", f"{len(new)} as in requirements.txt", ""),
            (old, "OK", f"{len(old)} as in requirements-volta.txt", ""),
            ({**old, "triton": "3.6.0"}, "WARN", f"{len(old) - 1} as in requirements-volta.txt; triton 3.6.0",
             "python -m pip install triton==3.3.1"),
            ({**new, "torch": "2.8.0"}, "WARN", f"{len(new) - 1} as in requirements.txt; torch 2.8.0",
             "python -m pip install torch==2.11.0"),
            ({**new, "deepspeed": "0.18.0"}, "FAIL", f"{len(new) - 1} as in requirements.txt; deepspeed 0.18.0",
             "python -m pip install deepspeed==0.19.8")):
        monkeypatch.setattr(checks.torch, "__version__", installed["torch"])
        monkeypatch.setattr(importlib.metadata, "version", installed.get)
        assert [*checks.packages()] == [(status, "packages", detail, fix)]


def test_no_ranks_are_refused():
    run = doctor("--num_gpus=0")
    assert run.returncode == 2 and "--num_gpus=0 must be at least 1" in run.stderr and run.stdout == ""


def test_a_run_elsewhere_is_checked_by_its_plan(characters):
    """Neither GPUs nor weights are here, which hinders no run elsewhere; but the plan does not fit."""
    run = doctor("config/xl_shakespeare.py", "--num_gpus=4", "--target_gpu=16", f"--dataset={characters}")
    assert run.returncode == 1 and "1 to fix" in run.stdout
    for words in ("\nplan       1 x 4 x 32 = 128 sequences per step, bfloat16, ZeRO-2",
                  "hashes match", "FAIL  the run           doesn't fit",
                  "each GPU   16.20 GB of 16.00 GB: too much (10% must stay free)",
                  "It doesn't fit. Add one of these to your command",
                  "1.8x  --batch_size=1 --gradient_accumulation_steps=32 --gradient_checkpointing=True"):
        assert words in run.stdout, words


def check_run(argv, ranks=1):
    """Return the rows of a run."""
    return [*checks.the_run(settings_of_script(ROOT / "train_deepspeed.py", [*map(str, argv)]), ranks)]


@pytest.mark.parametrize("changed, wanted", [
    (["--device=auto"], ["FAIL the run"]),
    (["--device=auto", "--dtype=auto", "--target_gpu=24"], ["OK the run"]), ([], ["FAIL the run"])])
def test_what_is_not_here_fails_a_run_that_needs_it_here(changed, wanted, tmp_path, capsys):
    """Two GPUs, and data in a folder. SMALL is for the CPU."""
    rows = check_run([*SMALL, "--dataset=/nowhere/at/all", f"--out_dir={tmp_path}/out", *changed], 2)
    assert [f"{status} {name}" for status, name, _, _ in rows] == wanted
    told = capsys.readouterr().out + "".join(fix for *_, fix in rows)
    assert "nowhere/at/all/train.bin does not exist: run python" in told


def test_a_run_that_fits_tells_the_room_for_its_checkpoints(train, characters, tmp_path, capsys):
    """27,392 parameters and 1,152 of padding: not GPT-2's. In float32 a checkpoint takes 16 bytes for each."""
    out_dir = done(train("--max_iters=2")).out_dir
    for start, to in (["resume"], out_dir), (["scratch", "auto"], out_dir), ([out_dir], tmp_path):
        rows = check_run([*SMALL, *(f"--init_from={name}" for name in start), f"--dataset={characters}",
                          f"--out_dir={to}", "--n_layer=None", "--n_head=None", "--n_embd=None"])
        assert rows == [checks.row(f"data {characters.name}", "hashes match"), checks.row("the run", "fits")]
        assert f"{format_bytes(16 * 28_544)} per checkpoint, " in capsys.readouterr().out


def test_a_bin_that_has_changed_since_preparation_is_reported(characters, tmp_path):
    copy = shutil.copytree(characters, tmp_path / "copy")
    content = bytearray((copy / "val.bin").read_bytes())
    content[0] ^= 1
    (copy / "val.bin").write_bytes(content)
    rows = check_run([*SMALL, f"--dataset={copy}", f"--out_dir={tmp_path}/out"])
    assert rows[0] == checks.row("data copy", "val.bin changed since preparation", "prepare it again", checks.FAIL)
