"""The cross-entropy of the output layer in chunks of rows: the full logits are never in memory."""

from collections.abc import Callable

import torch
from torch import Tensor

LOSS_CHUNK = 4096  # rows of logits in memory at one time; 4096 x 50304 in bf16 take 412 MB
EAGER_LOSS_CHUNK = 2048  # without torch.compile, which halves the memory per row
FP16_GRAD_FACTOR = 1024.0  # many gradients of logits are below 3e-8, which float16 rounds to 0

# PyTorch 2.7 doesn't have it
ADDMM_OUT_DTYPE = "dtype_out" in torch.ops.aten.addmm.overloads() and not torch.version.hip


def addmm_fp32(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Add a @ b to `total` in place, in float32, and return it. On CUDA this is one GEMM.

    total: (rows, columns). a: (rows, n), b: (n, columns), of one dtype.
    """
    if a.is_cuda and a.dtype != total.dtype and ADDMM_OUT_DTYPE:
        return torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    if a.dtype == torch.float16:  # in float16 the sum would overflow
        return total.add_(a.float() @ b.float())
    return total.add_(a @ b)


def cross_entropy_with_grad(
    logits: Tensor, targets: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of each row and its gradient with respect to the logits.

    logits: (N, padded_vocab_size), of which padding columns are ignored. targets: (N,), -1 to
    ignore a row. Returns (N,) in fp32, and a gradient like logits. In float16 it is multiplied by
    FP16_GRAD_FACTOR.
    """
    columns = torch.arange(logits.size(1), device=logits.device)
    logits32 = logits.float().masked_fill(columns >= vocab_size, float("-inf"))
    log_z = torch.logsumexp(logits32, dim=1, keepdim=True)
    valid = (targets >= 0).unsqueeze(1)
    row_target = targets.clamp(min=0).unsqueeze(1)
    losses = (log_z - logits32.gather(1, row_target)) * valid
    grad = (torch.exp(logits32 - log_z) - (columns == row_target).float()) * valid
    if logits.dtype == torch.float16:
        grad = grad * FP16_GRAD_FACTOR
    return losses.squeeze(1), grad.to(logits.dtype)


class FusedLinearCrossEntropy(torch.autograd.Function):
    """Computes the mean or the sum of the cross-entropy of x @ weight.T, LOSS_CHUNK rows at a time.

    Forward computes each chunk's gradients from its logits, so the full logits are never in memory
    (Liger Kernel, arXiv:2410.10989). Backward scales them in float32, because a scale rounded to
    bfloat16 can be off by 0.4%.
    """

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        vocab_size: int,
        cross_entropy: Callable,
        mean: bool = True,
    ) -> Tensor:
        """Return the loss of x (N, n_embd). cross_entropy: cross_entropy_with_grad, maybe
        compiled."""
        grad_x = torch.empty_like(x)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        total = torch.zeros((), device=x.device)
        chunk = EAGER_LOSS_CHUNK if cross_entropy is cross_entropy_with_grad else LOSS_CHUNK
        for first in range(0, x.size(0), chunk):
            rows = slice(first, first + chunk)
            losses, grad = cross_entropy(x[rows] @ weight.T, targets[rows], vocab_size)
            total += losses.sum()
            grad_x[rows] = grad @ weight
            if grad_weight is not None:
                addmm_fp32(grad_weight, grad.T, x[rows])
        count = (targets >= 0).sum() if mean else torch.ones((), device=x.device)
        ctx.save_for_backward(grad_x, grad_weight, count)
        return total / count

    @staticmethod
    def backward(ctx, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x and weight."""
        grad_x, grad_weight, count = ctx.saved_tensors
        if grad_x.dtype == torch.float16:
            scale = grad_loss.float() / (count * FP16_GRAD_FACTOR)
        else:
            scale = grad_loss.float() / count
        if grad_weight is not None:
            # Scale and round in one pass: GPT-2 XL has 80M of these weights
            rounded = torch.empty_like(grad_weight, dtype=grad_x.dtype)
            grad_weight = torch.mul(grad_weight, scale, out=rounded)
        grad_x = grad_x.float().mul_(scale).to(grad_x.dtype)
        return grad_x, grad_weight, None, None, None, None
