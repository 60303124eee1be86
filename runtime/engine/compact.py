"""Compact optimizer state: 6 bytes per parameter with the bfloat16 weight, instead of 14.

  float32 weight   the bfloat16 weight that forward uses, and a 16-bit remainder: exact
  exp_avg          8 bits: a sign, and 16 octaves of 8 steps below the largest of its block
  exp_avg_sq       8 bits: 16 octaves of 16 steps
  Muon's exp_avg   bfloat16: Newton-Schulz makes all singular values equal, and so it would raise
                   the larger errors of a narrower format to the size of the rest

A block is 128 elements, and its scale is a power of two, in a byte. All formats cut or add bits of
float32, so a GPU and a CPU store the same. What has been decoded is encoded to the same bits, so a
tag in float32 resumes exactly.

Moments are rounded at random, with noise from the number of the step and the element: a second
moment that changes by 1% per step would never leave a step of 6% if it were rounded to the nearest.
Nothing that is above zero becomes zero in exp_avg_sq: the update would be divided by almost zero.

This file knows formats and what a shard keeps. The steppers are compact_adamw.py and muon.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 128  # elements that share a scale
CHUNK = 2**22  # elements that are float32 at one time, a multiple of BLOCK
OCTAVES = 16  # below the largest of a block; what is smaller becomes zero, or the smallest
MANTISSA_OF_FLOAT32 = 23  # bits
EXP_AVG_MANTISSA = 3
EXP_AVG_SQ_MANTISSA = 4


# The float32 weight


def split_weight(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return float32 weights as (bfloat16, int16): the rounded weights, and what is left of them.

    The remainder is added to the bits. Ties are rounded away from zero: a remainder of +0x8000
    would not fit. NaN stays NaN.
    """
    bits = weights.view(torch.int32)

    # Round to the nearest bfloat16; what is left fits into 16 bits with a sign
    upper = (bits + 0x8000) >> 16
    lower = bits - (upper << 16)
    # The sum of a NaN's bits would overflow
    is_nan = weights.isnan()
    upper = torch.where(is_nan, 0x7FC0, upper)
    lower = torch.where(is_nan, 0, lower)
    return upper.to(torch.int16).view(torch.bfloat16), lower.to(torch.int16)


def join_weight(half: Tensor, remainder: Tensor) -> Tensor:
    """Return the float32 weights of split_weight()."""
    # A negative remainder borrows from the upper bits, as split_weight() has rounded up
    bits = (half.view(torch.int16).int() << 16) + remainder.int()
    return bits.view(torch.float32)


# Noise


def mix(x: Tensor) -> Tensor:
    """Return int32 numbers with well mixed bits. Products wrap, as on a GPU."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * -0x7B935975
    return x ^ ((x >> 16) & 0xFFFF)


def seed_of(step: Tensor) -> Tensor:
    """Return the seed of a step's noise, an int32 scalar on the device. step: a float scalar."""
    return mix(step.to(torch.int32) + 1)


def noise_of(seed: Tensor, start: int, n: int) -> Tensor:
    """Return int32 noise of the elements from `start` to `start + n` of a shard."""
    i = torch.arange(start, start + n, device=seed.device).to(torch.int32)
    return mix(i ^ seed)


def other_noise(noise: Tensor) -> Tensor:
    """Return noise that is independent of the noise of the same elements."""
    return mix(noise + 0x3C6EF35F)


def low_bits(noise: Tensor | None, n: int) -> Tensor | int:
    """Return what rounding adds to the bits of float32 before it drops n of them. None: a half."""
    if noise is None:
        return 1 << (n - 1)
    return noise & ((1 << n) - 1)


# 8 bits


def encode(values: Tensor, noise: Tensor | None, mantissa: int) -> tuple[Tensor, Tensor]:
    """Return (uint8 codes, uint8 scale of each block) of flat float32 values.

    mantissa: bits; EXP_AVG_MANTISSA leaves one for a sign, else values are not negative. noise:
    int32; None rounds to the nearest. What is too small for a code is rounded to zero or to the
    smallest; if values are not negative, always to the smallest.
    """
    is_signed = mantissa == EXP_AVG_MANTISSA
    dropped = MANTISSA_OF_FLOAT32 - mantissa
    bits = values.view(torch.int32)

    # Exponent and mantissa without the sign: these bits grow as the values do
    magnitudes = bits & 0x7FFFFFFF
    rounded = (magnitudes + low_bits(noise, dropped)) >> dropped

    # The scale of a block is the exponent of its largest, after rounding
    n_blocks = -(-values.numel() // BLOCK)
    padded = torch.nn.functional.pad(rounded, (0, n_blocks * BLOCK - values.numel()))
    scales = (padded.view(n_blocks, BLOCK).amax(dim=1) >> mantissa).to(torch.uint8)
    base = base_of(scales, mantissa, values.numel())

    # A code counts the steps above the lowest octave. What is below it becomes the smallest code or
    # zero at random, so that its mean is right. But what is divided by must not become zero
    codes = rounded - base
    smallest = ((base + 1) << dropped).view(torch.float32)
    if not is_signed:
        is_kept = magnitudes > 0
    else:
        limit = torch.as_tensor(low_bits(noise, 23), device=values.device).float() * 2.0**-23
        is_kept = values.abs() > limit * smallest
    codes = torch.where(codes > 0, codes, is_kept.int())

    # The sign is the highest bit, but zero has none
    if is_signed:
        codes = codes | torch.where((bits < 0) & (codes > 0), 0x80, 0)
    return codes.to(torch.uint8), scales


def decode(codes: Tensor, scales: Tensor, mantissa: int) -> Tensor:
    """Return the float32 values of encode()."""
    is_signed = mantissa == EXP_AVG_MANTISSA
    dropped = MANTISSA_OF_FLOAT32 - mantissa
    codes = codes.int()
    base = base_of(scales, mantissa, codes.numel())
    if not is_signed:
        bits = (codes + base) << dropped
        return torch.where(codes > 0, bits, 0).view(torch.float32)

    # The first moment: the highest bit of a code is its sign
    magnitudes = codes & 0x7F
    bits = (magnitudes + base) << dropped
    values = torch.where(magnitudes > 0, bits, 0).view(torch.float32)
    return torch.where(codes > 0x7F, -values, values)


def base_of(scales: Tensor, mantissa: int, n: int) -> Tensor:
    """Return what a code of each of n elements is counted from, int32."""
    lowest = (scales.int() - (OCTAVES - 1)).clamp(min=0)
    return (lowest << mantissa).repeat_interleave(BLOCK)[:n]


def round_to_bfloat16(values: Tensor, noise: Tensor | None) -> Tensor:
    """Return float32 values in bfloat16, rounded at random, or to the nearest without noise."""
    bits = values.view(torch.int32)
    upper = (bits + low_bits(noise, 16)) >> 16
    return upper.to(torch.int16).view(torch.bfloat16)


# What a shard keeps


class Moment8:
    """An 8-bit moment of n elements. mantissa: see encode()."""

    def __init__(self, n: int, mantissa: int, device: torch.device) -> None:
        self.mantissa = mantissa
        self.codes = torch.zeros(n, dtype=torch.uint8, device=device)
        self.scales = torch.zeros(-(-n // BLOCK), dtype=torch.uint8, device=device)

    def read(self, start: int, end: int) -> Tensor:
        """Return the float32 values from start, a multiple of BLOCK, to end."""
        scales = self.scales[start // BLOCK : -(-end // BLOCK)]
        return decode(self.codes[start:end], scales, self.mantissa)

    def write(self, start: int, values: Tensor, noise: Tensor | None) -> None:
        """Store float32 values from start on: whole blocks, or all to the end."""
        end = start + values.numel()
        codes, scales = encode(values, noise, self.mantissa)
        self.codes[start:end] = codes
        self.scales[start // BLOCK : -(-end // BLOCK)] = scales


class Moment16:
    """A moment of n elements in bfloat16."""

    def __init__(self, n: int, device: torch.device) -> None:
        self.values = torch.zeros(n, dtype=torch.bfloat16, device=device)

    def read(self, start: int, end: int) -> Tensor:
        """Return the float32 values from start to end."""
        return self.values[start:end].float()

    def write(self, start: int, values: Tensor, noise: Tensor | None) -> None:
        """Store float32 values from start on."""
        end = start + values.numel()
        self.values[start:end] = round_to_bfloat16(values, noise)


@dataclass(frozen=True, eq=False)
class CompactState:
    """What a shard keeps in the place of float32 weights and moments.

    half: the shard's own, of which remainder is the rest. moments: {"exp_avg": ...}.
    """

    half: Tensor
    remainder: Tensor
    moments: dict[str, Moment8 | Moment16]

    def read(self, field: str, start: int, end: int) -> Tensor:
        """Return the float32 "weight" or moment from start, a multiple of BLOCK, to end."""
        if field == "weight":
            return join_weight(self.half[start:end], self.remainder[start:end])
        return self.moments[field].read(start, end)

    def copy_to(self, field: str, target: Tensor) -> None:
        """Write the first elements of a field to a float32 tensor on the CPU, by chunks. From a
        GPU, the copies may not be done yet."""
        n = target.numel()
        for start in range(0, n, CHUNK):
            end = min(n, start + CHUNK)
            target[start:end].copy_(self.read(field, start, end), non_blocking=True)

    def write(self, field: str, start: int, values: Tensor, noise: Tensor | None = None) -> None:
        """Store float32 values from start on: whole blocks, or all to the end.

        noise: for a moment; None rounds it to the nearest.
        """
        if field == "weight":
            end = start + values.numel()
            self.half[start:end], self.remainder[start:end] = split_weight(values)
            return
        self.moments[field].write(start, values, noise)


def take_remainder(master: Tensor, half: Tensor) -> Tensor:
    """Return the remainders of float32 weights, and round half anew, which changes it at ties."""
    remainder = torch.empty(half.numel(), dtype=torch.int16, device=half.device)
    for start in range(0, half.numel(), CHUNK):
        end = start + CHUNK
        half[start:end], remainder[start:end] = split_weight(master[start:end])
    return remainder


def compact_state(half: Tensor, remainder: Tensor, is_muon: bool) -> CompactState:
    """Return the CompactState of weights, with moments of zero."""
    n = half.numel()

    # Muon has no second moment
    if is_muon:
        return CompactState(half, remainder, {"exp_avg": Moment16(n, half.device)})

    # AdamW's first moment has a sign, so it has one bit of mantissa less than the second
    moments: dict[str, Moment8 | Moment16] = {
        "exp_avg": Moment8(n, EXP_AVG_MANTISSA, half.device),
        "exp_avg_sq": Moment8(n, EXP_AVG_SQ_MANTISSA, half.device),
    }
    return CompactState(half, remainder, moments)


def placeholder(n: int, device: torch.device) -> Tensor:
    """Return a tensor of n NaN that takes 4 bytes: in the place of a float32 tensor that is kept in
    another way. Whatever reads it by mistake gets NaN."""
    return torch.full((1,), torch.nan, device=device).expand(n)
