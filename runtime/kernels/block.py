"""GPT-2's blocks for training on a GPU: each pass over memory between two matrix products is one kernel.

What stands between a block's products moves bytes and computes little. Here a residual sum is made with the layer norm
after it, a bias's gradient in the pass that makes what it is the sum of, and the gradients of q, k and v are laid side
by side as they are summed. A block hands on the residual stream and what is still to be added to it, for the next layer
norm to add. Products and attention are PyTorch's.

model.py has the plain form of all this; tests hold the two against each other.
"""

from __future__ import annotations  # without Triton there is no tl.constexpr

import copy
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel
from torch.utils.checkpoint import checkpoint

from model import GPT, GPTConfig, addmm_fp32, attention_backends, cross_entropy_with_grad
from runtime.kernels import jit, tl, triton
from runtime.kernels.fp8 import DY, X, begin, beside, gradient, keep_largest, product, store_eight, use

WIDEST = 4096  # of a row that one program holds; in float32 8192 would take more shared memory than an A100 has
# The best of those tried on an H200 with 8,192 and 16,384 rows of 1,600 (results/h200_x1_fused.json)
SHARES = 396  # programs among which the rows of a layer norm's backward are dealt out, 3 for each multiprocessor
TILE = {"ROWS": 16, "COLUMNS": 128}  # of a matrix that a program looks at together
STEPS = 8  # tiles one below the other that a program sums up


# -----------------------------------------------------------------------------
# Kernels. Rows are tokens. Sums over rows are made in float32 by each program, and added up by add_up


@jit(do_not_specialize=["site"])
def add_norm_forward(x, y, y_bias, weight, bias, total, normed, means, scales, C, eight, amax, scale8, site,
                     EIGHT: tl.constexpr, ADD: tl.constexpr, WIDE: tl.constexpr):
    """A row of total = x + y + y_bias, and of its layer norm; with EIGHT also in 8 bits."""
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    there = i < C
    values = tl.load(x + row * C + i, mask=there, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(y + row * C + i, mask=there, other=0.0).to(tl.float32)
        values += tl.load(y_bias + i, mask=there, other=0.0).to(tl.float32)
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + row * C + i, rounded, mask=there)
        values = rounded.to(tl.float32)
    mean = tl.sum(values) / C
    away = tl.where(there, values - mean, 0.0)
    scale = tl.rsqrt(tl.sum(away * away) / C + 1e-5)
    w = tl.load(weight + i, mask=there, other=0.0).to(tl.float32)
    b = tl.load(bias + i, mask=there, other=0.0).to(tl.float32)
    result = away * scale * w + b
    tl.store(normed + row * C + i, result.to(normed.dtype.element_ty), mask=there)
    if EIGHT:
        largest = store_eight(eight, row * C + i, tl.where(there, result, 0.0), there, scale8, site)
        keep_largest(amax, site, largest)
    tl.store(means + row, mean)
    tl.store(scales + row, scale)


@jit
def add_norm_backward(d_normed, d_total, total, weight, means, scales, dx, sums, rows, C, ADD: tl.constexpr,
                      WIDE: tl.constexpr, AHEAD: tl.constexpr):
    """Rows of dx; this program's share of the gradients of weight, bias and y_bias, (3, C)."""
    i = tl.arange(0, WIDE)
    there = i < C
    w = tl.load(weight + i, mask=there, other=0.0).to(tl.float32)
    weight_sum = tl.zeros([WIDE], tl.float32)
    bias_sum = tl.zeros([WIDE], tl.float32)
    dx_sum = tl.zeros([WIDE], tl.float32)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=AHEAD):
        place = tl.cast(row, tl.int64) * C + i
        dy = tl.load(d_normed + place, mask=there, other=0.0).to(tl.float32)
        values = tl.load(total + place, mask=there, other=0.0).to(tl.float32)
        scale = tl.load(scales + row)
        unit = tl.where(there, (values - tl.load(means + row)) * scale, 0.0)
        d = dy * w
        d = tl.where(there, (d - unit * (tl.sum(d * unit) / C) - tl.sum(d) / C) * scale, 0.0)
        if ADD:
            d += tl.load(d_total + place, mask=there, other=0.0).to(tl.float32)
        tl.store(dx + place, d.to(dx.dtype.element_ty), mask=there)
        weight_sum += dy * unit
        bias_sum += dy
        dx_sum += d
    mine = sums + tl.program_id(0) * 3 * C + i
    tl.store(mine, weight_sum, mask=there)
    tl.store(mine + C, bias_sum, mask=there)
    tl.store(mine + 2 * C, dx_sum, mask=there)


@jit(do_not_specialize=["site"])
def gelu_forward(h, g, n, eight, amax, scale, site, EIGHT: tl.constexpr, WIDE: tl.constexpr):
    """g = h sigmoid(2 sqrt(2 / pi) (h + 0.044715 h^3)), which is GELU's tanh form; with EIGHT also in 8 bits."""
    i = tl.program_id(0).to(tl.int64) * WIDE + tl.arange(0, WIDE)
    x = tl.load(h + i, mask=i < n, other=0.0).to(tl.float32)
    s = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    tl.store(g + i, (x * s).to(g.dtype.element_ty), mask=i < n)
    if EIGHT:
        keep_largest(amax, site, store_eight(eight, i, x * s, i < n, scale, site))


@jit(do_not_specialize=["site"])
def gelu_backward(dg, h, dh, sums, rows, C, eight, amax, scale, site, EIGHT: tl.constexpr, ROWS: tl.constexpr,
                  COLUMNS: tl.constexpr, STEPS: tl.constexpr):
    """Columns of dh, with EIGHT also in 8 bits, and this program's share of their sums."""
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total, largest = tl.zeros([ROWS, COLUMNS], tl.float32), 0.0
    for step in range(STEPS):
        r = (tl.program_id(0) * STEPS + step) * ROWS + tl.arange(0, ROWS)
        place = r[:, None].to(tl.int64) * C + c[None, :]
        there = (r < rows)[:, None] & (c < C)[None, :]
        x = tl.load(h + place, mask=there, other=0.0).to(tl.float32)
        d = tl.load(dg + place, mask=there, other=0.0).to(tl.float32)
        s = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        d *= s + x * s * (1 - s) * 1.5957691216057308 * (1 + 0.134145 * x * x)
        tl.store(dh + place, d.to(dh.dtype.element_ty), mask=there)
        if EIGHT:
            largest = tl.maximum(largest, store_eight(eight, place, d, there, scale, site))
        total += d
    if EIGHT:
        keep_largest(amax, site, largest)
    tl.store(sums + tl.program_id(0) * C + c, tl.sum(total, 0), mask=c < C)


@jit(do_not_specialize=["site"])
def side_by_side(dq, dk, dv, out, sums, rows, C, eight, amax, scale, site, EIGHT: tl.constexpr, ROWS: tl.constexpr,
                 COLUMNS: tl.constexpr, STEPS: tl.constexpr):
    """Columns of out (rows, 3 C), with EIGHT also in 8 bits, from dq, dk and dv, (rows, C) each, and this program's
    share of their sums."""
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    which, source = tl.program_id(2), dq
    if which == 1:
        source = dk
    if which == 2:
        source = dv
    total, largest = tl.zeros([ROWS, COLUMNS], tl.float32), 0.0
    for step in range(STEPS):
        r = (tl.program_id(0) * STEPS + step) * ROWS + tl.arange(0, ROWS)
        there = (r < rows)[:, None] & (c < C)[None, :]
        d = tl.load(source + r[:, None].to(tl.int64) * C + c[None, :], mask=there, other=0.0)
        place = r[:, None].to(tl.int64) * 3 * C + which * C + c[None, :]
        tl.store(out + place, d, mask=there)
        if EIGHT:
            largest = tl.maximum(largest, store_eight(eight, place, d.to(tl.float32), there, scale, site))
        total += d.to(tl.float32)
    if EIGHT:
        keep_largest(amax, site, largest)
    tl.store(sums + (tl.program_id(0) * 3 + which) * C + c, tl.sum(total, 0), mask=c < C)


@jit
def add_up(sums, out0, out1, out2, shares, n, width, ADD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """out0, out1, out2 (n,) (+)= the sums over shares of sums (shares, up to 3, n); width: of one share, in numbers."""
    c, which, out = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.program_id(1), out0
    if which == 1:
        out = out1
    if which == 2:
        out = out2
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, shares, ROWS):
        r = first + tl.arange(0, ROWS)
        total += tl.load(sums + r[:, None] * width + which * n + c[None, :],
                         mask=(r < shares)[:, None] & (c < n)[None, :], other=0.0)
    result = tl.sum(total, 0)
    if ADD:
        result += tl.load(out + c, mask=c < n, other=0.0)
    tl.store(out + c, result.to(out.dtype.element_ty), mask=c < n)


def summed(sums, *params):
    """The gradients of parameters (n,) from each program's share of them, (shares, len(params), n): a list. Where the
    parameters have a main_grad, they are added there, and Nones returned, as by weight_grad."""
    shares, count, n = sums.shape
    add = all(hasattr(p, "main_grad") for p in params)
    outs = [p.main_grad if add else torch.empty_like(p) for p in params]
    three = outs[0], outs[min(1, count - 1)], outs[-1]
    add_up[(triton.cdiv(n, 32), count)](sums, *three, shares, n, sums.stride(0), add, ROWS=32, COLUMNS=32)
    return [None] * count if add else outs


# -----------------------------------------------------------------------------
# The steps of a block, with their gradients. Shapes: x (B, T, C). Parameters are kept as they are, not among the
# saved tensors, from which a recomputation would hand back copies without their main_grad


def weight_grad(weight, dy, x):
    """The gradient dy^T x of a weight (out, in), from dy (N, out) and x (N, in). Where the weight has a main_grad, a
    float32 tensor of its shape, it is added there within the product, and None returned."""
    if not hasattr(weight, "main_grad"):
        return dy.t() @ x
    addmm_fp32(weight.main_grad, dy.t(), x)
    return None


class AddNorm(torch.autograd.Function):
    """(x + y + y_bias, its layer norm, that in 8 bits or None for the product with `reader`); without a y the first is
    None."""

    @staticmethod
    def forward(ctx, x, y, y_bias, weight, bias, reader=None):
        C, add = x.size(-1), y is not None
        rows, total = x.numel() // C, torch.empty_like(x) if add else x
        normed, (means, scales) = torch.empty_like(x), x.new_empty((2, rows), dtype=torch.float32)
        wide = triton.next_power_of_2(C)
        eight, *how = beside(reader, X, normed)
        add_norm_forward[(rows,)](x, y, y_bias, weight, bias, total, normed, means, scales, C, eight, *how, add, wide,
                                  num_warps=min(8, max(1, wide // 512)))
        ctx.save_for_backward(total, means, scales)
        ctx.set_materialize_grads(False)
        ctx.params = [weight, bias, *([y_bias] if add else [])]
        if eight is normed:
            eight = None
        else:
            ctx.mark_non_differentiable(eight)
        return total if add else None, normed, eight

    @staticmethod
    def backward(ctx, d_total, d_normed, _):
        total, means, scales = ctx.saved_tensors
        C = total.size(-1)
        rows, dx, wide = total.numel() // C, torch.empty_like(total), triton.next_power_of_2(C)
        shares = min(SHARES, triton.cdiv(rows, 4))
        sums = total.new_empty((shares, 3, C), dtype=torch.float32)
        add_norm_backward[(shares,)](d_normed.contiguous(), d_total if d_total is None else d_total.contiguous(),
                                     total, ctx.params[0], means, scales, dx, sums, rows, C, d_total is not None, wide,
                                     AHEAD=3, num_warps=min(8, max(1, wide // 512)))
        d_weight, d_bias, *d_y_bias = summed(sums[:, : len(ctx.params)], *ctx.params)
        return dx, *((dx, *d_y_bias) if d_y_bias else (None, None)), d_weight, d_bias, None


class Heads(torch.autograd.Function):
    """q, k, v, (B, n_head, T, head size) each, of x."""

    @staticmethod
    def forward(ctx, x, x8, weight, bias, n_head):
        B, T, C = x.shape
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias = weight, bias
        parts = product(x, weight, bias, x8).split(C, dim=2)
        return tuple(part.view(B, T, n_head, C // n_head).transpose(1, 2) for part in parts)

    @staticmethod
    def backward(ctx, *grads):
        (x,), weight = ctx.saved_tensors, ctx.weight
        rows, C = x.numel() // x.size(-1), x.size(-1)
        grads = [grad.transpose(1, 2).reshape(rows, C) for grad in grads]  # views, as attention leaves them
        together, shares = x.new_empty((rows, 3 * C)), triton.cdiv(rows, TILE["ROWS"] * STEPS)
        sums = x.new_empty((shares, 1, 3 * C), dtype=torch.float32)
        eight, *how = beside(weight, DY, together)
        side_by_side[(shares, triton.cdiv(C, TILE["COLUMNS"]), 3)](*grads, together, sums, rows, C, eight, *how,
                                                                   STEPS=STEPS, **TILE)
        dw = weight_grad(weight, together, x.view(rows, C))
        dx = gradient(together, weight, eight if how[-1] else None)
        return dx.view_as(x), None, dw, *summed(sums, ctx.bias), None


class LinearGelu(torch.autograd.Function):
    """GELU of weight x + bias, and in 8 bits or None for the product with `reader`."""

    @staticmethod
    def forward(ctx, x, x8, weight, bias, reader):
        ctx.weight, ctx.bias = weight, bias
        h = product(x, weight, bias, x8)
        g = torch.empty_like(h)
        eight, *how = beside(reader, X, g)
        wide = 4096 if how[-1] else 1024
        gelu_forward[(triton.cdiv(h.numel(), wide),)](h, g, h.numel(), eight, *how, WIDE=wide, num_warps=wide // 256)
        ctx.save_for_backward(x, h)
        if eight is g:
            return g, None
        ctx.mark_non_differentiable(eight)
        return g, eight

    @staticmethod
    def backward(ctx, dg, _):
        (x, h), weight = ctx.saved_tensors, ctx.weight
        C, dh = h.size(-1), torch.empty_like(h)
        rows = h.numel() // C
        shares = triton.cdiv(rows, TILE["ROWS"] * STEPS)
        sums = h.new_empty((shares, 1, C), dtype=torch.float32)
        eight, *how = beside(weight, DY, dh.view(rows, C))
        gelu_backward[(shares, triton.cdiv(C, TILE["COLUMNS"]))](dg.contiguous(), h, dh, sums, rows, C, eight, *how,
                                                                 STEPS=STEPS, **TILE)
        dh = dh.view(rows, C)
        dw = weight_grad(weight, dh, x.view(rows, -1))
        dx = gradient(dh, weight, eight if how[-1] else None)
        return dx.view_as(x), None, dw, *summed(sums, ctx.bias), None


class Linear(torch.autograd.Function):
    """weight x; the bias comes later, with the residual sum."""

    @staticmethod
    def forward(ctx, x, x8, weight):
        ctx.save_for_backward(x)
        ctx.weight = weight
        return product(x, weight, None, x8)

    @staticmethod
    def backward(ctx, dy):
        (x,), weight = ctx.saved_tensors, ctx.weight
        dy = dy.reshape(-1, dy.size(-1))
        return gradient(dy, weight).view_as(x), None, weight_grad(weight, dy, x.reshape(-1, x.size(-1)))


# -----------------------------------------------------------------------------
# The model


def fits(config):
    """Whether these blocks can stand in for those of a model of this GPTConfig."""
    return config.bias and config.gelu == "tanh" and config.dropout == 0 and config.n_embd <= WIDEST


def fuse(model, fp8=False):
    """Let the model's blocks run this way from now on, and its loss be compiled. fp8: see kernels/fp8.py."""
    model.eight = use(model) if fp8 else None
    loss = cross_entropy_with_grad
    model.lm_head.cross_entropy = torch.compile(loss) if model.lm_head.weight.is_cuda else loss
    model.forward_hidden = partial(hidden, model)
    for block in model.transformer.h:
        block.forward = partial(block_forward, block)
    model.transformer.ln_f.forward = partial(norm, model.transformer.ln_f)


def compare_with_plain(device, dtype, B=4, T=1024, n_head=25, n_embd=1600):
    """Return how far one block's loss and gradients in `dtype` are from model.py's in float32: two pairs, of these
    kernels and of model.py itself. The loss's distance is absolute, the gradients' is relative, over all of them."""
    torch.manual_seed(0)
    exact = GPT(GPTConfig(T, vocab_size=1024, n_layer=1, n_head=n_head, n_embd=n_embd))
    with torch.no_grad():
        for p in exact.parameters():
            p += 0.02 * torch.randn_like(p)  # no bias of zeros
    exact = exact.to(device, dtype).float()  # the same weights in both
    fused, plain = copy.deepcopy(exact).to(dtype), copy.deepcopy(exact).to(dtype)
    fuse(fused)
    idx, targets = torch.randint(1024, (2, B, T), device=device)
    results = []
    for model in (exact, fused, plain):
        loss = model(idx, targets)
        loss.backward()
        results.append((loss.item(), torch.cat([p.grad.float().flatten() for p in model.parameters()])))
    (loss, grads), *others = results
    return [(abs(mine - loss), ((own - grads).norm() / grads.norm()).item()) for mine, own in others]


def norm(layer, x, y=None, y_bias=None, reader=None):
    """Like AddNorm, by a layer norm of the model; x + y + y_bias is x without a y."""
    total, normed, eight = AddNorm.apply(x, y, y_bias, layer.weight, layer.bias, reader)
    return x if y is None else total, normed, eight


def hidden(model, idx):
    """GPT.forward_hidden: the final hidden states (B, T, n_embd)."""
    if model.eight:
        begin(model.eight, model.training)
    positions = torch.arange(idx.size(1), device=idx.device)
    x, y, y_bias = model.transformer.wte(idx) + model.transformer.wpe(positions), None, None
    for block in model.transformer.h:
        x, y, y_bias = block(x, y, y_bias, model.gradient_checkpointing and model.training)
    return model.transformer.ln_f(x, y, y_bias)[1]


def block_forward(block, x, y, y_bias, recompute):
    """The block after x + y + y_bias -> the same three for the block after it."""
    if not recompute:
        return add_both(block, x, y, y_bias)

    def whole(x):
        x, y, y_bias = add_both(block, x, None, None)
        return x + y + y_bias  # at once, as each tensor that a block is handed is kept

    return checkpoint(whole, x, use_reentrant=False, preserve_rng_state=False), None, None


def add_both(block, x, y, y_bias):
    """Attention and MLP on the residual stream x + y + y_bias, as (x, y, y_bias)."""
    attn, mlp = block.attn, block.mlp
    x, normed, eight = norm(block.ln_1, x, y, y_bias, attn.c_attn.weight)
    q, k, v = Heads.apply(normed, eight, attn.c_attn.weight, attn.c_attn.bias, attn.n_head)
    y = Linear.apply(attention(q, k, v).transpose(1, 2).reshape(x.shape), None, attn.c_proj.weight)
    x, normed, eight = norm(block.ln_2, x, y, attn.c_proj.bias, mlp.c_fc.weight)
    g, eight = LinearGelu.apply(normed, eight, mlp.c_fc.weight, mlp.c_fc.bias, mlp.c_proj.weight)
    bias = mlp.c_proj.bias
    if not hasattr(bias, "main_grad"):
        bias = bias.clone()  # ZeRO-3 takes the block's own away before the next block adds it
    return x, Linear.apply(g, eight, mlp.c_proj.weight), bias


def attention(q, k, v):
    if not q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    with sdpa_kernel(attention_backends(q.device), set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
