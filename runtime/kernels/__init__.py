"""Triton, which PyTorch installs with CUDA. Without it, jit does nothing."""

import torch

try:
    import triton
    import triton.language as tl

    jit = triton.jit
except ImportError:
    triton = None

    class tl:
        constexpr = None  # the kernels' annotations name it

    def jit(function=None, **options):
        return function or jit


def device_has_triton(weight):
    """Return whether our kernels run on the weight's device: NVIDIA GPUs with compute capability
    8.0 or higher. Older GPUs and ROCm (whose device is also "cuda") are untested."""
    if triton is None or torch.version.hip:
        return False
    return not weight.is_cuda or torch.cuda.get_device_capability(weight.device) >= (8, 0)
