"""AdamW on compact state: clipping, the update and the formats in one kernel, or by PyTorch.

Both make the same operations in the same order on each element, so what they store is equal to the
last bit.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from runtime.engine.clip import Clip
from runtime.engine.compact import (
    BLOCK,
    CHUNK,
    CompactState,
    noise_of,
    other_noise,
    seed_of,
)
from runtime.engine.shard import Shard
from runtime.kernels import jit, tl, triton

ROWS = 8  # blocks per program


class Rates(NamedTuple):
    """What a step multiplies by, float32 scalars on the device.

    factor: of the gradients: Clip.factor(). size: the learning rate with the first moment's bias
    correction. root: the square root of the second moment's.
    """

    factor: Tensor
    size: Tensor
    root: Tensor


def rates_of(options: dict, step: Tensor, clip: Clip) -> Rates:
    """Return the Rates of a step. options: a parameter group. step: the number of steps before."""
    beta1, beta2 = options["betas"]
    # In float64: 1 - beta2**1 has 4 digits in float32
    t = step.double() + 1
    size = options["lr"] / (1 - beta1**t)
    root = (1 - beta2**t).sqrt()
    return Rates(clip.factor().float(), size.float(), root.float())


def step_by_pytorch(shard: Shard, clip: Clip) -> None:
    """Step a shard, unless the norm is too large, and clear its gradients. The CPU waits for the
    norm."""
    compact = shard.compact
    step = shard.state["step"]
    if clip.applies():
        rates = rates_of(shard.options, step, clip)
        seed = seed_of(step)
        for start in range(0, shard.grads.numel(), CHUNK):
            grads = shard.grads[start : start + CHUNK]
            step_chunk(compact, shard.options, start, grads, rates, seed)
    shard.grads.zero_()


def step_chunk(
    compact: CompactState, options: dict, start: int, grads: Tensor, rates: Rates, seed: Tensor
) -> None:
    """Step the elements from `start` on. grads: theirs. seed: of the noise of the step."""
    end = start + grads.numel()
    beta1, beta2 = options["betas"]

    # What is kept, in float32
    weight = compact.read("weight", start, end)
    m = compact.read("exp_avg", start, end)
    v = compact.read("exp_avg_sq", start, end)

    # As adamw.py, without operations that a device may fuse
    g = grads * rates.factor
    m = m + (g - m) * (1 - beta1)
    v = v * beta2 + (g * g) * (1 - beta2)
    weight = weight * (1 - options["lr"] * options["weight_decay"])
    weight = weight - (rates.size * m) / (v.sqrt() / rates.root + options["eps"])

    # Moments are rounded at random, each with noise of its own; the weight is exact
    noise = noise_of(seed, start, grads.numel())
    compact.write("weight", start, weight)
    compact.write("exp_avg", start, m, noise)
    compact.write("exp_avg_sq", start, v, other_noise(noise))


@jit
def mixed(x):
    """Return mix(x) of compact.py."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * -0x7B935975
    return x ^ ((x >> 16) & 0xFFFF)


@jit
def base_of_scale(scale, MANTISSA: tl.constexpr):
    """Return what the codes of blocks are counted from, (rows, 1)."""
    lowest = tl.maximum(scale.to(tl.int32) - 15, 0)
    return (lowest << MANTISSA)[:, None]


@jit
def load_moment(codes, scales, i, row, mask, in_row, SIGNED: tl.constexpr):
    """Return decode() of compact.py: (rows, BLOCK). i: the elements. SIGNED: of the first
    moment."""
    MANTISSA: tl.constexpr = 3 if SIGNED else 4
    code = tl.load(codes + i, mask=mask, other=0).to(tl.int32)
    base = base_of_scale(tl.load(scales + row, mask=in_row, other=0), MANTISSA)
    magnitudes = code & 0x7F if SIGNED else code
    bits = tl.where(magnitudes > 0, (magnitudes + base) << (23 - MANTISSA), 0)
    values = bits.to(tl.float32, bitcast=True)
    return tl.where(code > 0x7F, -values, values) if SIGNED else values


@jit
def store_moment(codes, scales, values, noise, i, row, mask, in_row, SIGNED: tl.constexpr):
    """Store encode() of compact.py. values, noise: (rows, BLOCK)."""
    MANTISSA: tl.constexpr = 3 if SIGNED else 4
    dropped: tl.constexpr = 23 - MANTISSA
    bits = values.to(tl.int32, bitcast=True)
    magnitudes = bits & 0x7FFFFFFF
    rounded = (magnitudes + (noise & ((1 << dropped) - 1))) >> dropped
    scale = tl.max(rounded, axis=1) >> MANTISSA
    base = base_of_scale(scale, MANTISSA)
    code = rounded - base
    if SIGNED:
        smallest = ((base + 1) << dropped).to(tl.float32, bitcast=True)
        limit = (noise & 0x7FFFFF).to(tl.float32) * 1.1920928955078125e-07
        is_kept = tl.abs(values) > limit * smallest
    else:
        is_kept = magnitudes > 0
    code = tl.where(code > 0, code, is_kept.to(tl.int32))
    if SIGNED:
        code = code | tl.where((bits < 0) & (code > 0), 0x80, 0)
    tl.store(codes + i, code.to(tl.uint8), mask=mask)
    tl.store(scales + row, scale.to(tl.uint8), mask=in_row)


@jit
def load_weight(half, remainder, i, mask):
    """Return join_weight() of compact.py. half: the bits of bfloat16."""
    upper = tl.load(half + i, mask=mask, other=0).to(tl.int32)
    lower = tl.load(remainder + i, mask=mask, other=0).to(tl.int32)
    return ((upper << 16) + lower).to(tl.float32, bitcast=True)


@jit
def store_weight(half, remainder, weight, i, mask):
    """Store split_weight() of compact.py."""
    bits = weight.to(tl.int32, bitcast=True)
    upper = (bits + 0x8000) >> 16
    lower = bits - (upper << 16)
    is_nan = weight != weight
    upper = tl.where(is_nan, 0x7FC0, upper)
    lower = tl.where(is_nan, 0, lower)
    tl.store(half + i, upper.to(tl.int16), mask=mask)
    tl.store(remainder + i, lower.to(tl.int16), mask=mask)


@jit
def compact_adamw_kernel(
    half,
    remainder,
    m_codes,
    m_scales,
    v_codes,
    v_scales,
    grads,
    factor,
    size,
    root,
    seed,
    grad_norm,
    n,
    keep,
    rest1,
    beta2,
    rest2,
    eps,
    skip_above,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Step n elements and clear their grads. If grad_norm is not below skip_above, only clear
    grads.

    half: the bits of the bfloat16 weights. factor, size, root: of Rates. keep: 1 - lr *
    weight_decay. rest1, rest2: 1 - beta1, 1 - beta2.
    """
    # The elements of this program, and those that the step changes
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    i = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = i < n
    in_row = row * BLOCK < n
    end = tl.where(tl.load(grad_norm) < skip_above, n, 0)
    commit = i < end
    commit_row = row * BLOCK < end

    # The operations of step_chunk()
    weight = load_weight(half, remainder, i, mask)
    m = load_moment(m_codes, m_scales, i, row, mask, in_row, True)
    v = load_moment(v_codes, v_scales, i, row, mask, in_row, False)
    g = tl.load(grads + i, mask=mask, other=0.0) * tl.load(factor)
    m = m + (g - m) * rest1
    v = v * beta2 + (g * g) * rest2
    divisor = tl.div_rn(tl.sqrt_rn(v), tl.load(root)) + eps
    weight = weight * keep - tl.div_rn(tl.load(size) * m, divisor)

    noise = mixed(i.to(tl.int32) ^ tl.load(seed))
    store_weight(half, remainder, weight, i, commit)
    store_moment(m_codes, m_scales, m, noise, i, row, commit, commit_row, True)
    noise = mixed(noise + 0x3C6EF35F)
    store_moment(v_codes, v_scales, v, noise, i, row, commit, commit_row, False)
    tl.store(grads + i, tl.zeros([ROWS, BLOCK], tl.float32), mask=mask)


def step_by_kernel(shard: Shard, clip: Clip) -> None:
    """Do what step_by_pytorch() does in one pass, on a GPU. The CPU doesn't wait."""
    compact = shard.compact
    options = shard.options
    exp_avg = compact.moments["exp_avg"]
    exp_avg_sq = compact.moments["exp_avg_sq"]
    step = shard.state["step"]
    rates = rates_of(options, step, clip)
    n = shard.grads.numel()
    beta1, beta2 = options["betas"]
    compact_adamw_kernel[(triton.cdiv(n, ROWS * BLOCK),)](
        shard.half.view(torch.int16),
        compact.remainder,
        exp_avg.codes,
        exp_avg.scales,
        exp_avg_sq.codes,
        exp_avg_sq.scales,
        shard.grads,
        rates.factor,
        rates.size,
        rates.root,
        seed_of(step),
        clip.norm,
        n,
        1 - options["lr"] * options["weight_decay"],
        1 - beta1,
        beta2,
        1 - beta2,
        options["eps"],
        clip.skip_above,
        BLOCK=BLOCK,
        ROWS=ROWS,
        enable_fp_fusion=False,  # a fused multiplication and addition rounds once, PyTorch twice
    )
