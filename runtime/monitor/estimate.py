"""The mean loss of a dataset over the windows of an evaluation, and its standard error."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runtime.cluster.ranks import all_reduce_sum
from runtime.monitor.lines import Estimate


class Sums(NamedTuple):
    """Sums over windows, or the values of each window. Of a window, counts is the fraction of its
    targets that count, loss the sum of their losses over the number of all its targets."""

    windows: Any  # with targets that count
    counts: Any
    loss: Any
    counts_squared: Any
    loss_squared: Any
    counts_times_loss: Any
    n_bytes: Any  # of a window's targets, over their number


class LossSums:
    """Adds up the windows of an evaluation, on the device. Each rank has its own windows."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(len(Sums._fields), dtype=torch.float64, device=device)

    def add(self, losses: Tensor, targets: Tensor, bytes_of_targets: Tensor) -> None:
        """Add a batch of windows.

        losses, targets, bytes_of_targets: (B, T). A target of -1 doesn't count. None counts in a
        window that pads the last batch.
        """
        counts = (targets >= 0).double().mean(dim=1)
        # Where no target counts, an auxiliary loss may not be 0
        loss = losses.masked_fill(targets < 0, 0).double().mean(dim=1)
        of_windows = Sums(
            windows=counts > 0,
            counts=counts,
            loss=loss,
            counts_squared=counts**2,
            loss_squared=loss**2,
            counts_times_loss=counts * loss,
            n_bytes=bytes_of_targets.double().mean(dim=1),
        )
        self.sums += torch.stack(of_windows).sum(dim=1)

    def estimate(self) -> Estimate:
        """Return the mean over the targets of all ranks' windows. All ranks call this.

        The mean is a ratio of sums. Its standard error comes from the residuals of the windows,
        loss - mean * counts.
        """
        total = Sums(*all_reduce_sum(*self.sums))
        mean = total.loss / total.counts
        squares = (
            total.loss_squared - 2 * mean * total.counts_times_loss + mean**2 * total.counts_squared
        )
        if squares < 0:  # by rounding. max() would make 0 of NaN, too
            squares = 0.0
        variance = squares * total.windows / max(1, total.windows - 1)
        return Estimate(
            mean=mean,
            error=math.sqrt(variance) / total.counts,
            bytes_per_target=total.n_bytes / total.counts,
        )
