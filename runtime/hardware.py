"""The table of GPUs, free memory, the settings device, dtype and compile, and what a record says of the machine."""

import importlib.metadata
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch.nn.attention import SDPBackend

from runtime.errors import UserError
from runtime.files import ROOT
from runtime.output import counted

CGROUP = Path("/sys/fs/cgroup")  # version 2, of this container
HIDES_ALL_GPUS = ("", "-1", "none")  # values of CUDA_VISIBLE_DEVICES that a user sets for the CPU


@dataclass(frozen=True)
class Gpu:
    """A GPU model, from its vendor's datasheet."""

    gb: float  # memory in GB (1e9 bytes)
    tflops: float | None  # dense peak in bfloat16, or in float16 if it has no bfloat16
    bf16: bool = True  # compute capability 8.0 and up
    fp8: bool = False  # our FP8 kernels run on it: compute capability 9.0 and up


@dataclass(frozen=True)
class Execution:
    """What each rank runs on: this machine, or the GPU that target_gpu names."""

    device: str  # "cuda" or "cpu"
    dtype: str  # "bfloat16", "float16" or "float32"
    compile: bool
    memory: int  # bytes per rank
    gpu: Gpu | None = None  # target_gpu's; None: the GPU of this machine

    @property
    def torch_dtype(self):
        return getattr(torch, self.dtype)

    @property
    def peak_flops(self):
        """The GPU's peak in FLOP/s, or None if it is unknown."""
        return (self.gpu.tflops and self.gpu.tflops * 1e12) if self.gpu else peak_flops(self.device)


GPUS = {
    "T4": Gpu(16, 65, bf16=False), "V100": Gpu(16, 125, bf16=False), "V100-32": Gpu(32, 125, bf16=False),
    "A10": Gpu(24, 125), "A10G": Gpu(24, 70), "L4": Gpu(24, 121), "3090": Gpu(24, 71), "4090": Gpu(24, 165),
    "5090": Gpu(32, 210), "A100-40": Gpu(40, 312), "A6000": Gpu(48, 155), "L40": Gpu(48, 181), "L40S": Gpu(48, 362),
    "A100": Gpu(80, 312), "H100": Gpu(80, 989, fp8=True), "H100 PCIE": Gpu(80, 756, fp8=True),
    "H100 NVL": Gpu(94, 835, fp8=True), "H200": Gpu(141, 989, fp8=True), "B200": Gpu(180, 2250, fp8=True)}


def gpu_named(name):
    """Return the Gpu of a name such as 4090, RTX4090 or nvidia-smi's NVIDIA A100-SXM4-40GB, or None. All words of the
    name have to fit: a 4090 Laptop GPU, an A1000 or a T400 is another GPU."""
    words = re.sub(r"NVIDIA|GEFORCE|TESLA|RTX|SXM\d*|HBM\w*|(?<=\d) ?GB\b", " ", name.upper())
    words = set(re.findall(r"[\w.]+", words))
    for key in sorted(GPUS, key=len, reverse=True):
        own = set(re.findall(r"\w+", key))
        if own <= words <= own | {"PCIE", f"{GPUS[key].gb:g}"}:
            return GPUS[key]


def find_gpu(target):
    """Return the Gpu for the setting target_gpu: a name, or a number of GB. Raises UserError."""
    text = target if isinstance(target, str) else f"{target:g}"
    if gpu := gpu_named(text):  # 4090 is parsed as a number
        return gpu
    size = re.fullmatch(r"(\d+(\.\d+)?) ?(GB)?", text, re.I)
    if not size or not 0 < float(size[1]) <= 1000:  # 3080 is a name too
        raise UserError(f"target_gpu={text} is unknown: give a number of GB, or one of {', '.join(GPUS)}")
    return Gpu(float(size[1]), None, fp8=True)


def peak_flops(device):
    """Return the device's peak in FLOP/s, or None if it isn't in GPUS. MFU is n/a then."""
    gpu = gpu_named(torch.cuda.get_device_name(device)) if torch.device(device).type == "cuda" else None
    return gpu and gpu.tflops * 1e12


def attention_backends(device):
    """Return SDPA's kernels for `device`, the preferred one first. On an H200, cuDNN's is 1.4x as fast as flash."""
    has_cudnn = torch.cuda.get_device_capability(device)[0] >= 9
    every = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return every[not has_cudnn :]


def peak_memory(device):
    """Return the peak memory so far in bytes: allocated on the GPU, or resident on CPU."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1024 if sys.platform == "linux" else 1)


def available_memory():
    """Return the free bytes of host memory, within the container's limit. Cached files count as free."""
    free = psutil.virtual_memory().available
    try:
        limit, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        cached = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())["inactive_file"]
    except (OSError, ValueError, KeyError):  # no cgroup, or its limit is "max"
        return free
    return min(free, limit - used + int(cached))


def run_command(*command):
    """Return the output of a command, stripped, or "" if it fails, takes too long or isn't installed."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def unsupported_gpu(capabilities=None):
    """Return (problem, fix) if this PyTorch has no kernels for one of these compute capabilities, else None. Default:
    those of the GPUs that nvidia-smi lists, which PyTorch may not find.

    A GPU runs binaries (sm_75) of its major version, up to its minor version, and any older PTX (compute_75)."""
    if capabilities is None:
        listed = run_command("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
        capabilities = [tuple(map(int, digits)) for digits in re.findall(r"^(\d+)\.(\d+)$", listed, re.M)]
    flags = getattr(torch._C, "_cuda_getArchFlags", str)() or ""  # CPU builds have none, and ROCm's look different
    built = [(kind, (int(major), int(minor))) for kind, major, minor in re.findall(r"(sm|compute)_(\d+)(\d)\b", flags)]
    for gpu in capabilities if built else ():
        if not any(arch <= gpu and (kind == "compute" or arch[0] == gpu[0]) for kind, arch in built):
            fix = f"run python -m pip install -r requirements{'-volta' * (gpu < (7, 5))}.txt"
            return (f"PyTorch {torch.__version__} has no kernels for GPUs of compute capability {gpu[0]}.{gpu[1]}",
                    fix if gpu >= (5, 0) else "use another GPU, or CUDA_VISIBLE_DEVICES=-1 for the CPU")


def undetected_gpu():
    """Return (problem, fix) if PyTorch finds no GPU, but nvidia-smi lists one that isn't hidden, else None."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in HIDES_ALL_GPUS
    if torch.cuda.is_available() or hidden:
        return None
    listed = run_command("nvidia-smi", "-L")
    if not listed.startswith("GPU "):
        return wrong_gpu_names(listed)
    return wrong_gpu_names(listed) or unsupported_gpu() or (
        f"nvidia-smi lists GPUs, but PyTorch {torch.__version__}, for CUDA {torch.version.cuda}, finds none",
        "update the driver, install a PyTorch for its CUDA version, or set CUDA_VISIBLE_DEVICES=-1 for the CPU")


def wrong_gpu_names(listed: str) -> tuple[str, str] | None:
    """Return (problem, fix) if CUDA_VISIBLE_DEVICES names a GPU that this machine doesn't have, else None.

    CUDA takes the GPUs before the first wrong name, without a word. listed: what `nvidia-smi -L`
    prints, "GPU 0: NVIDIA H100 (UUID: GPU-8f1c...)" for each GPU.
    """
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    if value is None or value in HIDES_ALL_GPUS:
        return None
    problem = f"CUDA_VISIBLE_DEVICES={value}"
    if value == "NoDevFiles":  # Slurm sets it
        return f"{problem}: this job has no GPU", "request one with --gpus-per-node=1, or use --device=cpu"
    numbers = re.findall(r"^GPU (\d+):", listed, re.M)
    ids = re.findall(r"\(UUID: ([\w-]+)\)", listed)
    names = [name.strip() for name in value.split(",")]
    wrong = [name for name in names if name not in numbers and not is_start_of_one(name, ids)]
    if not wrong and len(set(names)) < len(names):
        return f"{problem} names a GPU twice, so CUDA finds none", "name each once"
    if not wrong or not numbers:
        return None
    has = f"GPUs 0 to {numbers[-1]}" if len(numbers) > 1 else "GPU 0 only"
    return (f"{problem} names {', '.join(wrong)}, but nvidia-smi lists {has}",
            "change it, or set CUDA_VISIBLE_DEVICES=-1 for the CPU")


def is_start_of_one(name: str, ids: list[str]) -> bool:
    """Return whether a name is the beginning of the id of exactly one GPU, as CUDA takes it."""
    return name.startswith(("GPU-", "MIG-")) and sum(found.startswith(name) for found in ids) == 1


def pick_device(device, local_world_size=1):
    """Resolve the setting device: "auto" is "cuda" if PyTorch finds a GPU, else "cpu". Raises UserError, also unless
    PyTorch can use `local_world_size` GPUs."""
    problem = undetected_gpu() if device != "cpu" else None
    if device == "cuda" and not torch.cuda.is_available():
        why = ": ".join(problem) if problem else "use --device=cpu, or check nvidia-smi"
        raise UserError(f"device=cuda, but PyTorch finds no CUDA GPU: {why}")
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if device == "cuda" and local_world_size > (gpus := torch.cuda.device_count()):
        if wrong := wrong_gpu_names(run_command("nvidia-smi", "-L")):
            raise UserError(": ".join(wrong))
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        where = f"CUDA_VISIBLE_DEVICES={visible}" if visible else "this machine"
        raise UserError(f"{counted(local_world_size, 'rank')}, but {counted(gpus, 'GPU')} on {where}: start "
                        f"{counted(gpus, 'rank')}, or use --device=cpu")
    gpus = local_world_size if device == "cuda" else 0
    if problem := problem or unsupported_gpu(map(torch.cuda.get_device_capability, range(gpus))):
        raise UserError(": ".join(problem))
    return device


def pick_dtype(dtype, device):
    """Resolve the setting dtype: "auto" is bfloat16 from compute capability 8.0 up, float16 below, float32 on CPU.
    Raises UserError if the device doesn't support it."""
    has_bf16 = device == "cuda" and torch.cuda.get_device_capability() >= (8, 0)
    if dtype == "auto":
        return "float32" if device == "cpu" else "bfloat16" if has_bf16 else "float16"
    if dtype == "float16" and device == "cpu":
        raise UserError("dtype=float16 needs a GPU: use --dtype=float32 or --dtype=bfloat16")
    if dtype == "bfloat16" and device == "cuda" and not has_bf16:
        raise UserError(f"dtype=bfloat16 needs compute capability 8.0, but {torch.cuda.get_device_name()} has less: "
                        "use --dtype=float16 or --dtype=auto")
    return dtype


def pick_compile(setting, device):
    """Resolve the setting compile. Return (whether to compile, a note or None)."""
    if setting is False:
        return False, None
    lowest = 8 if setting == "auto" else 7  # Triton needs 7.0; below 8.0 nothing is measured
    why = "it is for GPUs only" if device == "cpu" else missing_compiler()
    if device == "cuda" and torch.cuda.get_device_capability()[0] < lowest:
        why = f"compile={setting} needs compute capability {lowest}.0"
    return why is None, f"not compiled: {why}" if why and (setting is True or device == "cuda") else None


def missing_compiler():
    """Return why Triton can't compile on this machine, or None."""
    compiler = any(shutil.which(c) for c in (os.environ.get("CC", "cc"), "gcc", "clang"))
    if not compiler or not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")):
        return "Triton needs a C compiler and Python's headers (gcc, python3-dev)"


def git_commit():
    """Return the project's commit, with '+' if there are uncommitted changes, or None outside git."""
    return run_command("git", "-C", ROOT, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+") or None


def machine_record(device):
    """Return what measurements depend on: the hardware and the versions."""
    cuda = torch.device(device).type == "cuda"
    return {
        "hardware": torch.cuda.get_device_name(device) if cuda else f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "versions": {"python": platform.python_version(), "cuda": torch.version.cuda,
                     **{name: importlib.metadata.version(name) for name in ("torch", "deepspeed", "numpy")}}}
