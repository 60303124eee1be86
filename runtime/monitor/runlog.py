"""What a run reports: console lines, history.jsonl, settings.json, loggers. See docs/output.md."""

import datetime
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from runtime.cluster.ranks import (
    RANK,
    all_exit_on,
    all_gather_scalars,
    exit_together,
    print0,
    show_progress,
)
from runtime.errors import UserError
from runtime.files import format_bytes, format_time, write_atomic
from runtime.git import git_commit
from runtime.hardware import machine_record, peak_flops, peak_memory
from runtime.monitor.health import StragglerDetector
from runtime.monitor.history import append_history, read_history, series, trim_history
from runtime.monitor.lines import format_losses, format_peak, format_step, loss_record
from runtime.monitor.loggers import Loggers
from runtime.output import printable
from runtime.version import project_version

MAX_EXPONENT = 700  # of a perplexity, which would overflow


class RunLog:
    """Reports a run.

    Rank 0 prints and writes, but all ranks create one, and call start_loggers(), open_files() and
    step().

    settings: the run's, a dataclass. sources: what the weights came from. state: of the checkpoint
    that the run resumes from, else {}. datasets: with name, share and meta. flops_per_token: of
    forward and backward, {tokens per sequence: FLOPs}. ramp: the planned steps, a Ramp.
    memory_plan: estimated peak bytes per GPU, by use. process_start: time.monotonic() when the
    process started.

    Steps may differ in size, so all figures come from the sequences that were trained on:
    `batches`, the TrainBatches, has their number as `position`, and `trained_on` and `waited_s`.
    """

    def __init__(
        self,
        settings: Any,
        sources: Sequence[str],
        state: Mapping,
        device: torch.device,
        datasets: Sequence,
        flops_per_token: Mapping[int, int],
        ramp: Any,
        memory_plan: Mapping[str, float],
        process_start: float,
    ) -> None:
        self.settings = settings
        self.settings_record = asdict(settings) | {"sources": sources}
        self.out_dir = settings.out_dir
        self.writes = RANK == 0 and not settings.eval_only
        self.device = device
        self.datasets = datasets
        self.flops_per_token = flops_per_token
        self.ramp = ramp
        self.memory_plan = memory_plan
        self.process_start = process_start

        # Where the run is
        self.resumes = bool(state)
        self.first_iter = state.get("iter_num", 0)
        self.iter_num = self.first_iter
        self.is_finite = True
        self.second_step: tuple[float, float] | None = None  # (time, FLOPs) at which it began

        # The clock, which restart_clock() starts, and where the run was then
        self.paused = True
        self.clock = 0.0
        self.clock_iter = 0
        self.clock_position = 0
        self.clock_flops = 0.0
        self.waited_s = 0.0

        self.stragglers = StragglerDetector()
        self.loggers = Loggers(
            settings, self.settings_record, self.first_iter, self.resumes, state.get("wandb_id")
        )

    @property
    def wandb_id(self) -> str | None:
        """The id of the wandb run, which a resume continues."""
        return self.loggers.wandb_id

    def start_loggers(self) -> None:
        """Start wandb and TensorBoard, if set. If one fails, a new run exits on all ranks."""
        problems = self.loggers.start() if self.writes else []
        exit_together(problems)

    def open_files(self) -> None:
        """Drop the records after the checkpoint that is resumed from, and write settings.json."""
        with all_exit_on(OSError, UserError):
            if not self.writes:
                return
            now = datetime.datetime.now(datetime.UTC)

            # All that is needed to repeat the run, and to compare its speed
            record = {
                "started": now.isoformat(timespec="seconds"),
                "command": shlex.join(sys.argv),
                "version": project_version(),
                "commit": git_commit(),
                "settings": self.settings_record,
                "world_size": int(os.environ["WORLD_SIZE"]),
                **machine_record(self.device),
                "memory_plan": self.memory_plan,
            }

            # A resume repeats the steps after its checkpoint, so their records would be there twice
            last = self.iter_num if self.resumes else -1
            trim_history(self.out_dir, last)
            text = json.dumps(record, indent=1)
            write_atomic(os.path.join(self.out_dir, "settings.json"), text)

    def restart_clock(self, iter_num: int, batches: Any, paused: bool = False) -> None:
        """Start the clock, or restart it after a pause, so that no step's time includes it."""
        if self.paused or paused:
            self.clock = time.monotonic()
            self.clock_iter = iter_num
            self.clock_position = batches.position
            self.clock_flops = self.flops_of(batches.trained_on)
            self.waited_s = batches.waited_s
            self.paused = False

    def flops_of(self, sequences: Mapping[int, int]) -> float:
        """Return the FLOPs of training on {tokens per sequence: block_size tokens so often}."""
        total = 0.0
        for length, number in sequences.items():
            total += number * self.settings.block_size * self.flops_per_token[length]
        return total

    def step(
        self,
        iter_num: int,
        loss: torch.Tensor,
        lr: float,
        step: Any,
        batches: Any,
        share: float,
        own_work_s: float,
    ) -> None:
        """Print and record an optimizer step, and report a straggler.

        loss: this rank's, a 0-dimensional tensor. step: a StepResult. share: of the run that is
        done, 0 to 1. own_work_s: seconds that this rank worked without waiting for others.
        """
        # The gather waits until the step has ended on the GPU, so read the clock after it
        losses, local_work = zip(*all_gather_scalars(loss, own_work_s), strict=True)
        seconds = time.monotonic() - self.clock

        # Since the last line there may have been several steps, of different sizes
        steps = iter_num - self.clock_iter
        sequences = batches.position - self.clock_position
        tokens_per_s = sequences * self.settings.block_size / seconds

        # The model's FLOPs over those that the GPUs could make
        peak = peak_flops(self.device)
        mfu = None
        if peak:
            flops = self.flops_of(batches.trained_on) - self.clock_flops
            mfu = flops / seconds / (peak * len(losses))

        # The record for history.jsonl and the loggers, and the line
        record = {
            "iter": iter_num,
            "loss": sum(losses) / len(losses),
            "tokens": batches.position * self.settings.block_size,
            "ms": 1000 * seconds / steps,
            "lr": lr,
            "grad_norm": step.grad_norm,
            "tokens_per_s": tokens_per_s,
            "mfu": mfu,
            "memory": peak_memory(self.device),
            "data_ms": 1000 * (batches.waited_s - self.waited_s) / steps,
        }
        if step.loss_scale:
            record["loss_scale"] = step.loss_scale
        if self.clock_iter == self.first_iter:
            record["first_step_s"] = time.monotonic() - self.process_start
        progress = self.progress(record, share, batches, sequences / steps)
        print0(f"{format_step(record)}, {progress}")
        show_progress(self.settings.max_iters, iter_num, f"loss {record['loss']:.4f}")
        self.record(record)
        self.warn(iter_num, self.stragglers.check(local_work))
        # After the second line, because capturing a CUDA graph may take more memory
        if self.device.type == "cuda" and self.clock_iter == self.first_iter + 1:
            # Of PyTorch's tensors
            planned = sum(self.memory_plan.values()) - self.memory_plan["CUDA and NCCL"]
            print0(format_peak(record["memory"], planned, iter_num, self.ramp.whole_from))
        self.restart_clock(iter_num, batches, paused=True)
        self.second_step = self.second_step or (self.clock, self.clock_flops)

    def progress(self, record: Mapping, share: float, batches: Any, per_step: float) -> str:
        """Return the share of the run that is done, and the time left, as text.

        It is that at the speed since the first step, evaluations included. The first step is slow,
        so its line has the time since the start of the process instead.

        share, batches: as for step(). per_step: the sequences of each of the last steps.
        """
        percent = f"{100 * min(1, share):.1f}%"
        if self.second_step is None:
            return f"{percent}, {record['first_step_s']:.1f} s after the start"

        # Speed in FLOPs, because the size of a step and the length of its sequences may change
        began, began_at = self.second_step
        flops = self.flops_of(batches.trained_on) - began_at
        seconds_per_flop = (time.monotonic() - began) / flops
        if self.settings.max_epochs is None and self.settings.batch_ramp is None:
            steps_left = self.settings.max_iters - record["iter"]
            sequences_left = steps_left * per_step  # if the size stays
        else:
            sequences_left = batches.position * max(0, 1 / share - 1)

        # The FLOPs of a sequence that is left, by the plan: long ones take more
        planned = self.ramp.sequences_left(record["iter"])
        if not planned:  # a run of other steps than planned, at full length
            planned = {self.settings.block_size: 1}
        flops_of_sequence = self.flops_of(planned) / sum(planned.values())
        seconds_left = seconds_per_flop * flops_of_sequence * sequences_left
        return f"{percent}, {format_time(seconds_left)} left"

    def evaluation(self, iter_num: int, losses: Mapping[str, Sequence], seconds: float) -> float:
        """Print and record an evaluation. Return the validation loss, of a mixture the weighted
        mean.

        losses: {"train" and "val": a lines.Estimate per dataset}.
        """
        # The record for history.jsonl and the loggers
        shares = [dataset.share for dataset in self.datasets]
        record = {"iter": iter_num, **loss_record(losses, shares), "eval_s": seconds}
        record["perplexity"] = math.exp(min(record["val_loss"], MAX_EXPONENT))

        # The line
        measures = f"perplexity {record['perplexity']:.2f}"
        if "bits_per_byte" in record:
            measures += f", {record['bits_per_byte']:.3f} bits per byte"
        print0(f"step {iter_num}: {format_losses(record)}; {measures}), {seconds:.1f} s")
        if len(shares) > 1:
            record["datasets"] = self.losses_of_datasets(losses, sum(shares))

        self.record(record)
        self.iter_num = iter_num
        self.is_finite = math.isfinite(record["val_loss"])
        self.paused = True
        return record["val_loss"]

    def losses_of_datasets(self, losses: Mapping[str, Sequence], all_shares: float) -> dict:
        """Print the losses of each dataset of a mixture. Return {name: its record}."""
        records = {}
        for number, dataset in enumerate(self.datasets):
            own = {split: [estimates[number]] for split, estimates in losses.items()}
            share = dataset.share / all_shares
            values = {"share": share, **loss_record(own, [1])}
            records[dataset.name] = values
            print0(f"  {dataset.name}: {format_losses(values)}), {100 * share:g}% of the mixture")
        return records

    def sample(self, iter_num: int, text: str) -> None:
        """Print and record a sample from the current weights."""
        print0(f"sample at step {iter_num}: {printable(text)}")
        self.record({"iter": iter_num, "sample": text})
        self.paused = True

    def warn(self, iter_num: int, message: str | None) -> None:
        """Print and record a warning, if there is one."""
        if message:
            print0(f"step {iter_num}: {message}")
            self.record({"iter": iter_num, "warning": message})

    def saved(self, iter_num: int, tag: str, size: int, seconds: float, blocked_s: float) -> None:
        """Print and record a checkpoint of `size` bytes, which blocked training for `blocked_s`.

        The thread that wrote it calls this. The loggers get nothing, because wandb rejects a step
        from the past.
        """
        # Bytes to gigabytes per second, as disks are rated
        gb_per_s = size / seconds / 1e9
        record = {
            "iter": iter_num,
            "saved": tag,
            "bytes": size,
            "save_s": seconds,
            "gb_per_s": gb_per_s,
            "blocked_s": blocked_s,
        }
        print0(
            f"saved {tag} in {seconds:.1f} s ({format_bytes(size)}, {gb_per_s:.2f} GB/s), training "
            f"was blocked for {blocked_s:.2f} s"
        )
        self.append(record)

    def not_saved(self) -> None:
        """Report why these weights are not saved, and how to continue."""
        self.is_finite = False
        print0(
            "checkpoint not saved, because the loss is not finite: start again with a lower "
            "learning rate, and with --init_from=auto to resume from an earlier checkpoint"
        )

    def close(self, finished: bool, evals_since_best: int | None) -> None:
        """Print the total time, and the results of a run that has finished. Close the loggers.

        evals_since_best: None unless the run has stopped early because of them.
        """
        s = self.settings
        if not s.eval_only:
            print0(f"total time {format_time(time.monotonic() - self.process_start)}")

        # Why the run has ended here, and how it goes on
        if finished and evals_since_best is not None:
            print0(
                f"stopped early at step {self.iter_num}: no better validation loss in "
                f"{evals_since_best} evaluations; to continue, increase --patience"
            )
        elif not finished and not s.eval_only and s.keep_last and self.is_finite:
            print0("to continue from here, repeat the command with --init_from=resume")
        if finished and self.writes:
            self.print_best()
        self.loggers.close()

    def print_best(self) -> None:
        """Print the best validation loss after the start, and how to sample from its checkpoint."""
        # The evaluation at step 0 is of the weights at the start, not of the training
        losses = []
        for iter_num, loss in series(read_history(self.out_dir), "val_loss"):
            if iter_num:
                losses.append((loss, iter_num))
        if not losses:
            return
        best_loss, best_iter = min(losses)
        print0(f"best validation loss {best_loss:.4f} at step {best_iter}")
        if self.settings.keep_last:
            command = f"python sample.py --out_dir={shlex.quote(self.out_dir)} --tag=best"
            if any("template" in dataset.meta for dataset in self.datasets):
                command += " --chat"
            print0(f"to sample from it: {command}")

    def record(self, record: Mapping) -> None:
        """Add a record to history.jsonl, and its numbers to the loggers."""
        self.append(record)
        self.loggers.log(values_for_loggers(record), record["iter"])

    def append(self, record: Mapping) -> None:
        """Add a record to history.jsonl. Training continues without it if the disk is full."""
        try:
            if self.writes:
                append_history(self.out_dir, record)
        except OSError as error:
            print0(f"history.jsonl could not be written: {error.strerror}")
        except UserError as error:  # somebody has put a link in its place
            print0(f"history.jsonl could not be written: {error}")


def values_for_loggers(record: Mapping) -> dict[str, float]:
    """Return the numbers of a record, under the names that the loggers show."""
    group = "eval" if "val_loss" in record else "train"
    values = {"train/iter": record["iter"]}

    # Units that read well on a dashboard
    if "memory" in record:
        values["gpu/memory_allocated"] = record["memory"] / 1e9  # GB
    for key, value in record.items():
        if key not in ("iter", "memory") and isinstance(value, int | float):
            values[f"{group}/{key}"] = value

    # A mixture has a curve for each of its datasets
    for name, losses in record.get("datasets", {}).items():
        values[f"eval/val_loss/{name}"] = losses["val_loss"]
    return values
