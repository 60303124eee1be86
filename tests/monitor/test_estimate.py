"""The mean loss of an evaluation and its standard error, from windows with different numbers of targets."""

import math

import pytest
import torch

from runtime.monitor.estimate import LossSums

WINDOWS, T = 6, 8


@pytest.fixture
def windows():
    """(losses, targets, bytes of the targets): (6, 8) each. In the last window no target counts, as in padding."""
    generator = torch.Generator().manual_seed(0)
    losses = 4 * torch.rand(WINDOWS, T, generator=generator)
    targets = torch.randint(0, 30, (WINDOWS, T), generator=generator)
    targets[:3, ::2] = -1
    targets[-1] = -1
    bytes_of_targets = torch.randint(1, 9, (WINDOWS, T), generator=generator)
    bytes_of_targets[targets < 0] = 0
    return losses, targets, bytes_of_targets


@pytest.mark.parametrize("batch", [1, 2, 6])
def test_an_estimate_is_that_of_plain_sums(process_group, windows, batch):
    """A ratio of sums: its error comes from each window's loss minus what its number of targets explains."""
    losses, targets, bytes_of_targets = windows
    sums = LossSums(torch.device("cpu"))
    for parts in zip(losses.split(batch), targets.split(batch), bytes_of_targets.split(batch), strict=True):
        sums.add(*parts)
    found = sums.estimate()

    counted = [targets[i] >= 0 for i in range(WINDOWS - 1)]  # the last one is padding
    numbers = [int(of_window.sum()) for of_window in counted]
    totals = [losses[i][of_window].double().sum().item() for i, of_window in enumerate(counted)]
    mean = sum(totals) / sum(numbers)
    residuals = [total - mean * number for total, number in zip(totals, numbers, strict=True)]
    variance = sum(r**2 for r in residuals) * len(residuals) / (len(residuals) - 1)
    assert numbers == [4, 4, 4, 8, 8] and found.mean == pytest.approx(mean, rel=1e-12)
    assert found.error == pytest.approx(math.sqrt(variance) / sum(numbers), rel=1e-9)
    assert found.error > 0.1
    assert found.bytes_per_target == pytest.approx(bytes_of_targets.sum().item() / sum(numbers))


def test_a_loss_that_is_not_finite_has_no_error(process_group, windows):
    """Before, its standard error was 0, as if the loss were exact."""
    losses, targets, bytes_of_targets = windows
    losses[0, 1] = math.nan
    sums = LossSums(torch.device("cpu"))
    sums.add(losses, targets, bytes_of_targets)
    found = sums.estimate()
    assert math.isnan(found.mean)
    assert math.isnan(found.error)
