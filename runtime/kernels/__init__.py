"""Triton, which PyTorch installs along with CUDA; without it jit does nothing."""

import torch

try:
    import triton
    import triton.language as tl

    jit = triton.jit
except ImportError:
    triton, tl = None, None

    def jit(function=None, **options):
        return function or jit


def is_supported(weight):
    """Whether our kernels run on the weight's device: on NVIDIA GPUs from compute capability 8.0 on, which Triton
    supports. Others are untested, and so is ROCm, which is also called "cuda"."""
    if triton is None or torch.version.hip:
        return False
    return not weight.is_cuda or torch.cuda.get_device_capability(weight.device) >= (8, 0)
