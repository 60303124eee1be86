"""Check this machine: Python, packages, memory, disk, GPUs and compilers.

    python doctor.py              this machine
    python doctor.py --model      the model of model.py, if you have edited it

WARN: slower, or some runs won't work. FAIL: no run starts, and the exit code is 1. Each of them has
its fix. To check a run on this machine or another, add --dry_run=True to its command.

--model builds a tiny model of your class, and says for each way to compute it "equal" or what
differs, and where to look: cached logits, kernels, the loss, ZeRO-2 and 3, the optimizer of
train_deepspeed.py, checkpoints. It takes 15 seconds on two cores. If something differs or raises,
the exit code is 2."""

import argparse
import importlib.metadata
import itertools
import os
import platform
import re
import shutil
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

# First: from then on, a missing package is named
from runtime.files import ROOT, format_bytes, free_bytes

OK = "OK"
WARN = "WARN"
FAIL = "FAIL"

import psutil
import torch

from runtime import hardware
from runtime.gpu_problems import undetected_gpu, unsupported_gpu
from runtime.output import counted, exit_on_error
from runtime.version import version_line

GPUS = 0
if torch.cuda.is_available():
    GPUS = torch.cuda.device_count()


class Row(NamedTuple):
    """The result of a check. One that is OK has no fix."""

    status: str  # OK, WARN or FAIL
    name: str
    detail: str
    fix: str


def ok(name: str, detail: str) -> Row:
    """Return the row of a check that has found nothing to fix."""
    return Row(OK, name, detail, "")


def main() -> int:
    """Print a row for each check. Return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", action="store_true", help="check the model instead of the machine"
    )
    parser.add_argument("--version", action="version", version=version_line())
    if parser.parse_args().model:
        return check_model()
    if not GPUS:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # before deepspeed is imported

    # Print each row as soon as it is known: some checks take seconds
    count: Counter[str] = Counter()
    rows = itertools.chain(python(), packages(), host(), cuda(), gpus(), compilers())
    for row in rows:
        count[row.status] += 1
        print(f"{row.status:<4}  {row.name:<16}  {row.detail}", flush=True)
        if row.fix:
            print(f"{'':24}-> {row.fix}")
    print(f"\n{count[FAIL]} to fix, {counted(count[WARN], 'warning')}, {count[OK]} OK")
    return int(count[FAIL] > 0)


def check_model() -> int:
    """Check the model that all scripts use, and exit."""
    os.environ["DS_ACCELERATOR"] = "cpu"  # ZeRO is checked on CPUs, which every machine has two of
    if not GPUS:
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported

    # These import deepspeed and triton
    with exit_on_error("interrupted"):
        from runtime.check.report import print_report

        code = print_report()
    from runtime.cluster.ranks import exit_process

    exit_process(code)


def python() -> Iterator[Row]:
    """Compare Python with the versions of pyproject.toml, as in ">=3.11,<3.15"."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    requires = tomllib.loads(text)["project"]["requires-python"]
    first, end = [int(minor) for minor in re.findall(r"3\.(\d+)", requires)]
    version = platform.python_version()
    if first <= sys.version_info.minor < end:
        yield ok("Python", version)
        return
    fix = (
        f"install Python 3.{first} to 3.{end - 1}, and set PYTHON to its path for the shell scripts"
    )
    yield Row(WARN, "Python", version, fix)


def packages() -> Iterator[Row]:
    """Compare the packages with the tested versions of the file that has this PyTorch."""
    # PyTorch 2.7 is the last for Volta GPUs, and has a file of its own
    file = "requirements.txt"
    if torch.__version__.startswith("2.7."):
        file = "requirements-volta.txt"
    text = (ROOT / file).read_text(encoding="utf-8")
    pins = re.findall(r"^([\w.-]+)==([\w.]+)", text, re.M)

    # Those that differ
    others = {}  # {the pin: what is installed instead}
    for name, tested in pins:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = "not installed"
        if version.partition("+")[0] != tested:
            others[f"{name}=={tested}"] = f"{name} {version}"

    detail = "; ".join([f"{len(pins) - len(others)} as in {file}", *others.values()])
    if not others:
        yield ok("packages", detail)
        return
    # Our code replaces internals of DeepSpeed, so a run refuses another version
    severity = WARN
    if any(pin.startswith("deepspeed==") for pin in others):
        severity = FAIL
    yield Row(severity, "packages", detail, f"python -m pip install {' '.join(others)}")


def cuda() -> Iterator[Row]:
    """Check that PyTorch finds the GPUs and has kernels for them."""
    # GPUs that are here, but that PyTorch can't use
    problem = undetected_gpu()
    if problem is None:
        problem = unsupported_gpu([torch.cuda.get_device_capability(i) for i in range(GPUS)])
    if problem is not None:
        detail, fix = problem
        yield Row(FAIL, "CUDA", detail, fix)
        return

    # GPUs that it can use, or none
    pytorch = f"PyTorch {torch.__version__}, for CUDA {torch.version.cuda}"
    if GPUS:
        yield ok("CUDA", f"{GPUS} GPU; {pytorch}")
        return
    fix = "small models train on CPU; GPT-2 XL needs a GPU (estimate for one with --target_gpu=24)"
    yield Row(WARN, "CUDA", f"no GPU; {pytorch}", fix)


def gpus() -> Iterator[Row]:
    """Check each GPU's free memory."""
    for i in range(GPUS):
        # What other processes have taken counts as used
        gpu = torch.cuda.get_device_properties(i)
        free, total = torch.cuda.mem_get_info(i)

        # What dtype=auto takes on this GPU
        dtype = "float16"
        if (gpu.major, gpu.minor) >= (8, 0):
            dtype = "bfloat16"
        detail = (
            f"{gpu.name}, {format_bytes(total)}, {format_bytes(free)} free, compute capability "
            f"{gpu.major}.{gpu.minor}, {dtype}"
        )
        if free < 0.9 * total:
            yield Row(WARN, f"GPU {i}", detail, "stop other processes on it (see nvidia-smi)")
        else:
            yield ok(f"GPU {i}", detail)


def compilers() -> Iterator[Row]:
    """Check what builds our Triton kernels, and DeepSpeed's CPU Adam, its only kernel that we use.

    None needs nvcc.
    """
    # Triton's
    missing = hardware.missing_compiler()
    if missing is None:
        yield ok("C compiler", "installed, with Python's headers")
    else:
        fix = "apt install gcc python3-dev, or train slower on GPUs"
        yield Row(WARN, "C compiler", missing, fix)

    # DeepSpeed's. The import takes seconds
    from deepspeed.ops.op_builder import CPUAdamBuilder

    is_compatible = CPUAdamBuilder().is_compatible(verbose=False)
    if is_compatible and shutil.which("ninja") and shutil.which("g++"):
        yield ok("DeepSpeed ops", "cpu_adam can be built")
    else:
        detail = "cpu_adam can't be built, so offload uses PyTorch's slower AdamW"
        fix = "for offload: apt install g++, pip install ninja"
        yield Row(WARN, "DeepSpeed ops", detail, fix)


def host() -> Iterator[Row]:
    """Check the host's memory, and the disk of this folder."""
    # Of the container, if it has a limit
    free = hardware.available_memory()
    total = psutil.virtual_memory().total
    detail = f"{free / 1e9:.1f} GB free of {total / 1e9:.1f}"
    if free < 8e9:
        fix = "close other programs or add swap, or processes may be killed (exit code -9)"
        yield Row(WARN, "host memory", detail, fix)
    else:
        yield ok("host memory", detail)

    free = free_bytes(ROOT)
    detail = f"{format_bytes(free)} free"
    if free < 57e9:
        fix = "GPT-2 XL needs 57 GB: make room, or choose another disk with --out_dir=DIR"
        yield Row(WARN, "disk", detail, fix)
    else:
        yield ok("disk", detail)

    # NCCL's, between the ranks of a node
    if os.path.isdir("/dev/shm"):
        free = shutil.disk_usage("/dev/shm").free
        detail = f"{free / 1e9:.2f} GB in /dev/shm"
        if free < 1e9:
            fix = "too small for NCCL: docker run --ipc=host, or --shm-size=8g"
            yield Row(WARN, "shared memory", detail, fix)
        else:
            yield ok("shared memory", detail)


if __name__ == "__main__":
    sys.exit(main())
