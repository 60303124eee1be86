"""The table of GPUs, free memory, the settings device, dtype and compile, and what a record says of
the machine. gpu_problems.py says why a GPU can't be used."""

import importlib.metadata
import os
import platform
import re
import resource
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.nn.attention import SDPBackend

from runtime.errors import UserError
from runtime.gpu_problems import run_command, undetected_gpu, unsupported_gpu, wrong_gpu_names
from runtime.output import counted

CGROUP = Path("/sys/fs/cgroup")  # version 2, of this container
Device = str | torch.device


@dataclass(frozen=True)
class Gpu:
    """A GPU model, from its vendor's datasheet."""

    gb: float  # memory in GB (1e9 bytes)
    tflops: float | None  # dense peak in bfloat16, or in float16 if it has no bfloat16
    bf16: bool = True  # compute capability 8.0 and up
    fp8: bool = False  # our FP8 kernels run on it: compute capability 9.0 and up


GPUS = {
    "T4": Gpu(16, 65, bf16=False),
    "V100": Gpu(16, 125, bf16=False),
    "V100-32": Gpu(32, 125, bf16=False),
    "A10": Gpu(24, 125),
    "A10G": Gpu(24, 70),
    "L4": Gpu(24, 121),
    "3090": Gpu(24, 71),
    "4090": Gpu(24, 165),
    "5090": Gpu(32, 210),
    "A100-40": Gpu(40, 312),
    "A6000": Gpu(48, 155),
    "L40": Gpu(48, 181),
    "L40S": Gpu(48, 362),
    "A100": Gpu(80, 312),
    "H100": Gpu(80, 989, fp8=True),
    "H100 PCIE": Gpu(80, 756, fp8=True),
    "H100 NVL": Gpu(94, 835, fp8=True),
    "H200": Gpu(141, 989, fp8=True),
    "B200": Gpu(180, 2250, fp8=True),
}


@dataclass(frozen=True)
class Execution:
    """What each rank runs on: this machine, or the GPU that target_gpu names."""

    device: str  # "cuda" or "cpu"
    dtype: str  # "bfloat16", "float16" or "float32"
    compile: bool
    memory: float  # bytes per rank
    gpu: Gpu | None = None  # target_gpu's; None: the GPU of this machine

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def peak_flops(self) -> float | None:
        """The GPU's peak in FLOP/s, or None if it is unknown."""
        if self.gpu is None:
            return peak_flops(self.device)
        if self.gpu.tflops is None:
            return None
        return self.gpu.tflops * 1e12


# -----------------------------------------------------------------------------
# GPUs by name


def gpu_named(name: str) -> Gpu | None:
    """Return the Gpu of a name such as 4090, RTX4090 or nvidia-smi's NVIDIA A100-SXM4-40GB.

    Return None for a name that isn't in GPUS. All words of it have to fit: a 4090 Laptop GPU, an
    A1000 or a T400 is another GPU.
    """
    # Without words that don't tell models apart
    text = re.sub(r"NVIDIA|GEFORCE|TESLA|RTX|SXM\d*|HBM\w*|(?<=\d) ?GB\b", " ", name.upper())
    words = set(re.findall(r"[\w.]+", text))
    # Longer names first: an H100 PCIe is another GPU than an H100
    for key in sorted(GPUS, key=len, reverse=True):
        own = set(re.findall(r"\w+", key))
        may_follow = {"PCIE", f"{GPUS[key].gb:g}"}
        if own <= words <= own | may_follow:
            return GPUS[key]
    return None


def find_gpu(target: float | str) -> Gpu:
    """Return the Gpu for the setting target_gpu: a name, or a number of GB. Raises UserError."""
    text = target if isinstance(target, str) else f"{target:g}"

    # A name first: 4090 is parsed as a number
    gpu = gpu_named(text)
    if gpu is not None:
        return gpu

    # Then a size, of which no more is known
    size = re.fullmatch(r"(\d+(\.\d+)?) ?(GB)?", text, re.I)
    if not size or not 0 < float(size[1]) <= 1000:  # 3080 is a name too
        raise UserError(
            f"target_gpu={text} is unknown: give a number of GB, or one of {', '.join(GPUS)}"
        )
    return Gpu(float(size[1]), None, fp8=True)


def peak_flops(device: Device) -> float | None:
    """Return the device's peak in FLOP/s, or None if it isn't in GPUS. MFU is n/a then."""
    if torch.device(device).type != "cuda":
        # Peaks are known of GPUs alone
        return None
    gpu = gpu_named(torch.cuda.get_device_name(device))
    if gpu is None or gpu.tflops is None:
        return None
    return gpu.tflops * 1e12


def attention_backends(device: Device) -> list[SDPBackend]:
    """Return SDPA's kernels for `device`, the preferred one first.

    On an H200, cuDNN's is 1.4x as fast as flash.
    """
    # The order in which SDPA tries them
    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    if torch.cuda.get_device_capability(device)[0] >= 9:
        backends.insert(0, SDPBackend.CUDNN_ATTENTION)
    return backends


# -----------------------------------------------------------------------------
# Memory


def peak_memory(device: Device) -> int:
    """Return the peak memory so far in bytes: allocated on the GPU, or resident on CPU."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "linux":  # in kB; in bytes on macOS
        peak *= 1024
    return peak


def available_memory() -> int:
    """Return the free bytes of host memory, within the container's limit.

    Cached files count as free.
    """
    free = psutil.virtual_memory().available

    # The container's limit, and what it has used: the host's figures don't know of it
    try:
        limit = int((CGROUP / "memory.max").read_text())
        used = int((CGROUP / "memory.current").read_text())
        lines = (CGROUP / "memory.stat").read_text().splitlines()
        statistics = dict(line.split() for line in lines)
        cached = int(statistics["inactive_file"])
    except (OSError, ValueError, KeyError):  # no cgroup, or its limit is "max"
        return free
    return min(free, limit - used + cached)


# -----------------------------------------------------------------------------
# The settings device, dtype and compile


def pick_device(device: str, local_world_size: int = 1) -> str:
    """Resolve the setting device: "auto" is "cuda" if PyTorch finds a GPU, else "cpu".

    Raises UserError, also unless PyTorch can use a GPU for each of the `local_world_size` ranks of
    this node.
    """
    problem = None
    if device != "cpu":
        problem = undetected_gpu()
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        why = "use --device=cpu, or check nvidia-smi"
        if problem:
            why = ": ".join(problem)
        raise UserError(f"device=cuda, but PyTorch finds no CUDA GPU: {why}")

    # "auto". On a CPU, there may be a GPU that PyTorch doesn't find: better stop than be so slow
    if device == "auto" and has_gpu:
        device = "cuda"
    elif device == "auto":
        device = "cpu"
    if problem:
        raise UserError(": ".join(problem))

    if device == "cuda":
        check_gpus(local_world_size)
    return device


def check_gpus(local_world_size: int) -> None:
    """Raise UserError unless PyTorch can use as many GPUs on this node."""
    found = torch.cuda.device_count()
    # Fewer than the ranks, perhaps because of a wrong name: CUDA stops there, without a word
    if local_world_size > found:
        wrong = wrong_gpu_names(run_command("nvidia-smi", "-L"))
        if wrong:
            raise UserError(": ".join(wrong))
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        where = "this machine"
        if visible:
            where = f"CUDA_VISIBLE_DEVICES={visible}"
        raise UserError(
            f"{counted(local_world_size, 'rank')}, but {counted(found, 'GPU')} on {where}: start "
            f"{counted(found, 'rank')}, or use --device=cpu"
        )

    # Enough, but perhaps too old or too new
    capabilities = [torch.cuda.get_device_capability(gpu) for gpu in range(local_world_size)]
    problem = unsupported_gpu(capabilities)
    if problem:
        raise UserError(": ".join(problem))


def pick_dtype(dtype: str, device: str) -> str:
    """Resolve the setting dtype.

    "auto" is bfloat16 from compute capability 8.0 up, float16 below, float32 on CPU. Raises
    UserError if the device doesn't support it.
    """
    has_bf16 = device == "cuda" and torch.cuda.get_device_capability() >= (8, 0)
    if dtype == "auto":
        if device == "cpu":
            return "float32"
        if has_bf16:
            return "bfloat16"
        return "float16"
    # What was asked for by name
    if dtype == "float16" and device == "cpu":
        raise UserError("dtype=float16 needs a GPU: use --dtype=float32 or --dtype=bfloat16")
    if dtype == "bfloat16" and device == "cuda" and not has_bf16:
        raise UserError(
            f"dtype=bfloat16 needs compute capability 8.0, but {torch.cuda.get_device_name()} has "
            "less: use --dtype=float16 or --dtype=auto"
        )
    return dtype


def pick_compile(setting: bool | str, device: str) -> tuple[bool, str | None]:
    """Resolve the setting compile. Return (whether to compile, a note or None)."""
    if setting is False:
        return False, None
    why_not = why_not_compiled(setting, device)
    if why_not is None:
        return True, None

    # Nobody expects it on a CPU, unless it was asked for
    if setting is True or device == "cuda":
        return False, f"not compiled: {why_not}"
    return False, None


def why_not_compiled(setting: bool | str, device: str) -> str | None:
    """Return why a setting of True or "auto" doesn't compile, or None if it does."""
    if device == "cpu":
        return "it is for GPUs only"
    lowest = 7  # Triton's
    if setting == "auto":
        lowest = 8  # below, nothing is measured
    if torch.cuda.get_device_capability()[0] < lowest:
        return f"compile={setting} needs compute capability {lowest}.0"
    return missing_compiler()


def missing_compiler() -> str | None:
    """Return why Triton can't compile on this machine, or None."""
    compilers = (os.environ.get("CC", "cc"), "gcc", "clang")
    has_compiler = any(shutil.which(compiler) for compiler in compilers)
    headers = os.path.join(sysconfig.get_paths()["include"], "Python.h")
    if has_compiler and os.path.exists(headers):
        return None
    return "Triton needs a C compiler and Python's headers (gcc, python3-dev)"


# -----------------------------------------------------------------------------
# Records of measurements


def machine_record(device: Device) -> dict[str, Any]:
    """Return what measurements depend on: the hardware and the versions."""
    if torch.device(device).type == "cuda":
        hardware = torch.cuda.get_device_name(device)
    else:
        hardware = f"{os.cpu_count()} CPU cores, {platform.machine()}"
    versions = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for name in ("torch", "deepspeed", "numpy"):
        versions[name] = importlib.metadata.version(name)
    return {"hardware": hardware, "versions": versions}
