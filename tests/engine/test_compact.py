"""Compact optimizer state on plain tensors: the formats, and AdamW's step on them."""

import math

import numpy as np
import pytest
import torch

from runtime.engine import compact, compact_adamw, muon
from runtime.engine.clip import Clip
from runtime.engine.compact import BLOCK, EXP_AVG_MANTISSA, EXP_AVG_SQ_MANTISSA
from runtime.engine.shard import Place, Shard

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
SPECIAL = (0.0, -0.0, 1.0, -1.0, 3.3895e38, math.inf, -math.inf, 1e-40, -1e-40, 1.17549435e-38)


def as_bits(values):
    return values.view(torch.int32)


def weights_to_try():
    """Random floats of all sizes, ties of bfloat16 and their neighbors, and special values."""
    generator = torch.Generator().manual_seed(0)
    uppers = torch.randint(-2**15, 2**15, (20_000,), generator=generator)
    lowers = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]).repeat(3_334)[:20_000]
    bits = (uppers * 2**16 + lowers).to(torch.int32)
    values = torch.cat([bits.view(torch.float32), torch.tensor(SPECIAL)])
    return values[~values.isnan()]


def test_a_weight_is_its_bfloat16_and_its_remainder():
    """To the last bit. The bfloat16 is PyTorch's, but for ties: away from zero."""
    weights = weights_to_try()
    half, remainder = compact.split_weight(weights)
    assert half.dtype == torch.bfloat16 and remainder.dtype == torch.int16
    assert torch.equal(as_bits(compact.join_weight(half, remainder)), as_bits(weights))
    ties = (as_bits(weights) & 0xFFFF) == 0x8000
    assert ties.sum() > 3_000
    assert torch.equal(half[~ties], weights[~ties].bfloat16())
    finite = ties & half.isfinite()
    assert (half[finite].double().abs() > weights[finite].double().abs()).all()


def test_a_nan_stays_one():
    for bits in (0x7FC00000, 0x7FFFFFFF, -0x400000, 0x7F800001):
        half, remainder = compact.split_weight(torch.tensor([bits], dtype=torch.int32).view(torch.float32))
        assert half.isnan().all() and compact.join_weight(half, remainder).isnan().all()
    values = torch.ones(BLOCK)
    values[3] = math.nan
    values[4] = math.inf
    for mantissa in (EXP_AVG_MANTISSA, EXP_AVG_SQ_MANTISSA):
        decoded = compact.decode(*compact.encode(values, None, mantissa), mantissa)
        assert decoded[3].isnan() and decoded[4].isinf()


def plain_codes(values, mantissa, octaves=16):
    """What the 8 bits hold, rounded to the nearest, by float64 and block by block."""
    out = np.zeros(len(values))
    for first in range(0, len(values), BLOCK):
        block = np.abs(values[first : first + BLOCK].astype(np.float64))
        fraction, exponent = np.frexp(block)
        steps = 2.0 ** (exponent - 1 - mantissa)  # between neighbors of this size
        rounded = np.floor(block / steps + 0.5) * steps
        top = np.frexp(rounded.max())[1]  # the largest is below 2**top
        floor = 2.0 ** (top - octaves)
        smallest = floor * (1 + 2.0**-mantissa)  # the code of the floor itself is that of zero
        is_small = rounded <= floor
        small = np.where(block > smallest / 2, smallest, 0.0)
        if mantissa == EXP_AVG_SQ_MANTISSA:
            small = np.where(block > 0, smallest, 0.0)
        out[first : first + BLOCK] = np.where(is_small, small, rounded)
    return out * np.sign(values)


@pytest.mark.parametrize("mantissa", [EXP_AVG_MANTISSA, EXP_AVG_SQ_MANTISSA])
def test_8_bits_are_those_of_float64(mantissa):
    """Blocks of very different sizes, one of them zero, the last one shorter. What is decoded is encoded to the same,
    with any noise."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(20 * BLOCK + 37, generator=generator)
    values *= 2.0 ** torch.randint(-12, 3, values.shape, generator=generator)
    values *= 10.0 ** (torch.arange(len(values)) // BLOCK - 12.0)
    values[5 * BLOCK : 6 * BLOCK] = 0
    values[7 * BLOCK] = 2.0**30 * values[7 * BLOCK + 1 :][:BLOCK].abs().max()  # all others are small
    if mantissa == EXP_AVG_SQ_MANTISSA:
        values = values.abs()
    codes, scales = compact.encode(values, None, mantissa)
    assert codes.dtype == scales.dtype == torch.uint8 and len(scales) == 21
    decoded = compact.decode(codes, scales, mantissa)
    assert np.array_equal(decoded.double().numpy(), plain_codes(values.numpy(), mantissa))
    noise = compact.noise_of(compact.seed_of(torch.tensor(3.0)), 0, len(values))
    again, same_scales = compact.encode(decoded, noise, mantissa)
    assert torch.equal(again, codes) and torch.equal(same_scales, scales)
    if mantissa == EXP_AVG_SQ_MANTISSA:
        assert torch.equal(decoded > 0, values > 0)  # none became zero


def test_the_noise_has_no_bias():
    """The mean over 4,000 steps is the value, within four standard errors; also of what is too small for a code."""
    n = 4_000
    values = torch.tensor([1.0, 0.51, -0.0371, 0.9999, 3e-6, -2e-5]).repeat(22)[:BLOCK]
    seeds = [compact.seed_of(torch.tensor(float(step))) for step in range(n)]
    noise = torch.cat([compact.noise_of(seed, 1000, BLOCK) for seed in seeds])
    all_steps = values.repeat(n)
    positive = compact.encode(all_steps.abs(), compact.other_noise(noise), 4)
    rounded = {
        "signed": compact.decode(*compact.encode(all_steps, noise, 3), 3),
        "positive": compact.decode(*positive, 4),
        "bfloat16": compact.round_to_bfloat16(all_steps, noise),
    }
    means = {name: result.double().view(n, BLOCK).mean(0) for name, result in rounded.items()}
    spacing = {"signed": 2.0**-3, "positive": 2.0**-4, "bfloat16": 2.0**-7}
    for name, mean in means.items():
        wanted = values.abs() if name == "positive" else values
        big = wanted.abs() > 2.0**-14
        bound = 4 * spacing[name] / 2 / n**0.5
        error = ((mean - wanted) / wanted).abs()[big]
        assert error.max() < bound, name
        assert error.max() > bound / 100, name  # it is random
        if name != "positive":
            smallest = 2.0**-15 * 1.125
            assert (mean - wanted)[~big].abs().max() < 4 * smallest / 2 / n**0.5


def test_neighbors_and_steps_have_other_noise():
    seeds = [compact.seed_of(torch.tensor(step)) for step in (1.0, 2.0)]
    first, later = (compact.noise_of(seed, 0, 4096) for seed in seeds)
    assert torch.equal(first[1000:], compact.noise_of(seeds[0], 1000, 3096))
    for other in (first.roll(1), compact.other_noise(first), later):
        for bit in (0, 8, 15, 18, 22):
            same = (((first ^ other) >> bit) & 1).float().mean()
            assert 0.45 < same < 0.55


SIZE = 5 * BLOCK + 30


def make_shard(seed=0):
    """A shard with random weights and moments, whose last block is shorter."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(SIZE, generator=generator)
    half = weights.bfloat16()
    state = compact.compact_state(half, compact.take_remainder(weights, half), is_muon=False)
    state.write("exp_avg", 0, 0.1 * torch.randn(SIZE, generator=generator))
    state.write("exp_avg_sq", 0, torch.rand(SIZE, generator=generator) ** 4)
    master = torch.nn.Parameter(compact.placeholder(SIZE, half.device))
    optimizer = torch.optim.AdamW([master], **OPTIONS)
    optimizer.state[master] = {"step": torch.tensor(6.0)}
    grads = torch.randn(SIZE, generator=generator)
    return Shard(master, half, grads, optimizer, 0, compact=state)


def stored(shard):
    """All bits that a shard keeps."""
    moments = shard.compact.moments
    return [shard.half.view(torch.int16), shard.compact.remainder, moments["exp_avg"].codes, moments["exp_avg"].scales,
            moments["exp_avg_sq"].codes, moments["exp_avg_sq"].scales]


def plain_step(shard, factor):
    """The weights and moments after torch.optim.AdamW's step from the same state."""
    weight = torch.nn.Parameter(shard.compact.read("weight", 0, SIZE))
    optimizer = torch.optim.AdamW([weight], **OPTIONS)
    optimizer.state[weight] = {"step": torch.tensor(6.0)}
    for field in ("exp_avg", "exp_avg_sq"):
        optimizer.state[weight][field] = shard.compact.read(field, 0, SIZE)
    weight.grad = shard.grads * factor
    optimizer.step()
    return weight.detach(), *(optimizer.state[weight][field] for field in ("exp_avg", "exp_avg_sq"))


@pytest.mark.parametrize("norm", [0.5, 4.0])
def test_a_step_is_pytorchs(norm):
    """Clipped or not, with a loss scale. The weights are exact, and the moments within one step of their codes."""
    shard = make_shard()
    clip = Clip(torch.tensor(norm), 1 / 8, 1.0, 50.0)
    weight, m, v = plain_step(shard, min(1.0, 1.0 / norm) / 8)
    compact_adamw.step_by_pytorch(shard, clip)
    got = shard.compact.read("weight", 0, SIZE)
    assert (got - weight).abs().max() < 3e-7 and not shard.grads.any()
    assert torch.equal(got.bfloat16(), shard.half)
    for field, wanted, spacing in (("exp_avg", m, 2.0**-3), ("exp_avg_sq", v, 2.0**-4)):
        is_large = wanted.abs() > 2.0**-13 * wanted.abs().max()
        error = ((shard.compact.read(field, 0, SIZE) - wanted) / wanted).abs()
        assert error[is_large].max() <= spacing + 1e-6, field


@pytest.mark.parametrize("norm, grad", [(math.nan, math.nan), (math.inf, math.inf), (50.0, 1.0)])
def test_a_skipped_step_changes_nothing_but_the_gradients(norm, grad):
    shard = make_shard()
    before = [bits.clone() for bits in stored(shard)]
    shard.grads[7] = grad
    compact_adamw.step_by_pytorch(shard, Clip(torch.tensor(norm), 1.0, 1.0, 50.0))
    assert all(torch.equal(*pair) for pair in zip(before, stored(shard)))
    assert not shard.grads.any()


def test_chunks_give_the_same_bits(monkeypatch):
    """The noise and the scales are those of the element, not of its place in a chunk."""
    whole = make_shard()
    pieces = make_shard()
    clip = Clip(torch.tensor(1.0), 1.0, math.inf, math.inf)
    compact_adamw.step_by_pytorch(whole, clip)
    monkeypatch.setattr(compact_adamw, "CHUNK", 2 * BLOCK)
    compact_adamw.step_by_pytorch(pieces, clip)
    assert all(torch.equal(*pair) for pair in zip(stored(whole), stored(pieces)))


def test_the_second_moment_follows_slow_changes():
    """With beta2 0.999 a step changes 0.1%, far below the step of a code: the mean still decays as in float32."""
    moment = compact.Moment8(64 * BLOCK, EXP_AVG_SQ_MANTISSA, torch.device("cpu"))
    moment.write(0, torch.ones(64 * BLOCK), None)
    for step in range(1000):
        noise = compact.noise_of(compact.seed_of(torch.tensor(float(step))), 0, 64 * BLOCK)
        moment.write(0, moment.read(0, 64 * BLOCK) * 0.999, noise)
    assert moment.read(0, 64 * BLOCK).mean().item() == pytest.approx(0.999**1000, rel=0.01)


def test_what_is_in_the_place_of_a_master_has_no_memory():
    values = compact.placeholder(10**6, torch.device("cpu"))
    assert values.shape == (10**6,) and values.untyped_storage().nbytes() == 4
    assert values[:100].isnan().all()


def test_muons_step_is_that_of_fp32_state(process_group):
    """Of two matrices. From a momentum in bfloat16, the weights are equal to the last bit, and the next momentum is one
    of its two neighbors. A skipped step changes nothing."""
    generator = torch.Generator().manual_seed(7)
    weights = 0.1 * torch.randn(48, generator=generator)
    momentum = torch.randn(48, generator=generator).bfloat16()
    group = {"params": [], "kind": "muon", "lr": 0.02, "weight_decay": 0.1}
    shards = []
    for is_compact in (False, True):
        half = weights.bfloat16()
        master = torch.nn.Parameter(weights.clone())
        state = None
        if is_compact:
            state = compact.compact_state(half, compact.take_remainder(weights, half), is_muon=True)
            state.write("exp_avg", 0, momentum.float())
        optimizer = torch.optim.AdamW([{**group, "params": [master]}])
        optimizer.state[master] = {"step": torch.tensor(2.0), "exp_avg": momentum.float()}
        shards.append(Shard(master, half, torch.zeros(48), optimizer, 0, compact=state))
    stepper = muon.Muon((Place(torch.nn.Parameter(torch.zeros(8, 6)), 0),), [2], size=48, group=None)
    grads = torch.randn(48, generator=generator)
    for shard in shards:
        shard.grads.copy_(grads)
        stepper.step(shard, Clip(torch.tensor(3.0), 1.0, 1.0, 50.0))
    plain, ours = shards
    assert torch.equal(as_bits(ours.compact.read("weight", 0, 48)), as_bits(plain.master.data))
    wanted = plain.state["exp_avg"]
    got = ours.compact.moments["exp_avg"].values
    assert ((got.float() - wanted).abs() < 2.0**-7 * wanted.abs()).all()
    assert not torch.equal(got, wanted.bfloat16()) and not ours.grads.any()

    # A step that is skipped
    before = [values.clone() for values in (ours.half, ours.compact.remainder, got)]
    ours.grads[3] = math.nan
    stepper.step(ours, Clip(torch.tensor(math.nan), 1.0, 1.0, 50.0))
    after = (ours.half, ours.compact.remainder, ours.compact.moments["exp_avg"].values)
    assert all(torch.equal(*pair) for pair in zip(before, after))
    assert not ours.grads.any()


@pytest.mark.parametrize("norm", [0.5, 4.0, 50.0, math.nan])
def test_the_kernel_stores_the_same_bits(norm, monkeypatch):
    """In Triton's interpreter: five steps with gradients of all sizes, in three programs; clipped or not, skipped."""
    pytest.importorskip("triton", reason="PyTorch for this platform comes without Triton, and the kernel is not used")
    shards = [make_shard(), make_shard()]
    steppers = (compact_adamw.step_by_pytorch, compact_adamw.step_by_kernel)
    monkeypatch.setattr(compact_adamw, "ROWS", 2)
    generator = torch.Generator().manual_seed(5)
    clip = Clip(torch.tensor(norm), 1 / 8, 1.0, 50.0)
    for step in range(5):
        grads = torch.randn(SIZE, generator=generator) * 10.0 ** torch.randint(-9, 2, (SIZE,), generator=generator)
        grads[step * BLOCK :][:BLOCK] = 0
        for shard, stepper in zip(shards, steppers):
            shard.grads.copy_(grads)
            shard.state["step"].fill_(step)
            stepper(shard, clip)
            assert not shard.grads.any()
        for expected, got in zip(*map(stored, shards)):
            assert torch.equal(expected, got)
    unchanged = [torch.equal(*pair) for pair in zip(stored(shards[1]), stored(make_shard()))]
    assert all(unchanged) if not norm < 50 else not any(unchanged[:3])
