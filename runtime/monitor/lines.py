"""The console lines of steps and evaluations, and the losses in their records. See
docs/output.md."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Estimate(NamedTuple):
    """The loss of one dataset in an evaluation."""

    mean: float
    error: float  # standard error
    bytes_per_target: float | None


def format_step(record: Mapping) -> str:
    """Return the console line of a step's record."""
    mfu = "n/a"
    if record["mfu"] is not None:
        mfu = f"{100 * record['mfu']:.1f}%"
    grad_norm = "n/a"
    if record["grad_norm"] is not None:
        grad_norm = f"{record['grad_norm']:.3f}"
    parts = [
        f"iter {record['iter']}: loss {record['loss']:.4f}",
        f"time {record['ms']:.2f}ms",
        f"lr {record['lr']:.2e}",
        f"grad norm {grad_norm}",
        f"{record['tokens_per_s']:,.0f} tokens/s",
        f"mfu {mfu}",
        f"memory {record['memory'] / 1e9:.1f} GB",
    ]
    if "loss_scale" in record:
        parts.append(f"loss scale {record['loss_scale']:g}")
    return ", ".join(parts)


def loss_record(
    losses: Mapping[str, Sequence[tuple[float, float, float | None]]], shares: Sequence[float]
) -> dict[str, Any]:
    """Return the losses of an evaluation, with the keys of history.jsonl.

    They are the means of the datasets, weighted by their shares, and the standard errors. If the
    bytes of all targets are known, there is also the validation loss in bits per byte.

    losses: {"train" and "val": an Estimate per dataset}.
    """
    record = {}
    total = sum(shares)
    for split, of_datasets in losses.items():
        estimates = [Estimate(*estimate) for estimate in of_datasets]
        mean = statistics.fmean([estimate.mean for estimate in estimates], shares)
        # Independent errors add up as squares
        parts = [estimate.error * share for estimate, share in zip(estimates, shares, strict=True)]
        record[f"{split}_loss"] = mean
        record[f"{split}_loss_stderr"] = math.hypot(*parts) / total

        sizes = [estimate.bytes_per_target for estimate in estimates if estimate.bytes_per_target]
        if split == "val" and len(sizes) == len(estimates):
            bits_per_target = mean / math.log(2)
            record["bits_per_byte"] = bits_per_target / statistics.fmean(sizes, shares)
    return record


def format_peak(measured: float, planned: float, iter_num: int, whole_from: int) -> str:
    """Return the peak memory for the console.

    measured: bytes so far, after iter_num steps. planned: bytes with micro-batches of batch_size,
    which begin after whole_from steps.
    """
    since = ""
    if iter_num <= whole_from:  # a batch ramp has smaller ones so far
        since = f" from step {whole_from:,} on, with micro-batches of batch_size"
    return f"peak memory {measured / 1e9:.1f} GB (estimated: {planned / 1e9:.1f} GB{since})"


def format_losses(record: Mapping) -> str:
    """Return the losses of a record for the console, without the closing parenthesis."""
    train = f"train loss {record['train_loss']:.4f}"
    val = f"val loss {record['val_loss']:.4f}"
    errors = f"{record['train_loss_stderr']:.4f}, {record['val_loss_stderr']:.4f}"
    return f"{train}, {val} (standard errors {errors}"
