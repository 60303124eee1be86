"""The kernels of GPT-2's blocks for training, with few memory passes between the GEMMs.

  residual + layer norm  One kernel adds a branch (attention or MLP) and its bias to the residual
                         stream and normalizes the sum. So a chained block returns (residual,
                         branch, branch_bias), and the next layer norm adds them. A closed block
                         (fit.py) adds them itself, in one more pass of forward.
  bias gradients         The kernel that writes a gradient matrix also sums its columns. Each
                         program stores partial sums, which PyTorch adds in float32.
  weight gradients       The GEMM adds dy.T @ x to weight.grad_sink (engine/grad_sink.py): to a
                         float32 sum, or to the buffer of a reduce_scatter.
  attention in float16   bfloat16's rounding of attention makes long runs unstable
                         (docs/pretrain.md). So it and its two linear layers run in float16 instead.
                         As float16 needs, the loss is scaled (engine/setup.py).

GEMMs (linear.py) and attention are PyTorch's, or fp8.py's. fused.py makes blocks of these
operations. model.py has the plain version of both files, and tests compare them.
"""

import torch
import torch.nn as nn
from torch.autograd.function import once_differentiable

from runtime.kernels import fp8, jit, tl, triton
from runtime.kernels.fp8 import store, update_amax
from runtime.kernels.linear import Casts, linear, linear_grads

# The fastest values tried on an H200 with 8,192 and 16,384 rows of 1,600
# (results/h200_x1_fused.json).
# Programs that share the rows in the layer norm's backward, 3 per multiprocessor
NUM_PROGRAMS = 396
TILE = {"ROWS": 16, "COLUMNS": 128}  # the part of a matrix that a program loads at once
STEPS = 8  # tiles in a column that one program sums


# Kernels. Rows are tokens. With FP8, the result is stored in FP8


@jit(do_not_specialize=["slot"])
def residual_layernorm_fwd(
    residual,
    branch,
    branch_bias,
    weight,
    bias,
    residual_out,
    normed,
    mean,
    rstd,
    C,
    amax,
    scale,
    slot,
    FP8: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """Compute a row of residual_out = residual + branch + branch_bias and its layer norm. PDL: see
    decode.py."""
    if PDL:
        tl.extra.cuda.gdc_wait()

    # One row per program. Its sum stays in registers, in float32
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    mask = i < C
    x = tl.load(residual + row * C + i, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(branch + row * C + i, mask=mask, other=0.0).to(tl.float32)
        x += tl.load(branch_bias + i, mask=mask, other=0.0).to(tl.float32)

        # Normalize what is stored, since backward reads that
        rounded = x.to(residual_out.dtype.element_ty)
        tl.store(residual_out + row * C + i, rounded, mask=mask)
        x = rounded.to(tl.float32)

    # The mean and the variance, without the columns of BLOCK beyond C
    m = tl.sum(x) / C
    centered = tl.where(mask, x - m, 0.0)
    s = tl.rsqrt(tl.sum(centered * centered) / C + 1e-5)
    w = tl.load(weight + i, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(bias + i, mask=mask, other=0.0).to(tl.float32)
    largest = store(
        normed, row * C + i, tl.where(mask, centered * s * w + b, 0.0), mask, scale, slot, FP8
    )
    update_amax(amax, slot, largest, FP8)
    tl.store(mean + row, m)
    tl.store(rstd + row, s)


@jit
def residual_layernorm_bwd(
    dnormed,
    dresidual_out,
    residual_out,
    weight,
    mean,
    rstd,
    dresidual,
    dbranch,
    partials,
    rows,
    C,
    ADD: tl.constexpr,
    COPY: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Compute rows of dresidual and this program's partial sums, (PARTS, C): of dweight and dbias,
    with 3 parts also of dbranch_bias, with 4 also of dresidual_out. With COPY, also dbranch, which
    is dresidual in its dtype."""
    i = tl.arange(0, BLOCK)
    mask = i < C
    w = tl.load(weight + i, mask=mask, other=0.0).to(tl.float32)

    # The sums over this program's rows, in registers
    dweight = tl.zeros([BLOCK], tl.float32)
    dbias = tl.zeros([BLOCK], tl.float32)
    dbranch_bias = tl.zeros([BLOCK], tl.float32)
    dout_bias = tl.zeros([BLOCK], tl.float32)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=NUM_STAGES):
        offsets = tl.cast(row, tl.int64) * C + i
        dy = tl.load(dnormed + offsets, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(residual_out + offsets, mask=mask, other=0.0).to(tl.float32)
        s = tl.load(rstd + row)
        xhat = tl.where(mask, (x - tl.load(mean + row)) * s, 0.0)

        # The layer norm's gradient has no mean and no component along xhat
        dx = dy * w
        dx = tl.where(mask, (dx - xhat * (tl.sum(dx * xhat) / C) - tl.sum(dx) / C) * s, 0.0)
        if ADD:
            dout = tl.load(dresidual_out + offsets, mask=mask, other=0.0).to(tl.float32)
            dx += dout
            if PARTS > 3:
                dout_bias += dout
        tl.store(dresidual + offsets, dx.to(dresidual.dtype.element_ty), mask=mask)
        if COPY:
            tl.store(dbranch + offsets, dx.to(dbranch.dtype.element_ty), mask=mask)
        dweight += dy * xhat
        dbias += dy
        if PARTS > 2:
            dbranch_bias += dx

    # A row for each parameter. PyTorch adds those of all programs
    partial_ptr = partials + tl.program_id(0) * PARTS * C + i
    tl.store(partial_ptr, dweight, mask=mask)
    tl.store(partial_ptr + C, dbias, mask=mask)
    if PARTS > 2:
        tl.store(partial_ptr + 2 * C, dbranch_bias, mask=mask)
    if PARTS > 3:
        tl.store(partial_ptr + 3 * C, dout_bias, mask=mask)


@jit
def add_branch_fwd(residual, branch, branch_bias, out, n, C, BLOCK: tl.constexpr):
    """Compute out = residual + branch + branch_bias for n elements in rows of C."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    x = tl.load(residual + i, mask=mask, other=0.0).to(tl.float32)
    x += tl.load(branch + i, mask=mask, other=0.0).to(tl.float32)
    x += tl.load(branch_bias + i % C, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + i, x.to(out.dtype.element_ty), mask=mask)


@jit
def gelu_sigmoid(x):
    """Return sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)). GELU's tanh form is x times this."""
    return tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@jit(do_not_specialize=["slot"])
def gelu_fwd(h, g, n, amax, scale, slot, FP8: tl.constexpr, BLOCK: tl.constexpr):
    """Compute g = gelu(h) for n elements."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(h + i, mask=i < n, other=0.0).to(tl.float32)
    largest = store(g, i, x * gelu_sigmoid(x), i < n, scale, slot, FP8)
    update_amax(amax, slot, largest, FP8)


@jit(do_not_specialize=["slot"])
def gelu_bwd(
    dg,
    h,
    dh,
    partials,
    rows,
    C,
    amax,
    scale,
    slot,
    FP8: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Compute columns of dh and this program's partial sums of them."""
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total, largest = tl.zeros([ROWS, COLUMNS], tl.float32), 0.0
    for step in range(STEPS):
        r = (tl.program_id(0) * STEPS + step) * ROWS + tl.arange(0, ROWS)
        offsets = r[:, None].to(tl.int64) * C + c[None, :]
        mask = (r < rows)[:, None] & (c < C)[None, :]
        x = tl.load(h + offsets, mask=mask, other=0.0).to(tl.float32)
        d = tl.load(dg + offsets, mask=mask, other=0.0).to(tl.float32)
        s = gelu_sigmoid(x)

        # GELU's derivative: that of x * sigmoid(u), with u' of u = 2 sqrt(2 / pi) (...)
        d *= s + x * s * (1 - s) * 1.5957691216057308 * (1 + 0.134145 * x * x)
        largest = tl.maximum(largest, store(dh, offsets, d, mask, scale, slot, FP8))
        total += d
    update_amax(amax, slot, largest, FP8)
    tl.store(partials + tl.program_id(0) * C + c, tl.sum(total, 0), mask=c < C)


@jit(do_not_specialize=["slot"])
def concat_dqkv(
    dq,
    dk,
    dv,
    dqkv,
    partials,
    rows,
    C,
    amax,
    scale,
    slot,
    FP8: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Copy columns of dq, dk and dv, (rows, C) each, to dqkv (rows, 3 C). Also store this program's
    partial sums."""
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    which, source = tl.program_id(2), dq
    if which == 1:
        source = dk
    if which == 2:
        source = dv
    total, largest = tl.zeros([ROWS, COLUMNS], tl.float32), 0.0
    for step in range(STEPS):
        r = (tl.program_id(0) * STEPS + step) * ROWS + tl.arange(0, ROWS)
        mask = (r < rows)[:, None] & (c < C)[None, :]
        d = tl.load(source + r[:, None].to(tl.int64) * C + c[None, :], mask=mask, other=0.0).to(
            tl.float32
        )
        offsets = r[:, None].to(tl.int64) * 3 * C + which * C + c[None, :]
        largest = tl.maximum(largest, store(dqkv, offsets, d, mask, scale, slot, FP8))
        total += d
    update_amax(amax, slot, largest, FP8)
    # the keys' bias has no gradient: QKVLinear in model.py
    sums = tl.where(which == 1, 0.0, tl.sum(total, 0))
    tl.store(partials + (tl.program_id(0) * 3 + which) * C + c, sums, mask=c < C)


# The operations of a block with their gradients. Activations are (B, T, C). Parameters are
# attributes of ctx, not saved tensors: activation checkpointing would return copies of those,
# without grad_sink


def reduce_param_grads(partials: torch.Tensor, *params: nn.Parameter) -> list[torch.Tensor | None]:
    """Return the gradients of parameters (n,) as a list, from partials (programs, len(params), n).

    If all have sinks (engine/grad_sink.py) of sums over micro-steps, add to those and return Nones.
    """
    # Over all programs, still in float32
    sums = partials.sum(0)
    sinks = [getattr(param, "grad_sink", None) for param in params]
    if any(sink is None or sink.one_backward for sink in sinks):
        return list(sums.to(params[0].dtype))
    torch._foreach_add_([sink.total for sink in sinks], list(sums))
    return [None] * len(params)


def column_sums(kernel, inputs, rows, width, parts, casts, bias):
    """Launch gelu_bwd or concat_dqkv. Return its output (rows, parts * width), maybe in FP8, and
    the bias gradient."""
    count, C = triton.cdiv(rows, TILE["ROWS"] * STEPS), parts * width
    partials = inputs[0].new_empty((count, 1, C), dtype=torch.float32)
    out, fp8_args = fp8.empty_output(fp8_slot(casts), fp8.GRAD_OUTPUT, inputs[0], (rows, C))
    kernel[(count, triton.cdiv(width, TILE["COLUMNS"]), parts)](
        *inputs, out, partials, rows, width, **fp8_args, STEPS=STEPS, **TILE
    )
    return out, reduce_param_grads(partials, bias)[0]


class ResidualLayerNorm(torch.autograd.Function):
    """Returns residual + branch + branch_bias (or residual) and its layer norm, as
    fp8.differentiable does.

    consumer: the Casts of the layer that takes the norm. out_bias: of a closed block, what
    AddBranch adds later: its gradient is the sum of that of the first result, which this backward
    reads."""

    @staticmethod
    def forward(
        ctx, residual, branch, branch_bias, out_bias, weight, bias, consumer=None, dtype=None
    ):
        # A row of the residual stream per program, in one block of columns
        C = residual.size(-1)
        BLOCK = triton.next_power_of_2(C)
        rows = residual.numel() // C
        add = branch is not None

        # Without a branch, the residual stream stays as it is
        residual_out = torch.empty_like(residual) if add else residual
        mean, rstd = residual.new_empty((2, rows), dtype=torch.float32)
        like = residual.new_empty(1, dtype=dtype or residual.dtype).expand_as(residual)
        normed, fp8_args = fp8.empty_output(fp8_slot(consumer), fp8.INPUT, like, residual.shape)
        ctx.one_row = {"BLOCK": BLOCK, "num_warps": min(8, max(1, BLOCK // 512))}
        residual_layernorm_fwd[(rows,)](
            residual,
            branch,
            branch_bias,
            weight,
            bias,
            residual_out,
            normed,
            mean,
            rstd,
            C,
            **fp8_args,
            ADD=add,
            **ctx.one_row,
        )
        ctx.save_for_backward(residual_out, mean, rstd)
        ctx.set_materialize_grads(False)
        ctx.params = [weight, bias]
        if add:
            ctx.params.append(branch_bias)
        if out_bias is not None:
            ctx.params.append(out_bias)
        ctx.has_branch = add
        ctx.branch_dtype = branch.dtype if add else residual.dtype
        return residual_out, *fp8.differentiable(ctx, normed, like)

    @staticmethod
    @once_differentiable
    def backward(ctx, dresidual_out, dnormed, _):
        residual_out, mean, rstd = ctx.saved_tensors
        C = residual_out.size(-1)
        rows = residual_out.numel() // C
        add = dresidual_out is not None
        parts = len(ctx.params)
        count = min(NUM_PROGRAMS, triton.cdiv(rows, 4))
        partials = residual_out.new_empty((count, parts, C), dtype=torch.float32)

        # The branch's gradient is the same, and is copied only for another dtype
        dresidual = torch.empty_like(residual_out)
        dbranch = dresidual
        copy = ctx.branch_dtype != dresidual.dtype
        if copy:
            dbranch = torch.empty_like(dresidual, dtype=ctx.branch_dtype)
        residual_layernorm_bwd[(count,)](
            dnormed.contiguous(),
            dresidual_out.contiguous() if add else None,
            residual_out,
            ctx.params[0],
            mean,
            rstd,
            dresidual,
            dbranch,
            partials,
            rows,
            C,
            ADD=add,
            COPY=copy,
            PARTS=parts,
            NUM_STAGES=3,
            **ctx.one_row,
        )

        # In the order of ctx.params: what is there depends on the kind of block
        dweight, dbias, *others = reduce_param_grads(partials, *ctx.params)
        dbranch_bias = dout_bias = None
        if ctx.has_branch:
            dbranch_bias, *others = others
        else:
            dbranch = None
        if others:
            (dout_bias,) = others
        return dresidual, dbranch, dbranch_bias, dout_bias, dweight, dbias, None, None


class AddBranch(torch.autograd.Function):
    """Returns residual + branch + branch_bias, the output of a closed block. The bias's gradient is
    computed by the layer norm before it, as its out_bias."""

    @staticmethod
    def forward(ctx, residual, branch, branch_bias):
        out = torch.empty_like(residual)
        n = residual.numel()
        add_branch_fwd[(triton.cdiv(n, 1024),)](
            residual, branch, branch_bias, out, n, residual.size(-1), BLOCK=1024
        )
        ctx.branch_dtype = branch.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        return dout, dout.to(ctx.branch_dtype), None


class QKVProjection(torch.autograd.Function):
    """Returns q, k and v of x, (B, n_head, T, head size) each. x, x8: as fp8.differentiable
    returns."""

    @staticmethod
    def forward(ctx, x, x8, weight, bias, n_head, casts):
        B, T, C = x.shape
        ctx.dtype, x = x.dtype, x if x8 is None else x8
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.casts = weight, bias, casts
        qkv = linear(x, weight, casts, bias, ctx.dtype).split(C, dim=2)
        return tuple(part.view(B, T, n_head, C // n_head).transpose(1, 2) for part in qkv)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        (x,) = ctx.saved_tensors
        C = x.size(-1)
        # views: attention returns this layout
        grads = [grad.transpose(1, 2).reshape(-1, C) for grad in grads]
        dqkv, dbias = column_sums(concat_dqkv, grads, len(grads[0]), C, 3, ctx.casts, ctx.bias)
        dx, dweight = linear_grads(x, ctx.weight, ctx.casts, dqkv, ctx.dtype)
        return dx, None, dweight, dbias, None, None


class LinearGelu(torch.autograd.Function):
    """Returns gelu(x @ weight.T + bias) as fp8.differentiable does. x, x8: likewise. consumer: the
    Casts of the layer that takes the result."""

    @staticmethod
    def forward(ctx, x, x8, weight, bias, casts, consumer):
        ctx.weight, ctx.bias, ctx.casts = weight, bias, casts
        x = x if x8 is None else x8
        h = linear(x, weight, casts, bias, weight.dtype)
        g, fp8_args = fp8.empty_output(fp8_slot(consumer), fp8.INPUT, h, h.shape)
        BLOCK = 4096 if fp8_args["FP8"] else 1024
        gelu_fwd[(triton.cdiv(h.numel(), BLOCK),)](
            h, g, h.numel(), **fp8_args, BLOCK=BLOCK, num_warps=BLOCK // 256
        )
        ctx.save_for_backward(x, h)
        return fp8.differentiable(ctx, g, h)

    @staticmethod
    @once_differentiable
    def backward(ctx, dg, _):
        x, h = ctx.saved_tensors
        C = h.size(-1)
        dh, dbias = column_sums(
            gelu_bwd, (dg.contiguous(), h), h.numel() // C, C, 1, ctx.casts, ctx.bias
        )
        dx, dweight = linear_grads(x, ctx.weight, ctx.casts, dh, ctx.weight.dtype)
        return dx, None, dweight, dbias, None, None


class LinearNoBias(torch.autograd.Function):
    """Returns x @ weight.T. The next residual addition adds the bias."""

    @staticmethod
    def forward(ctx, x, x8, weight, casts):
        ctx.dtype, x = x.dtype, x if x8 is None else x8
        ctx.save_for_backward(x)
        ctx.weight, ctx.casts = weight, casts
        return linear(x, weight, casts, None, ctx.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        dx, dweight = linear_grads(x, ctx.weight, ctx.casts, dy.reshape(-1, dy.size(-1)), ctx.dtype)
        return dx, None, dweight, None


def fp8_slot(casts: Casts | None) -> fp8.Slot | None:
    """Return the slot of a layer whose GEMMs are in FP8 in this micro-step, or None."""
    return casts.slot if casts is not None and casts.use_fp8() else None
