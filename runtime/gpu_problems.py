"""GPUs that are here, but that PyTorch can't use: why, and what to do."""

import os
import re
import subprocess
from collections.abc import Iterable

import torch

HIDES_ALL_GPUS = ("", "-1", "none")  # values of CUDA_VISIBLE_DEVICES that a user sets for the CPU
Capability = tuple[int, int]  # a GPU's compute capability, such as (8, 0)
Problem = tuple[str, str]  # what is wrong, and the fix


def run_command(*command: str | os.PathLike) -> str:
    """Return the output of a command, stripped.

    Return "" if it fails, takes too long or isn't installed.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def unsupported_gpu(capabilities: Iterable[Capability] | None = None) -> Problem | None:
    """Return (problem, fix) if this PyTorch has no kernels for one of these GPUs, else None.

    capabilities: of the GPUs; None: of those that nvidia-smi lists, which PyTorch may not find. A
    GPU runs binaries (sm_75) of its major version, up to its minor version, and any older PTX
    (compute_75).
    """
    if capabilities is None:
        listed = run_command("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
        numbers = re.findall(r"^(\d+)\.(\d+)$", listed, re.M)
        capabilities = [(int(major), int(minor)) for major, minor in numbers]

    # What this PyTorch was built for. CPU builds say nothing, and ROCm's flags look different
    flags = getattr(torch._C, "_cuda_getArchFlags", str)() or ""
    built = []
    for kind, major, minor in re.findall(r"(sm|compute)_(\d+)(\d)\b", flags):
        built.append((kind, (int(major), int(minor))))
    if not built:
        return None

    # The first GPU that none of them runs on
    for gpu in capabilities:
        fits = [
            arch <= gpu and (kind == "compute" or arch[0] == gpu[0]) for kind, arch in built
        ]
        if any(fits):
            continue
        problem = (
            f"PyTorch {torch.__version__} has no kernels for GPUs of compute capability "
            f"{gpu[0]}.{gpu[1]}"
        )
        if gpu < (5, 0):
            return problem, "use another GPU, or CUDA_VISIBLE_DEVICES=-1 for the CPU"

        # For older ones, the PyTorch of requirements-volta.txt still has kernels
        file = "requirements.txt"
        if gpu < (7, 5):
            file = "requirements-volta.txt"
        return problem, f"run python -m pip install -r {file}"
    return None


def undetected_gpu() -> Problem | None:
    """Return (problem, fix) if PyTorch finds no GPU, but nvidia-smi lists one that isn't hidden."""
    if torch.cuda.is_available() or os.environ.get("CUDA_VISIBLE_DEVICES") in HIDES_ALL_GPUS:
        return None
    listed = run_command("nvidia-smi", "-L")

    # The most telling cause first
    problem = wrong_gpu_names(listed)
    if problem or not listed.startswith("GPU "):
        return problem
    problem = unsupported_gpu()
    if problem:
        return problem
    # Most often a driver that is older than PyTorch's CUDA
    return (
        f"nvidia-smi lists GPUs, but PyTorch {torch.__version__}, for CUDA {torch.version.cuda}, "
        "finds none",
        "update the driver, install a PyTorch for its CUDA version, or set CUDA_VISIBLE_DEVICES=-1 "
        "for the CPU",
    )


def wrong_gpu_names(listed: str) -> Problem | None:
    """Return (problem, fix) if CUDA_VISIBLE_DEVICES names a GPU that isn't there, else None.

    CUDA takes the GPUs before the first wrong name, without a word. listed: what `nvidia-smi -L`
    prints, "GPU 0: NVIDIA H100 (UUID: GPU-8f1c...)" for each GPU.
    """
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    if value is None or value in HIDES_ALL_GPUS:
        return None
    problem = f"CUDA_VISIBLE_DEVICES={value}"
    if value == "NoDevFiles":  # Slurm sets it
        fix = "request one with --gpus-per-node=1, or use --device=cpu"
        return f"{problem}: this job has no GPU", fix

    # CUDA takes numbers and beginnings of ids
    numbers = re.findall(r"^GPU (\d+):", listed, re.M)
    ids = re.findall(r"\(UUID: ([\w-]+)\)", listed)
    names = [name.strip() for name in value.split(",")]
    wrong = [name for name in names if name not in numbers and not is_start_of_one(name, ids)]
    if not wrong and len(set(names)) < len(names):
        return f"{problem} names a GPU twice, so CUDA finds none", "name each once"
    if not wrong or not numbers:
        return None
    has = "GPU 0 only"
    if len(numbers) > 1:
        has = f"GPUs 0 to {numbers[-1]}"
    return (
        f"{problem} names {', '.join(wrong)}, but nvidia-smi lists {has}",
        "change it, or set CUDA_VISIBLE_DEVICES=-1 for the CPU",
    )


def is_start_of_one(name: str, ids: list[str]) -> bool:
    """Return whether a name is the beginning of the id of exactly one GPU, as CUDA takes it."""
    if not name.startswith(("GPU-", "MIG-")):
        return False
    return sum(found.startswith(name) for found in ids) == 1
