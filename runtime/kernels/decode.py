"""One more token for one text, at 46% of the speed at which an H200 reads the weights (57% on an H100; RESULTS.md).

A product of a matrix with one row is a read of the matrix, and PyTorch's kernels for it reach 700 to 2,300 GB/s of an
H200's 4,150; layer norms, GELU and sums come as kernels of their own. Here each matrix is read by one kernel that does
what stands before and after it as well, and attention is another: five a block. On Hopper and later a kernel begins to
read its matrix while the one before it still runs.
"""

from __future__ import annotations  # without Triton there is no tl.constexpr

from functools import partial

import torch

from runtime.kernels import jit, runs_on, tl, triton

# The best of those tried on an H200 with GPT-2 XL (results/h200_x1_one_token.json)
TILES = {2048: (8, 4), 8192: (2, 16)}  # by a matrix's width, rounded up: the rows and the warps of a program
PLACES, SPLITS = 64, 8  # keys and values that attention looks at together, and programs that share a head's


@jit
def row_times_matrix(x, weight, bias, norm_weight, norm_bias, residual, out, N, K: tl.constexpr, WIDE: tl.constexpr,
                     NORM: tl.constexpr, BIAS: tl.constexpr, GELU: tl.constexpr, ADD: tl.constexpr,
                     ROWS: tl.constexpr, EARLY: tl.constexpr):
    """out (N,) = weight (N, K) @ x (K,), of x's layer norm if NORM, then plus bias, through GELU, plus residual."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, WIDE)
    there = i < K
    tile = tl.load(weight + rows[:, None].to(tl.int64) * K + i[None, :], mask=(rows < N)[:, None] & there[None, :],
                   other=0.0, eviction_policy="evict_first")  # what is read once is not to drive out the rest
    if BIAS:
        shift = tl.load(bias + rows, mask=rows < N, other=0.0).to(tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    values = tl.load(x + i, mask=there, other=0.0).to(tl.float32)
    if NORM:
        mean = tl.sum(values) / K
        away = tl.where(there, values - mean, 0.0)
        scale = tl.rsqrt(tl.sum(away * away) / K + 1e-5)
        values = away * scale * tl.load(norm_weight + i, mask=there, other=0.0).to(tl.float32)
        values += tl.load(norm_bias + i, mask=there, other=0.0).to(tl.float32)
    y = tl.sum(tile.to(tl.float32) * values[None, :], 1)
    if BIAS:
        y += shift
    if GELU:  # the tanh form, as y times a sigmoid
        y = y * tl.sigmoid(1.5957691216057308 * (y + 0.044715 * y * y * y))
    if ADD:
        y += tl.load(residual + rows, mask=rows < N, other=0.0).to(tl.float32)
    tl.store(out + rows, y.to(out.dtype.element_ty), mask=rows < N)


@jit
def attend_one(qkv, keys, values, position, out, parts, counts, C, length, D: tl.constexpr, PLACES: tl.constexpr,
               SPLITS: tl.constexpr, EARLY: tl.constexpr):
    """A head's attention of the token at `position` to all before it and itself; keeps its key and value. SPLITS
    programs share the places of a head, and the last to be done puts their parts together."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    head, share, at = tl.program_id(0), tl.program_id(1), tl.load(position)
    d = tl.arange(0, D)
    base = head.to(tl.int64) * length * D
    each = tl.cdiv(tl.cdiv(at, SPLITS), PLACES) * PLACES
    first, end = share * each, tl.minimum(at, (share + 1) * each)
    places = first + tl.arange(0, PLACES)
    where, there = base + places[:, None] * D + d[None, :], (places < end)[:, None]
    k, v = tl.load(keys + where, mask=there, other=0.0), tl.load(values + where, mask=there, other=0.0)
    if EARLY:  # keys and values of earlier tokens have been there since the launch before
        tl.extra.cuda.gdc_wait()
    q = tl.load(qkv + head * D + d).to(tl.float32) * (D ** -0.5)
    highest, total, mixed = -1e30, 0.0, tl.zeros([D], tl.float32)  # total: of exp(score - highest); mixed: the values'
    if share == 0:
        own_k, own_v = tl.load(qkv + C + head * D + d), tl.load(qkv + 2 * C + head * D + d)
        tl.store(keys + base + at * D + d, own_k)
        tl.store(values + base + at * D + d, own_v)
        highest, total, mixed = tl.sum(q * own_k.to(tl.float32)), 1.0, own_v.to(tl.float32)
    while first < end:
        scores = tl.where(places < end, tl.sum(k.to(tl.float32) * q[None, :], 1), -1e30)
        higher = tl.maximum(highest, tl.max(scores))
        shares, fade = tl.exp(scores - higher), tl.exp(highest - higher)
        total = total * fade + tl.sum(shares)
        mixed = mixed * fade + tl.sum(shares[:, None] * v.to(tl.float32), 0)
        highest = higher
        first += PLACES
        places = first + tl.arange(0, PLACES)
        where, there = base + places[:, None] * D + d[None, :], (places < end)[:, None]
        k, v = tl.load(keys + where, mask=there, other=0.0), tl.load(values + where, mask=there, other=0.0)
    mine = parts + (head * SPLITS + share) * (D + 2)
    tl.store(mine + d, mixed)
    tl.store(mine + D, total)
    tl.store(mine + D + 1, highest)
    tl.debug_barrier()
    if tl.atomic_add(counts + head, 1) == SPLITS - 1:
        tl.store(counts + head, 0)
        s = tl.arange(0, SPLITS)
        theirs = parts + (head * SPLITS + s) * (D + 2)
        heights = tl.load(theirs + D + 1, cache_modifier=".cg")
        weights = tl.exp(heights - tl.max(heights))
        total = tl.sum(weights * tl.load(theirs + D, cache_modifier=".cg"))
        mixed = tl.sum(weights[:, None] * tl.load(theirs[:, None] + d[None, :], cache_modifier=".cg"), 0)
        tl.store(out + head * D + d, (mixed / total).to(out.dtype.element_ty))


def linear(x, layer, early, norm=None, gelu=False, residual=None):
    """layer(x) of one row x (K,), (N,); of norm(x), through GELU, plus residual."""
    weight, bias = layer.weight, getattr(layer, "bias", None)
    (N, K), out = weight.shape, x.new_empty(len(weight))
    wide = triton.next_power_of_2(K)
    rows, warps = TILES.get(wide, (4, 4))
    row_times_matrix[(triton.cdiv(N, rows),)](
        x, weight, bias, norm and norm.weight, norm and norm.bias, residual, out, N, K, wide,
        norm is not None, bias is not None, gelu, residual is not None, rows, bool(early), num_warps=warps, **early)
    return out


def early_launch(device):
    """The option by which a kernel may begin before the one before it has ended: on Hopper and later."""
    return {"launch_pdl": True} if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9 else {}


def faster(model, B):
    """What generate() may take as its one_more for B texts, or None where these kernels don't fit."""
    D, wide, weight = model.config.n_embd // model.config.n_head, 4 * model.config.n_embd, model.lm_head.weight
    ours = model.config.bias and model.config.gelu == "tanh"
    fits = B == 1 and ours and D & (D - 1) == 0 and D >= 16 and wide <= max(TILES)
    return partial(one_more, model) if fits and weight.is_cuda and runs_on(weight) else None


@torch.no_grad()
def one_more(model, token, position, caches):
    """GPT.one_more for one text: logits (1, vocab_size) after `token` (1, 1) at `position` (1,)."""
    x = (model.transformer.wte(token) + model.transformer.wpe(position)).view(-1)
    C, heads = model.config.n_embd, model.config.n_head
    D, early = C // heads, early_launch(x.device)
    parts = torch.empty(heads, SPLITS, D + 2, device=x.device)
    counts = torch.zeros(heads, dtype=torch.int32, device=x.device)
    for block, cache in zip(model.transformer.h, caches, strict=True):
        qkv, mixed = linear(x, block.attn.c_attn, early, block.ln_1), torch.empty_like(x)
        attend_one[(heads, SPLITS)](qkv, cache.k, cache.v, position, mixed, parts, counts, C, cache.k.size(2), D,
                                    PLACES, SPLITS, bool(early), **early)
        x = linear(mixed, block.attn.c_proj, early, residual=x)
        middle = linear(x, block.mlp.c_fc, early, block.ln_2, gelu=True)
        x = linear(middle, block.mlp.c_proj, early, residual=x)
    return linear(x, model.lm_head, early, model.transformer.ln_f)[None, : model.config.vocab_size]
