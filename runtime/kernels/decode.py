"""Kernels that decode one token of B sequences (RESULTS.md).

At batch size 1 each linear layer is a GEMV, which takes as long as reading its matrix. PyTorch's
GEMVs reach 700 to 2,300 GB/s of an H200's 4,150 GB/s and launch layer norm, GELU and residual
separately. Here a block is five kernels:

  gemv              One GEMV, fused with the layer norm before it and the bias, GELU and residual
                    after it.
  decode_attention  Split-KV attention ("flash decoding"). Several programs share the keys and
                    values of a head, each with an online softmax over its part. The last program to
                    finish combines the partial results.

Above batch size 1 a block is seven kernels: cuBLAS's GEMMs, decode_attention, and block.py's
residual + layer norms.

With programmatic dependent launch (PDL, Hopper and later), a kernel reads its matrix while the
previous one runs."""

from functools import partial

import torch
import torch.nn.functional as F

from runtime.kernels import device_has_triton, jit, tl, triton
from runtime.kernels.block import residual_layernorm_fwd
from runtime.kernels.fit import why_not_decoded

# The fastest values tried on an H200 with GPT-2 XL (results/h200_x1_one_token.json,
# h200_x1_sampling.json).
# {matrix width, rounded up to a power of 2: (rows, warps) per program}
TILES = {2048: (8, 4), 8192: (2, 16)}
# (keys that a program loads at once, warps): at batch size 1, in a batch
ATTENTION_TILES = (64, 4), (32, 2)
# programs per head at batch size 1; programs per head of all sequences together
MAX_KV_SPLITS, HEAD_PROGRAMS = 8, 32
NORM_WARPS = 8


@jit
def gemv(
    x,
    weight,
    bias,
    norm_weight,
    norm_bias,
    residual,
    out,
    N,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    GELU: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute out (N,) = weight (N, K) @ x (K,). NORM: use layernorm(x). Then add bias, apply GELU,
    add residual."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, BLOCK)
    mask = i < K

    # The weights don't depend on the previous kernel, so they are read before it ends
    tile = tl.load(
        weight + rows[:, None].to(tl.int64) * K + i[None, :],
        mask=(rows < N)[:, None] & mask[None, :],
        # read only once: don't evict other data from the L2 cache
        other=0.0,
        eviction_policy="evict_first",
    )
    if BIAS:
        b = tl.load(bias + rows, mask=rows < N, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()

    # x is the previous kernel's result
    values = tl.load(x + i, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        mean = tl.sum(values) / K
        centered = tl.where(mask, values - mean, 0.0)
        rstd = tl.rsqrt(tl.sum(centered * centered) / K + 1e-5)
        values = centered * rstd * tl.load(norm_weight + i, mask=mask, other=0.0).to(tl.float32)
        values += tl.load(norm_bias + i, mask=mask, other=0.0).to(tl.float32)

    # The matmul, and what comes after it, in float32
    y = tl.sum(tile.to(tl.float32) * values[None, :], 1)
    if BIAS:
        y += b
    if GELU:  # the tanh form, as y times a sigmoid
        y = y * tl.sigmoid(1.5957691216057308 * (y + 0.044715 * y * y * y))
    if ADD:
        y += tl.load(residual + rows, mask=rows < N, other=0.0).to(tl.float32)
    tl.store(out + rows, y.to(out.dtype.element_ty), mask=rows < N)


@jit
def decode_attention(
    qkv,
    keys,
    values,
    position,
    out,
    partials,
    arrivals,
    heads,
    length,
    D: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    NUM_KV_SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute one head's attention of a sequence's token at `position` to itself and all tokens
    before it, and cache its key and value. program_id(0): sequence * heads + head."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row, split, at = tl.program_id(0), tl.program_id(1), tl.load(position)
    d = tl.arange(0, D)
    base, C = row.to(tl.int64) * length * D, heads * D
    qkv += (row // heads) * 3 * C + (row % heads) * D
    per_split = tl.cdiv(tl.cdiv(at, NUM_KV_SPLITS), BLOCK_KV) * BLOCK_KV
    first, end = split * per_split, tl.minimum(at, (split + 1) * per_split)
    positions = first + tl.arange(0, BLOCK_KV)
    offsets, mask = base + positions[:, None] * D + d[None, :], (positions < end)[:, None]
    k, v = (
        tl.load(keys + offsets, mask=mask, other=0.0),
        tl.load(values + offsets, mask=mask, other=0.0),
    )
    if PDL:  # only qkv depends on the previous kernel; the cached keys and values don't
        tl.extra.cuda.gdc_wait()
    q = tl.load(qkv + d).to(tl.float32) * (D**-0.5)
    # running maximum, sum of exp(score - m), and of that times v
    m, l, acc = -1e30, 0.0, tl.zeros([D], tl.float32)
    if split == 0:
        own_k, own_v = tl.load(qkv + C + d), tl.load(qkv + 2 * C + d)
        tl.store(keys + base + at * D + d, own_k)
        tl.store(values + base + at * D + d, own_v)
        m, l, acc = tl.sum(q * own_k.to(tl.float32)), 1.0, own_v.to(tl.float32)

    # Online softmax: a larger score rescales what was summed before it
    while first < end:
        scores = tl.where(positions < end, tl.sum(k.to(tl.float32) * q[None, :], 1), -1e30)
        m_new = tl.maximum(m, tl.max(scores))
        p, alpha = tl.exp(scores - m_new), tl.exp(m - m_new)
        l = l * alpha + tl.sum(p)
        acc = acc * alpha + tl.sum(p[:, None] * v.to(tl.float32), 0)
        m = m_new
        first += BLOCK_KV
        positions = first + tl.arange(0, BLOCK_KV)
        offsets, mask = base + positions[:, None] * D + d[None, :], (positions < end)[:, None]
        k, v = (
            tl.load(keys + offsets, mask=mask, other=0.0),
            tl.load(values + offsets, mask=mask, other=0.0),
        )
    if NUM_KV_SPLITS > 1:
        partial_ptr = partials + (row * NUM_KV_SPLITS + split) * (D + 2)
        tl.store(partial_ptr + d, acc)
        tl.store(partial_ptr + D, l)
        tl.store(partial_ptr + D + 1, m)
        tl.debug_barrier()
        if tl.atomic_add(arrivals + row, 1) < NUM_KV_SPLITS - 1:
            return
        tl.store(arrivals + row, 0)  # the last program combines
        partial_ptrs = partials + (row * NUM_KV_SPLITS + tl.arange(0, NUM_KV_SPLITS)) * (D + 2)
        ms = tl.load(partial_ptrs + D + 1, cache_modifier=".cg")
        alphas = tl.exp(ms - tl.max(ms))
        l = tl.sum(alphas * tl.load(partial_ptrs + D, cache_modifier=".cg"))
        acc = tl.sum(
            alphas[:, None] * tl.load(partial_ptrs[:, None] + d[None, :], cache_modifier=".cg"), 0
        )
    tl.store(out + row * D + d, (acc / l).to(out.dtype.element_ty))


def linear(x, layer, pdl, norm=None, gelu=False, residual=None, with_bias=True):
    """Return layer(x) of one row, (K,) -> (N,). Optionally apply norm before it, and GELU or
    residual after it."""
    weight, bias = layer.weight, layer.bias if with_bias else None
    (N, K), out = weight.shape, x.new_empty(len(weight))
    BLOCK = triton.next_power_of_2(K)
    rows, warps = TILES.get(BLOCK, (4, 4))
    gemv[(triton.cdiv(N, rows),)](
        x,
        weight,
        bias,
        norm and norm.weight,
        norm and norm.bias,
        residual,
        out,
        N,
        K,
        BLOCK,
        norm is not None,
        bias is not None,
        gelu,
        residual is not None,
        rows,
        bool(pdl),
        num_warps=warps,
        **pdl,
    )
    return out


def decode_step_for(model):
    """Return generate()'s custom_step, or None if these kernels don't support the model as it is
    now."""
    weight = model.transformer.wte.weight
    if not (weight.is_cuda and device_has_triton(weight)) or why_no_decode(model):
        return None
    return partial(decode_step, model)


def why_no_decode(model):
    """Return why these kernels can't decode what a model computes, or None."""
    D = model.config.n_embd // model.config.n_head

    # The widest matrix is the MLP's second one
    if 4 * model.config.n_embd > max(TILES):
        return f"n_embd is above {max(TILES) // 4:,}"
    if D & (D - 1) or D < 16:
        return f"the head size {D} is not a power of 2 from 16 up"
    return why_not_decoded(model)


@torch.no_grad()
def decode_step(model, token, position, caches):
    """Return logits (B, vocab_size) after `token` (B, 1) at `position` (1,): one step of
    decoder.Decoder."""
    # The embedding of the token and of its position: (B, C)
    x = (model.transformer.wte(token) + model.transformer.wpe(position)).squeeze(1)
    attention = DecodeAttention(x, position, model.config.n_head)
    layers = zip(model.transformer.h, caches, strict=True)
    if len(x) > 1:
        return decode_batch(model, x, layers, attention)

    # One sequence: each linear layer is a GEMV, with the norm before it and what comes after it
    pdl = attention.pdl
    x = x[0]
    for block, cache in layers:
        y = attention(linear(x, block.attn.c_attn, pdl, block.ln_1), cache)
        x = linear(y, block.attn.c_proj, pdl, residual=x)
        h = linear(x, block.mlp.c_fc, pdl, block.ln_2, gelu=True)
        x = linear(h, block.mlp.c_proj, pdl, residual=x)
    logits = linear(x, model.lm_head, pdl, model.transformer.ln_f, with_bias=False)
    return logits[None, : model.lm_head.vocab_size]


class DecodeAttention:
    """Launches decode_attention for each block of a step.

    x: (B, C), the residual stream. position: (1,), of the token. pdl: the options of a launch.
    """

    def __init__(self, x, position, heads):
        # How many programs share the keys of a head: the GPU should be full at any batch size
        batch, width = x.shape
        self.position = position
        self.heads = heads
        self.programs = batch * heads
        self.head_size = width // heads

        # A larger batch has enough programs without splitting the keys
        wanted = triton.next_power_of_2(triton.cdiv(HEAD_PROGRAMS, batch))
        self.splits = min(MAX_KV_SPLITS, wanted)
        self.keys_at_once, self.warps = ATTENTION_TILES[batch > 1]

        # PDL needs Hopper or later

        # With PDL, each kernel starts before the one before it has ended
        hopper = x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)
        self.pdl = {"launch_pdl": True} if hopper else {}

        # What the programs of a head exchange
        self.partials = torch.empty(self.programs, self.splits, self.head_size + 2, device=x.device)
        self.arrivals = torch.zeros(self.programs, dtype=torch.int32, device=x.device)

    def __call__(self, qkv, cache):
        """Return the attention's output, (B, C) or (C,), and cache this token's key and value."""
        y = qkv.new_empty(*qkv.shape[:-1], self.heads * self.head_size)
        keys = cache.keys[0]
        values = cache.values[0]
        decode_attention[(self.programs, self.splits)](
            qkv,
            keys,
            values,
            self.position,
            y,
            self.partials,
            self.arrivals,
            self.heads,
            keys.size(2),
            self.head_size,
            self.keys_at_once,
            self.splits,
            bool(self.pdl),
            num_warps=self.warps,
            **self.pdl,
        )
        return y


def decode_batch(model, x, layers, attention):
    """Return the logits of several sequences, by cuBLAS's GEMMs. x: (B, C), changed in place."""
    batch, width = x.shape

    # The means and rstds, which the kernel writes and nobody reads here
    stats = torch.empty(2, batch, device=x.device)
    branch = None
    bias = None

    def add_and_norm(norm):
        """Add the branch and its bias to the residual stream x in place, and return its layer
        norm."""
        normed = torch.empty_like(x)
        residual_layernorm_fwd[(batch,)](
            x,
            branch,
            bias,
            norm.weight,
            norm.bias,
            x,
            normed,
            *stats,
            width,
            x,
            x,
            0,
            False,
            branch is not None,
            triton.next_power_of_2(width),
            bool(attention.pdl),
            num_warps=NORM_WARPS,
            **attention.pdl,
        )
        return normed

    for block, cache in layers:
        attn = block.attn
        mlp = block.mlp
        qkv = F.linear(add_and_norm(block.ln_1), attn.c_attn.weight, attn.c_attn.bias)
        y = attention(qkv, cache)
        branch = F.linear(y, attn.c_proj.weight)
        bias = attn.c_proj.bias
        h = linear_gelu(add_and_norm(block.ln_2), mlp.c_fc)
        branch = F.linear(h, mlp.c_proj.weight)
        bias = mlp.c_proj.bias
    return model.lm_head(add_and_norm(model.transformer.ln_f))


def linear_gelu(x, layer):
    """Return GELU(layer(x)) in its tanh form. On CUDA it is part of the GEMM."""
    if x.is_cuda:
        return torch._addmm_activation(layer.bias, x, layer.weight.t(), use_gelu=True)
    return F.gelu(layer(x), approximate="tanh")
