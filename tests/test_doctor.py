"""doctor.py on this machine, and on one with a wrong GPU or DeepSpeed."""

import importlib.metadata
import os
import re

import pytest
import torch
from conftest import ROOT, launch, nvidia_smi

import doctor as checks


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
