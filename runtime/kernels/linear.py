"""The GEMMs of a linear layer in the fused blocks, y = x @ weight.T + bias, and of its
gradients."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.kernels import fp8
from runtime.loss import addmm_fp32


@dataclass(eq=False)
class Casts:
    """A layer's weight in other dtypes, for its GEMMs.

    in_float16: a copy, of the present weight once FusedBlocks.copy_weights() was called; None:
    convert the weight at each use. slot: where the scales of its tensors are; None: no FP8.
    """

    in_float16: Tensor | None = None
    slot: fp8.Slot | None = None

    def use_fp8(self) -> bool:
        """Return whether this micro-step's GEMMs are in FP8."""
        return self.slot is not None and self.slot.scales.mode is fp8.Mode.ON

    def calibrates(self) -> bool:
        """Return whether this micro-step measures the tensors for FP8."""
        return self.slot is not None and self.slot.scales.mode is fp8.Mode.CALIBRATE


def linear(
    x: Tensor, weight: nn.Parameter, casts: Casts, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return x (..., in) @ weight.T (in, out) + bias in dtype: the forward GEMM. x may be in
    FP8."""
    if bias is not None:
        bias = bias.to(dtype)
    if casts.use_fp8():
        y = fp8.forward(x.reshape(-1, x.size(-1)), weight, casts.slot, bias, dtype)
        return y.view(*x.shape[:-1], -1)

    # The first micro-step measures, in the model's precision
    if casts.calibrates():
        casts.slot.measure(fp8.INPUT, x)
        casts.slot.measure(fp8.WEIGHT, weight)
    return F.linear(x, weight_in(dtype, weight, casts), bias)


def grad_input(dy: Tensor, weight: nn.Parameter, casts: Casts, dtype: torch.dtype) -> Tensor:
    """Return dy (rows, out) @ weight (out, in) in dtype. dy may be in FP8."""
    if casts.use_fp8():
        return fp8.grad_input(dy, weight, casts.slot, dtype)
    if casts.calibrates():
        casts.slot.measure(fp8.GRAD_OUTPUT, dy)
    return dy @ weight_in(dtype, weight, casts)


def weight_in(dtype: torch.dtype, weight: nn.Parameter, casts: Casts) -> Tensor:
    """Return a weight in a dtype."""
    if casts.in_float16 is not None and dtype == torch.float16:
        return casts.in_float16
    return weight.to(dtype)


def linear_grads(
    x: Tensor, weight: nn.Parameter, casts: Casts, dy: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Return (dx, dweight) of a linear layer in dtype from dy (rows, out). x and dy may be in FP8.

    If the weight has a sink (engine/grad_sink.py), the GEMM adds to it, and dweight is None.
    """
    # The gradient of the input, before dy is used transposed
    use_fp8 = casts.use_fp8()
    if use_fp8:
        dy = fp8.cast(dy, casts.slot, fp8.GRAD_OUTPUT)
    dx = grad_input(dy, weight, casts, dtype).view(x.shape)
    x = x.reshape(-1, x.size(-1))
    sink = getattr(weight, "grad_sink", None)

    # FP8's GEMM can't add to a sink by itself
    if use_fp8:
        dweight = fp8.grad_weight(dy, x, casts.slot)
        if sink is None:
            return dx, dweight.to(weight.dtype)
        sink.add(dweight)
        return dx, None
    if sink is not None:
        sink.add_product(dy.t(), x)
        return dx, None
    if dtype == weight.dtype:
        return dx, dy.t() @ x

    # In half precision, a sum over many rows is rounded once
    total = torch.zeros_like(weight, dtype=torch.float32)
    return dx, addmm_fp32(total, dy.t(), x).to(weight.dtype)
