"""Matrix products of the fused blocks in 8 bits (`fp8=True`), on Hopper and later.

What a layer makes, and the gradient of what it was given, come from factors in 8 bits: E4M3, and E5M2 for gradients
(Micikevicius et al., arXiv:2209.05433). Weight gradients stay products in bfloat16, summed in float32, and so does the
output layer. A factor's scale follows from its largest value of the micro-step before, with room for twice that (the
"delayed scaling" of NVIDIA's Transformer Engine); the first micro-step of a process, which has none before it, is made
in bfloat16 and looks for them, so a resumed run's losses are close to those of one that never stopped, not equal.
"""

from __future__ import annotations  # without Triton there is no tl.constexpr

from types import SimpleNamespace

import torch
import torch.nn.functional as F

from runtime.kernels import jit, tl, triton

X, W, DY = 0, 1, 2  # the factors of a layer's products
KINDS = (torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float8_e5m2)
OFF = SimpleNamespace(state="off")


@jit
def store_eight(out, place, values, mask, scale, site):
    """Store scaled values in out's 8 bits; returns the largest of them, unscaled, for keep_largest."""
    LIMIT: tl.constexpr = 448.0 if out.dtype.element_ty == tl.float8e4nv else 57344.0
    scaled = tl.minimum(tl.maximum(values * tl.load(scale + site), -LIMIT), LIMIT)
    tl.store(out + place, scaled.to(out.dtype.element_ty), mask=mask)
    return tl.max(tl.abs(values))


@jit
def keep_largest(amax, site, largest):
    """Once a program. What is there grows seldom, so it is read first."""
    if largest > tl.load(amax + site, volatile=True):
        tl.atomic_max(amax + site, largest)


@jit(do_not_specialize=["site"])
def to_eight(x, out, rows, C, amax, scale, site, TURN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile of x (rows, C) in 8 bits, into out (rows, C), or with TURN (C, rows)."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = (r < rows)[:, None] & (c < C)[None, :]
    values = tl.load(x + r[:, None].to(tl.int64) * C + c[None, :], mask=there, other=0.0).to(tl.float32)
    if TURN:
        place = c[:, None].to(tl.int64) * rows + r[None, :]
        largest = store_eight(out, place, tl.trans(values), tl.trans(there), scale, site)
    else:
        place = r[:, None].to(tl.int64) * C + c[None, :]
        largest = store_eight(out, place, values, there, scale, site)
    keep_largest(amax, site, largest)


def use(model):
    """Let the products of a fused model's blocks be made this way in training. Returns the table: of each factor the
    largest value of this micro-step, the scale in force, its inverse (four times, as cuBLAS wants it at 16 bytes), and
    the largest number of its 8 bits."""
    layers = [layer for block in model.transformer.h
              for layer in (block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj)]
    n, device = 3 * len(layers), layers[0].weight.device
    limits = torch.tensor([torch.finfo(kind).max for kind in KINDS], device=device).repeat(len(layers))
    table = SimpleNamespace(amax=torch.zeros(n, device=device), scale=torch.ones(n, device=device),
                            inverse=torch.ones((n, 4), device=device), limits=limits, state="off", looked=False)
    for i, layer in enumerate(layers):
        layer.weight.eight = table, 3 * i
    return table


def begin(table, training):
    """Before a forward: the scales of the micro-step before's largest values; evaluations are made in bfloat16."""
    table.state = "off" if not training else "on" if table.looked else "look"
    if table.state == "on":
        usable = (table.amax > 0) & torch.isfinite(table.amax)
        table.scale.copy_(torch.where(usable, table.limits / (2 * table.amax), table.scale))
        table.inverse.copy_(1 / table.scale[:, None])
        table.amax.zero_()
    table.looked = table.looked or training


def beside(weight, which, like):
    """For a kernel that makes a factor, shaped as `like`, of the weight's product: (where to write it in 8 bits, amax,
    scale, site, whether to)."""
    table, site = getattr(weight, "eight", (OFF, 0))
    if table.state != "on":
        return like, like, like, 0, False
    return torch.empty_like(like, dtype=KINDS[which]), table.amax, table.scale, site + which, True


def cast(x, weight, which, turn=False):
    """x (rows, C) in 8 bits, (rows, C) or, turned, (C, rows)."""
    (rows, C), (table, site) = x.shape, weight.eight
    out = torch.empty((C, rows) if turn else (rows, C), dtype=KINDS[which], device=x.device)
    to_eight[(triton.cdiv(rows, 64), triton.cdiv(C, 128))](x, out, rows, C, table.amax, table.scale, site + which,
                                                           turn, ROWS=64, COLUMNS=128)
    return out


def product(x, weight, bias=None, x8=None):
    """x (..., in) by a weight (out, in), and bias; x8: x in 8 bits, where it is at hand."""
    table, site = getattr(weight, "eight", (OFF, 0))
    if table.state == "look":
        table.amax[site + X], table.amax[site + W] = x.abs().max(), weight.abs().max()
    if table.state != "on":
        return F.linear(x, weight, bias)
    x8 = cast(x.reshape(-1, x.size(-1)), weight, X) if x8 is None else x8.view(-1, x.size(-1))
    y = torch._scaled_mm(x8, cast(weight, weight, W).t(), table.inverse[site + X, 0], table.inverse[site + W, 0],
                         bias=bias, out_dtype=x.dtype, use_fast_accum=True)
    return y.view(*x.shape[:-1], -1)


def gradient(dy, weight, dy8=None):
    """dy (rows, out) by a weight (out, in): the gradient of what the weight's product was given."""
    table, site = getattr(weight, "eight", (OFF, 0))
    if table.state == "look":
        table.amax[site + DY] = dy.abs().max()
    if table.state != "on":
        return dy @ weight
    dy8 = cast(dy, weight, DY) if dy8 is None else dy8
    return torch._scaled_mm(dy8, cast(weight, weight, W, turn=True).t(), table.inverse[site + DY, 0],
                            table.inverse[site + W, 0], out_dtype=dy.dtype)
