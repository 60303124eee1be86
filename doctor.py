"""Check this machine: Python, packages, memory, disk, GPUs and compilers.

    python doctor.py              this machine
    python doctor.py --model      the model of model.py, if you have edited it

WARN: slower, or some runs won't work. FAIL: no run starts, and the exit code is 1. Each of them has its fix. To check a
run on this machine or another, add --dry_run=True to its command.

--model builds a tiny model of your class, and says for each way to compute it "equal" or what differs, and where to
look: cached logits, kernels, the loss, ZeRO-2 and 3, the optimizer of train_deepspeed.py, checkpoints. It takes 15
seconds on two cores. If something differs or raises, the exit code is 2."""

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

from runtime.files import ROOT, format_bytes, free_bytes  # first: from then on, a missing package is named

OK, WARN, FAIL = "OK", "WARN", "FAIL"

import psutil
import torch

from runtime import hardware
from runtime.output import counted

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0


def row(name, detail, fix="", severity=WARN):
    """Return the result of a check: (status, name, detail, fix). It is OK without a fix, else WARN or FAIL."""
    return severity if fix else OK, name, detail, fix


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="store_true", help="check the model instead of the machine")
    if parser.parse_args().model:
        return check_model()
    if not GPUS:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # before deepspeed is imported
    count = Counter()
    for status, name, detail, fix in itertools.chain(python(), packages(), host(), cuda(), gpus(), compilers()):
        count[status] += 1
        print(f"{status:<4}  {name:<16}  {detail}", flush=True)
        if fix:
            print(f"{'':24}-> {fix}")
    print(f"\n{count[FAIL]} to fix, {counted(count[WARN], 'warning')}, {count[OK]} OK")
    return int(count[FAIL] > 0)


def check_model():
    """Check the model that all scripts use. Return the exit code."""
    os.environ["DS_ACCELERATOR"] = "cpu"  # ZeRO is checked on CPUs, which every machine has two of
    if not GPUS:
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported
    from runtime.output import exit_on_error

    with exit_on_error("interrupted"):
        from runtime.check.report import print_report

        code = print_report()
    from runtime.cluster.ranks import exit_process

    exit_process(code)


def python():
    """Compare Python with the versions of pyproject.toml, as in ">=3.11,<3.15"."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    first, end = map(int, re.findall(r"3\.(\d+)", project["requires-python"]))
    fix = f"install Python 3.{first} to 3.{end - 1}, and set PYTHON to its path for the shell scripts"
    is_tested = first <= sys.version_info.minor < end
    yield row("Python", platform.python_version(), "" if is_tested else fix)


def packages():
    """Compare the packages with the tested versions in requirements.txt, or in requirements-volta.txt."""
    other, file = {}, f"requirements{'-volta' * torch.__version__.startswith('2.7.')}.txt"
    pins = re.findall(r"^([\w.-]+)==([\w.]+)", (ROOT / file).read_text(encoding="utf-8"), re.M)
    for name, tested in pins:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = "not installed"
        if version.partition("+")[0] != tested:
            other[f"{name}=={tested}"] = f"; {name} {version}"
    yield row("packages", f"{len(pins) - len(other)} as in {file}" + "".join(other.values()),
              f"python -m pip install {' '.join(other)}" if other else "",
              FAIL if any(pin.startswith("deepspeed==") for pin in other) else WARN)


def cuda():
    every = map(torch.cuda.get_device_capability, range(GPUS))
    if problem := hardware.undetected_gpu() or hardware.unsupported_gpu(every):
        yield row("CUDA", *problem, FAIL)
    else:
        yield row("CUDA", f"{GPUS or 'no'} GPU; PyTorch {torch.__version__}, for CUDA {torch.version.cuda}", "" if GPUS
                  else "small models train on CPU; GPT-2 XL needs a GPU (estimate for one with --target_gpu=24)")


def gpus():
    for i in range(GPUS):
        gpu, (free, total) = torch.cuda.get_device_properties(i), torch.cuda.mem_get_info(i)
        dtype = "bfloat16" if (gpu.major, gpu.minor) >= (8, 0) else "float16"
        yield row(f"GPU {i}", f"{gpu.name}, {format_bytes(total)}, {format_bytes(free)} free, compute capability "
                  f"{gpu.major}.{gpu.minor}, {dtype}",
                  "stop other processes on it (see nvidia-smi)" if free < 0.9 * total else "")


def compilers():
    """Check what builds our Triton kernels, and DeepSpeed's CPU Adam, its only kernel that we use. None needs nvcc."""
    why = hardware.missing_compiler()
    yield row("C compiler", why or "installed, with Python's headers",
              "apt install gcc python3-dev, or train slower on GPUs" if why else "")
    from deepspeed.ops.op_builder import CPUAdamBuilder

    good = CPUAdamBuilder().is_compatible(verbose=False) and shutil.which("ninja") and shutil.which("g++")
    yield row("DeepSpeed ops", "cpu_adam can be built" if good else
              "cpu_adam can't be built, so offload uses PyTorch's slower AdamW",
              "" if good else "for offload: apt install g++, pip install ninja")


def host():
    """Check the host's memory, and the disk of this folder."""
    free = hardware.available_memory()
    yield row("host memory", f"{free / 1e9:.1f} GB free of {psutil.virtual_memory().total / 1e9:.1f}",
              "close other programs or add swap, or processes may be killed (exit code -9)" if free < 8e9 else "")
    free = free_bytes(ROOT)
    yield row("disk", f"{format_bytes(free)} free", "GPT-2 XL needs 57 GB: make room, or choose another disk with "
              "--out_dir=DIR" if free < 57e9 else "")
    if os.path.isdir("/dev/shm"):
        free = shutil.disk_usage("/dev/shm").free
        yield row("shared memory", f"{free / 1e9:.2f} GB in /dev/shm", "too small for NCCL: docker run --ipc=host, or "
                  "--shm-size=8g" if free < 1e9 else "")


if __name__ == "__main__":
    sys.exit(main())
