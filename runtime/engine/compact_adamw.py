"""AdamW on compact state: clipping, the update and the formats in one kernel, or by PyTorch.

Both make the same operations in the same order on each element, so what they store is equal to the
last bit.
"""

from typing import NamedTuple

from torch import Tensor

from runtime.engine.clip import Clip
from runtime.engine.compact import CHUNK, CompactState, noise_of, other_noise, seed_of
from runtime.engine.shard import Shard


class Rates(NamedTuple):
    """What a step multiplies by, float32 scalars on the device.

    clip: of the gradients. size: the learning rate with the first moment's bias correction. root:
    the square root of the second moment's.
    """

    clip: Tensor
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
    weight = compact.read("weight", start, end)
    m = compact.read("exp_avg", start, end)
    v = compact.read("exp_avg_sq", start, end)

    # As adamw.py, without operations that a device may fuse
    g = grads * rates.clip
    m = m + (g - m) * (1 - beta1)
    v = v * beta2 + (g * g) * (1 - beta2)
    weight = weight * (1 - options["lr"] * options["weight_decay"])
    weight = weight - (rates.size * m) / (v.sqrt() / rates.root + options["eps"])

    noise = noise_of(seed, start, grads.numel())
    compact.write("weight", start, weight)
    compact.write("exp_avg", start, m, noise)
    compact.write("exp_avg_sq", start, v, other_noise(noise))
