"""Attention on hard inputs against float64: the kernels that run on a CPU. gpu/test_gpu_attention.py has the others."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

HEAD = 64  # elements
# Errors of the gradient of q in bfloat16, seen on an H200 with cuDNN's and flash attention; on a CPU they are the same.
# The last one is a known limit: the gradient of the scores is rounded, so its sum over the keys isn't 0, and the offset
# multiplies that
SEEN = {"plain": 0.0025, "large logits": 0.007, "repeated keys": 0.008, "sink key": 0.010, "offset of all keys": 0.12}


def inputs(case, heads, T, device):
    """Return q, k, v and the gradient of the output, (1, heads, T, HEAD) each."""
    generator = torch.Generator(device).manual_seed(0)
    q, k, v, grad, other = torch.randn((5, 1, heads, T, HEAD), generator=generator, device=device)
    if case == "large logits":  # a deviation of 64
        q, k = 8 * q, 8 * k
    elif case == "repeated keys":  # each 64 times
        q, k = 2 * q, 2 * other[:, :, ::64].repeat_interleave(64, 2) + 0.01 * k
    elif case == "sink key":
        k[:, :, 0] *= 50
    elif case == "offset of all keys":  # hundreds in each logit, which softmax ignores
        q, k = q + 3 * other[:, :, :1], k + 30 * other[:, :, :1]
    return q, k, v, grad


def attention(q, k, v):
    """The definition, causal."""
    future = torch.ones(q.size(2), q.size(2), dtype=torch.bool, device=q.device).triu(1)
    return torch.softmax((q @ k.mT / HEAD**0.5).masked_fill(future, float("-inf")), -1) @ v


def check(case, backend, dtype, heads=8, T=1024, device="cuda"):
    """Assert that the errors are at most 1.5 times those seen. In float16 they are an eighth."""
    *low, grad = (t.to(dtype) for t in inputs(case, heads, T, device))
    low, exact = ([t.to(kind).requires_grad_() for t in low] for kind in (dtype, torch.float64))
    with sdpa_kernel(backend):
        out = torch.nn.functional.scaled_dot_product_attention(*low, is_causal=True)
    got, wanted = (out, *torch.autograd.grad(out, low, grad)), attention(*exact)
    wanted = wanted, *torch.autograd.grad(wanted, exact, grad.double())
    factor = {torch.bfloat16: 1, torch.float16: 1 / 8, torch.float32: 1 / 20}[dtype]
    bounds = (0.003,) * 4 if backend == SDPBackend.MATH else (0.005, 1.5 * SEEN[case], 0.015, 0.005)
    for name, mine, true, bound in zip(("out", "dq", "dk", "dv"), got, wanted, bounds, strict=True):
        error = ((mine - true).norm() / true.norm()).item()
        assert error < factor * bound, f"{case}, {backend}, {dtype}: {name} {error:.2g}"


@pytest.mark.parametrize("case", SEEN)
@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], ids=lambda backend: backend.name)
def test_attention_and_its_gradients(case, backend):
    for dtype in (torch.float32, torch.bfloat16):
        check(case, backend, dtype, heads=2, device="cpu")
