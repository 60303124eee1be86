"""FP8 matmuls in the blocks (fp8=True), on Hopper and later.

A linear layer, y = input @ weight.T + bias, needs three GEMMs:

  1. forward          y           = input @ weight.T       FP8, both in E4M3
  2. input gradient   grad_input  = grad_output @ weight   FP8, grad_output in E5M2, which has more range
  3. weight gradient  grad_weight = grad_output.T @ input  FP8, grad_output in E5M2, with a float32 result

The output layer and evaluations don't use it. FP8 has a small range: E4M3 up to 448, E5M2 up to 57,344
(Micikevicius et al., arXiv:2209.05433). So each tensor is multiplied by a scale before its cast, and y by the inverses.
Scaling is delayed, as in NVIDIA's Transformer Engine: the scale comes from the largest absolute value (amax) in the
previous micro-step, with a headroom factor of 2. This lets the kernel that computes a tensor store it in FP8 only. The
weight gradient's GEMM needs its inputs transposed, because FP8 GEMMs on Hopper only multiply a @ b.T.
The first micro-step of a process runs without FP8 to calibrate, so the losses of a resumed run differ slightly.
"""

from enum import Enum

import torch
import torch.nn.functional as F

from model import addmm_fp32
from runtime.kernels import jit, tl, triton

INPUT, WEIGHT, GRAD_OUTPUT = 0, 1, 2  # the tensors of a layer that are cast
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float8_e5m2)
Mode = Enum("Mode", "OFF CALIBRATE ON")


@jit
def store(out, offsets, values, mask, scale, slot, FP8: tl.constexpr):
    """Store values in out's dtype, and with FP8 scaled. Returns the largest absolute value for update_amax."""
    largest = 0.0
    if FP8:
        LIMIT: tl.constexpr = 448.0 if out.dtype.element_ty == tl.float8e4nv else 57344.0
        largest = tl.max(tl.abs(values))
        values = tl.minimum(tl.maximum(values * tl.load(scale + slot), -LIMIT), LIMIT)
    tl.store(out + offsets, values.to(out.dtype.element_ty), mask=mask)
    return largest


@jit
def update_amax(amax, slot, value, FP8: tl.constexpr):
    """With FP8, raise a slot's amax to `value`, once per program. A load comes first because amax rarely grows."""
    if FP8:
        if value > tl.load(amax + slot, volatile=True):
            tl.atomic_max(amax + slot, value)


@jit(do_not_specialize=["slot"])
def cast_kernel(x, out, rows, C, amax, scale, slot, TRANSPOSE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Cast a tile of x (rows, C), which may be in FP8 already, to out: (rows, C), or (C, rows) with TRANSPOSE."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (r < rows)[:, None] & (c < C)[None, :]
    offsets = r[:, None].to(tl.int64) * C + c[None, :]
    values = tl.load(x + offsets, mask=mask, other=0.0)
    if TRANSPOSE:
        offsets, values, mask = c[:, None].to(tl.int64) * rows + r[None, :], tl.trans(values), tl.trans(mask)
    if x.dtype == out.dtype:
        tl.store(out + offsets, values, mask=mask)
    else:
        update_amax(amax, slot, store(out, offsets, values.to(tl.float32), mask, scale, slot, True), True)


class Fp8Scales:
    """The scales of a model's FP8 tensors. Each linear layer in a block has three slots: INPUT, WEIGHT, GRAD_OUTPUT."""

    def __init__(self, model):
        layers = [layer for block in model.transformer.h
                  for layer in (block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj)]
        n, device = 3 * len(layers), layers[0].weight.device
        self.amax = torch.zeros(n, device=device)  # of this micro-step
        self.scale = torch.ones(n, device=device)  # in use
        self.inverse = torch.ones((n, 4), device=device)  # of scale, repeated: cuBLAS needs 16-byte alignment
        self.limits = torch.tensor([torch.finfo(d).max for d in FP8_DTYPES], device=device).repeat(len(layers))
        self.mode, self.calibrated = Mode.OFF, False
        for i, layer in enumerate(layers):
            layer.weight.fp8_slot = self, 3 * i

    def update(self, block, inputs):
        """Compute new scales from the previous micro-step's amax. This is a forward pre-hook of the first block."""
        if len(inputs) > 4:  # with a cache, blocks don't use FP8
            return
        self.mode = Mode.OFF if not block.training else Mode.ON if self.calibrated else Mode.CALIBRATE
        if self.mode is Mode.ON:
            usable = (self.amax > 0) & torch.isfinite(self.amax)
            self.scale.copy_(torch.where(usable, self.limits / (2 * self.amax), self.scale))
            self.inverse.copy_(1 / self.scale[:, None])
            self.amax.zero_()
        self.calibrated = self.calibrated or block.training


def slot_of(weight):
    """Return (mode, scales, first slot) of a layer's weight."""
    scales, slot = getattr(weight, "fp8_slot", (None, 0))
    return scales.mode if scales else Mode.OFF, scales, slot


def empty_output(weight, which, like, shape):
    """Return an empty tensor for `which` (INPUT or GRAD_OUTPUT) of the weight's layer, like `like` or in FP8 if the
    layer's GEMMs are, and the FP8 arguments of the kernel that fills it. Without FP8 these are unused pointers."""
    mode, scales, slot = slot_of(weight)
    if mode is not Mode.ON:
        return like.new_empty(shape), {"amax": like, "scale": like, "slot": 0, "FP8": False}
    out = like.new_empty(shape, dtype=FP8_DTYPES[which])
    return out, {"amax": scales.amax, "scale": scales.scale, "slot": slot + which, "FP8": True}


def differentiable(ctx, out, like):
    """Return (out, None) in the dtype of `like`, or (a tensor without memory, out) in FP8: autograd casts a gradient to
    its output's dtype, so an FP8 output needs another one that stands for it."""
    if out.dtype == like.dtype:
        return out, None
    ctx.mark_non_differentiable(out)
    return like.new_empty(1).expand_as(like), out


def cast(x, weight, which, transpose=False):
    """Return x (rows, C), which may be in FP8 already, in FP8: (rows, C), or (C, rows) with transpose."""
    (rows, C), (scales, slot) = x.shape, weight.fp8_slot
    if x.dtype == FP8_DTYPES[which] and not transpose:
        return x
    out = torch.empty((C, rows) if transpose else (rows, C), dtype=FP8_DTYPES[which], device=x.device)
    cast_kernel[(triton.cdiv(rows, 64), triton.cdiv(C, 128))](x, out, rows, C, scales.amax, scales.scale, slot + which,
                                                              transpose, ROWS=64, COLUMNS=128)
    return out


def linear(x, weight, bias, dtype):
    """Return x (..., in) @ weight.T (in, out) + bias (or None) in dtype: the forward GEMM. x may be in FP8."""
    bias = bias if bias is None else bias.to(dtype)
    mode, scales, slot = slot_of(weight)
    if mode is Mode.CALIBRATE:
        scales.amax[slot + INPUT], scales.amax[slot + WEIGHT] = x.abs().max(), weight.abs().max()
    if mode is not Mode.ON:
        return F.linear(x, getattr(weight, "in_float16", weight).to(dtype), bias)
    y = torch._scaled_mm(cast(x.reshape(-1, x.size(-1)), weight, INPUT), cast(weight, weight, WEIGHT).t(),
                         scales.inverse[slot + INPUT, 0], scales.inverse[slot + WEIGHT, 0], bias=bias,
                         out_dtype=dtype, use_fast_accum=True)
    return y.view(*x.shape[:-1], -1)


def grad_input(dy, weight, dtype):
    """Return dy (rows, out) @ weight (out, in) in dtype: the input gradient's GEMM. dy may be in FP8."""
    mode, scales, slot = slot_of(weight)
    if mode is Mode.CALIBRATE:
        scales.amax[slot + GRAD_OUTPUT] = dy.abs().max()
    if mode is not Mode.ON:
        return dy @ getattr(weight, "in_float16", weight).to(dtype)
    return torch._scaled_mm(cast(dy, weight, GRAD_OUTPUT), cast(weight, weight, WEIGHT, transpose=True).t(),
                            scales.inverse[slot + GRAD_OUTPUT, 0], scales.inverse[slot + WEIGHT, 0],
                            out_dtype=dtype)


def grad_weight(dy, x, weight):
    """Return dy.T (out, rows) @ x (rows, in) in float32: the weight gradient's GEMM in FP8. dy and x may be in FP8."""
    scales, slot = weight.fp8_slot
    return torch._scaled_mm(cast(dy, weight, GRAD_OUTPUT, transpose=True), cast(x, weight, INPUT, transpose=True).t(),
                            scales.inverse[slot + GRAD_OUTPUT, 0], scales.inverse[slot + INPUT, 0],
                            out_dtype=torch.float32)


def linear_grads(x, weight, dy, dtype):
    """Return (dx, dweight) of a linear layer in dtype from dy (N, out). x and dy may be in FP8. If the weight has a
    main_grad, the GEMM accumulates into it, or overwrites it with overwrite_main_grad, and dweight is None."""
    use_fp8, overwrite = slot_of(weight)[0] is Mode.ON, hasattr(weight, "overwrite_main_grad")
    dy = cast(dy, weight, GRAD_OUTPUT) if use_fp8 else dy
    dx, x = grad_input(dy, weight, dtype).view(x.shape), x.reshape(-1, x.size(-1))
    if use_fp8:
        dweight = grad_weight(dy, x, weight)
    elif hasattr(weight, "main_grad") and not overwrite:
        addmm_fp32(weight.main_grad, dy.t(), x)
        return dx, None
    elif dtype != weight.dtype:
        dweight = addmm_fp32(torch.zeros_like(weight, dtype=torch.float32), dy.t(), x)
    elif overwrite:
        torch.mm(dy.t(), x, out=weight.main_grad)
        return dx, None
    else:
        return dx, dy.t() @ x
    if not hasattr(weight, "main_grad"):
        return dx, dweight.to(weight.dtype)
    (weight.main_grad.copy_ if overwrite else weight.main_grad.add_)(dweight)
    return dx, None
