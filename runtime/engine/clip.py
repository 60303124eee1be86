"""What every stepper needs to know about a step's gradients."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Clip:
    """How to scale the gradients of a step, and whether to make it.

    norm: of all ranks' gradients, without the loss scale, a scalar on their device. inverse_scale:
    of the loss scale and the loss_factor that the gradients have in them. max_norm: to clip to;
    infinite: don't clip. skip_above: skip the step unless the norm is below it; a value of
    in_float32().
    """

    norm: Tensor
    inverse_scale: float
    max_norm: float
    skip_above: float

    def factor(self) -> Tensor:
        """Return what to multiply the gradients by, a scalar on the device."""
        return (self.max_norm / (self.norm + 1e-6)).clamp(max=1) * self.inverse_scale

    def applies(self) -> Tensor:
        """Return whether the step is made, a scalar on the device."""
        return self.norm < self.skip_above


def in_float32(limit: float) -> float:
    """Return the float32 nearest to a limit, which is what a norm on the device is compared with. A
    comparison in Python's float64 could say otherwise."""
    return torch.tensor(limit, dtype=torch.float32).item()
