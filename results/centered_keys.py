"""Attention with and without centered keys: errors of the gradient of q against float64, and on a GPU the times.

    python results/centered_keys.py [--device=cpu] [--json=FILE]

Softmax doesn't change when the same vector is subtracted from all keys, whichever it is, also under a causal mask. Here
it is their mean over the sequence, per head. Errors are relative, for 8 heads of 1,024 tokens in bfloat16. Times are of
forward and backward of all layers, medians of 7 in turns.
"""

import argparse
import json
import statistics

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

KERNELS = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH
SHAPES = {"small, 32 sequences": (32, 12, 12), "xl, 8 sequences": (8, 25, 48)}  # sequences, heads, layers
OFFSETS = 0, 1, 3, 10, 30  # deviation of the offset that all keys of a head share; their own is 1
T, HEAD = 1024, 64  # tokens, elements of a head


def center(k):  # (B, heads, T, HEAD)
    return (k - k.mean(2, keepdim=True, dtype=torch.float32).detach()).to(k.dtype)


def forward_backward(kernel, centered, q, k, v, grad):
    with sdpa_kernel(kernel):
        out = torch.nn.functional.scaled_dot_product_attention(q, centered(k), v, is_causal=True)
    return torch.autograd.grad(out, (q, k, v), grad)


def error(kernel, centered, offset, device):
    """Return the relative error of the gradient of q."""
    generator = torch.Generator(device).manual_seed(0)
    q, k, v, grad = (torch.randn(1, 8, T, HEAD, generator=generator, device=device) for _ in range(4))
    shift = torch.randn(1, 8, 1, HEAD, generator=generator, device=device)
    q, k, v, grad = (t.bfloat16() for t in (q + 3 * shift, k + offset * shift, v, grad))
    exact = [t.double().requires_grad_() for t in (q, k, v)]
    future = torch.ones(T, T, dtype=torch.bool, device=device).triu(1)
    scores = (exact[0] @ exact[1].mT / HEAD**0.5).masked_fill(future, float("-inf"))
    (wanted,) = torch.autograd.grad(torch.softmax(scores, -1) @ exact[2], exact[:1], grad.double())
    got = forward_backward(kernel, centered, *(t.requires_grad_() for t in (q, k, v)), grad)[0]
    return float(f"{((got.double() - wanted).norm() / wanted.norm()).item():.2g}")


def times(kernel, B, heads, layers):
    """Return the median ms of all layers, with the keys as they are and centered by a compiled function."""
    qkv = torch.randn(B, T, 3 * heads * HEAD, device="cuda", dtype=torch.bfloat16)
    q, k, v = (t.view(B, T, heads, HEAD).transpose(1, 2).requires_grad_() for t in qkv.split(heads * HEAD, 2))
    grad, ways, measured = torch.randn_like(q), (lambda k: k, torch.compile(center)), ([], [])
    for repeat in range(9):
        for way, found in zip(ways, measured):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(layers):
                forward_backward(kernel, way, q, k, v, grad)
            end.record()
            end.synchronize()
            if repeat > 1:  # the first two compile and warm up
                found.append(start.elapsed_time(end))
    return [round(statistics.median(found), 3) for found in measured]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--json", default="centered_keys.json")
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    result = {"hardware": torch.cuda.get_device_name() if on_gpu else "CPU", "torch": torch.__version__, "kernels": {}}
    for kernel in KERNELS if on_gpu else KERNELS[1::2]:
        rows = result["kernels"][kernel.name] = {f"dq, offset {offset}": [
            error(kernel, way, offset, args.device) for way in (lambda k: k, center)] for offset in OFFSETS}
        if on_gpu and kernel != SDPBackend.MATH:
            rows.update({f"ms, {name}": times(kernel, *shape) for name, shape in SHAPES.items()})
        for name, (plain, centered) in rows.items():
            print(f"{kernel.name:20} {name:24} {plain:10.4g} {centered:10.4g}")
    with open(args.json, "w", encoding="utf-8") as file:
        file.write(json.dumps(result, indent=1) + "\n")
