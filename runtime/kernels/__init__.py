"""Triton, where it is there: PyTorch brings it along for CUDA."""

import torch

try:
    import triton
    import triton.language as tl

    jit = triton.jit
except ImportError:
    triton, tl = None, None

    def jit(function=None, **options):
        return function or jit


def runs_on(weight):
    """Whether our kernels run where the weight is: Triton supports NVIDIA's from compute capability 8.0; others, and
    ROCm, which also goes by the name of CUDA, have not been tried."""
    if triton is None or torch.version.hip:
        return False
    return not weight.is_cuda or torch.cuda.get_device_capability(weight.device) >= (8, 0)
