"""FP8 matmuls in the blocks (fp8=True), on Hopper and later.

A linear layer, y = input @ weight.T + bias, needs three GEMMs:

  1. forward          y           = input @ weight.T       FP8, both in E4M3
  2. input gradient   grad_input  = grad_output @ weight   FP8, grad_output in E5M2, which has more
                      range
  3. weight gradient  grad_weight = grad_output.T @ input  FP8, grad_output in E5M2, with a float32
                      result

The output layer and evaluations don't use it. FP8 has a small range: E4M3 up to 448, E5M2 up to
57,344 (Micikevicius et al., arXiv:2209.05433). So each tensor is multiplied by a scale before its
cast, and y by the inverses. Scaling is delayed, as in NVIDIA's Transformer Engine: the scale comes
from the largest absolute value (amax) in the previous micro-step, with a headroom factor of 2. This
lets the kernel that computes a tensor store it in FP8 only. The weight gradient's GEMM needs its
inputs transposed, because FP8 GEMMs on Hopper only multiply a @ b.T. The first micro-step of a
process runs without FP8 to calibrate, so the losses of a resumed run differ slightly."""

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn

from runtime.kernels import jit, tl, triton

INPUT, WEIGHT, GRAD_OUTPUT = 0, 1, 2  # the tensors of a layer that are cast
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float8_e5m2)
Mode = Enum("Mode", "OFF CALIBRATE ON")
BLOCK_INPUTS = 4  # residual, branch, its bias, recompute; those of a cache come after them


@jit
def store(out, offsets, values, mask, scale, slot, FP8: tl.constexpr):
    """Store values in out's dtype, and with FP8 scaled. Returns the largest absolute value for
    update_amax."""
    largest = 0.0
    if FP8:
        LIMIT: tl.constexpr = 448.0 if out.dtype.element_ty == tl.float8e4nv else 57344.0
        largest = tl.max(tl.abs(values))
        values = tl.minimum(tl.maximum(values * tl.load(scale + slot), -LIMIT), LIMIT)
    tl.store(out + offsets, values.to(out.dtype.element_ty), mask=mask)
    return largest


@jit
def update_amax(amax, slot, value, FP8: tl.constexpr):
    """With FP8, raise a slot's amax to `value`, once per program. A load comes first because amax
    rarely grows."""
    if FP8:
        if value > tl.load(amax + slot, volatile=True):
            tl.atomic_max(amax + slot, value)


@jit(do_not_specialize=["slot"])
def cast_kernel(
    x,
    out,
    rows,
    C,
    amax,
    scale,
    slot,
    TRANSPOSE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Cast a tile of x (rows, C), which may be in FP8 already, to out: (rows, C), or (C, rows) with
    TRANSPOSE."""
    # This program's tile
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (r < rows)[:, None] & (c < C)[None, :]
    offsets = r[:, None].to(tl.int64) * C + c[None, :]
    values = tl.load(x + offsets, mask=mask, other=0.0)
    if TRANSPOSE:
        offsets, values, mask = (
            c[:, None].to(tl.int64) * rows + r[None, :],
            tl.trans(values),
            tl.trans(mask),
        )

    # One in FP8 has its scale already
    if x.dtype == out.dtype:
        tl.store(out + offsets, values, mask=mask)
    else:
        update_amax(
            amax, slot, store(out, offsets, values.to(tl.float32), mask, scale, slot, True), True
        )


class Fp8Scales:
    """The scales of a model's FP8 tensors. Each linear layer in a block has three: INPUT, WEIGHT
    and GRAD_OUTPUT.

    mode is the present micro-step's. n_layers: linear layers in all blocks.
    """

    def __init__(self, n_layers: int, device: torch.device) -> None:
        n = 3 * n_layers
        self.amax = torch.zeros(n, device=device)  # of this micro-step
        self.scale = torch.ones(n, device=device)  # in use
        # Of scale, repeated: cuBLAS needs 16-byte alignment
        self.inverse = torch.ones((n, 4), device=device)
        largest = [torch.finfo(dtype).max for dtype in FP8_DTYPES]
        self.limits = torch.tensor(largest, device=device).repeat(n_layers)
        self.mode = Mode.OFF
        self.calibrated = False

    def update(self, block: nn.Module, inputs: tuple, named: dict) -> None:
        """Compute new scales from the previous micro-step's amax. This is a forward pre-hook of the
        first block."""
        has_cache = len(inputs) > BLOCK_INPUTS or bool(named)
        if has_cache:  # then blocks don't use FP8
            return

        # Evaluations are in the model's precision, and leave the scales alone
        if not block.training:
            self.mode = Mode.OFF
        elif self.calibrated:
            self.mode = Mode.ON
            usable = (self.amax > 0) & torch.isfinite(self.amax)
            self.scale.copy_(torch.where(usable, self.limits / (2 * self.amax), self.scale))
            self.inverse.copy_(1 / self.scale[:, None])
            self.amax.zero_()
        else:
            self.mode = Mode.CALIBRATE
            self.calibrated = True


@dataclass(frozen=True, eq=False)
class Slot:
    """Where the scales of a layer's tensors are: three from `first` on."""

    scales: Fp8Scales
    first: int

    def measure(self, which: int, tensor: Tensor) -> None:
        """Note the largest absolute value of one of the layer's tensors."""
        self.scales.amax[self.first + which] = tensor.abs().max()

    def inverse(self, which: int) -> Tensor:
        """Return what the values of one of the layer's FP8 tensors are to be multiplied by."""
        return self.scales.inverse[self.first + which, 0]


def empty_output(slot: Slot | None, which: int, like: Tensor, shape: tuple) -> tuple[Tensor, dict]:
    """Return an empty tensor for a layer's INPUT or GRAD_OUTPUT, and the FP8 arguments of the
    kernel that fills it.

    slot: of the layer, whose GEMMs are in FP8; None: the tensor is like `like`, and the arguments
    are unused pointers.
    """
    if slot is None:
        return like.new_empty(shape), {"amax": like, "scale": like, "slot": 0, "FP8": False}

    # In FP8, the kernel that fills it also measures it for the next micro-step
    out = like.new_empty(shape, dtype=FP8_DTYPES[which])
    scales = slot.scales
    arguments = {
        "amax": scales.amax,
        "scale": scales.scale,
        "slot": slot.first + which,
        "FP8": True,
    }
    return out, arguments


def differentiable(ctx, out: Tensor, like: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return (out, None) in the dtype of `like`, or (a tensor without memory, out) in FP8.

    Autograd casts a gradient to its output's dtype, so an FP8 output needs another one that stands
    for it.
    """
    if out.dtype == like.dtype:
        return out, None
    ctx.mark_non_differentiable(out)
    return like.new_empty(1).expand_as(like), out


def cast(x: Tensor, slot: Slot, which: int, transpose: bool = False) -> Tensor:
    """Return x (rows, C), which may be in FP8 already, in FP8: (rows, C), or (C, rows) with
    transpose."""
    # A kernel may have stored it in FP8
    rows, C = x.shape
    dtype = FP8_DTYPES[which]
    if x.dtype == dtype and not transpose:
        return x

    # Otherwise it is read and written once more
    out = torch.empty((C, rows) if transpose else (rows, C), dtype=dtype, device=x.device)
    grid = triton.cdiv(rows, 64), triton.cdiv(C, 128)
    scales = slot.scales
    cast_kernel[grid](
        x,
        out,
        rows,
        C,
        scales.amax,
        scales.scale,
        slot.first + which,
        transpose,
        ROWS=64,
        COLUMNS=128,
    )
    return out


def forward(
    x: Tensor, weight: Tensor, slot: Slot, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return x (rows, in) @ weight.T + bias in dtype: the forward GEMM in FP8."""
    return torch._scaled_mm(
        cast(x, slot, INPUT),
        cast(weight, slot, WEIGHT).t(),
        slot.inverse(INPUT),
        slot.inverse(WEIGHT),
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=True,
    )


def grad_input(dy: Tensor, weight: Tensor, slot: Slot, dtype: torch.dtype) -> Tensor:
    """Return dy (rows, out) @ weight in dtype: the input gradient's GEMM in FP8."""
    return torch._scaled_mm(
        cast(dy, slot, GRAD_OUTPUT),
        cast(weight, slot, WEIGHT, transpose=True).t(),
        slot.inverse(GRAD_OUTPUT),
        slot.inverse(WEIGHT),
        out_dtype=dtype,
    )


def grad_weight(dy: Tensor, x: Tensor, slot: Slot) -> Tensor:
    """Return dy.T (out, rows) @ x (rows, in) in float32: the weight gradient's GEMM in FP8."""
    return torch._scaled_mm(
        cast(dy, slot, GRAD_OUTPUT, transpose=True),
        cast(x, slot, INPUT, transpose=True).t(),
        slot.inverse(GRAD_OUTPUT),
        slot.inverse(INPUT),
        out_dtype=torch.float32,
    )
