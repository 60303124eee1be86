"""What a run reports: console lines, history.jsonl, settings.json, wandb and TensorBoard. See docs/output.md."""

import datetime
import json
import math
import os
import shlex
import statistics
import sys
import time
from collections import namedtuple
from dataclasses import asdict

from runtime.cluster.ranks import RANK, all_exit_on, all_gather_scalars, exit_together, print0, show_progress
from runtime.errors import UserError
from runtime.files import format_bytes, format_time, write_atomic
from runtime.hardware import git_commit, machine_record, peak_flops, peak_memory
from runtime.monitor.health import StragglerDetector
from runtime.monitor.history import append_history, read_history, series, trim_history
from runtime.monitor.wandb_settings import check_wandb_settings
from runtime.output import printable

Logger = namedtuple("Logger", ("log", "close"))  # log(values, step)
LOGGER_FIXES = {"wandb": "pip install wandb, wandb login or WANDB_MODE=offline",
                "tensorboard": "pip install tensorboard"}


class RunLog:
    """Reports a run. Rank 0 prints and writes, but all ranks create one and call open_files() and step().

    settings: the run's, a dataclass. sources: what the weights came from. state: of the checkpoint that the run resumes
    from, else {}. datasets: with name, share and meta. flops_per_token: of forward and backward. memory_plan: estimated
    peak bytes per GPU, by use. process_start: time.monotonic() when the process started.

    Steps may differ in size, so all figures come from the sequences that were trained on: `batches`, the TrainBatches,
    has their number as `position`, and `waited_s`."""

    def __init__(self, settings, sources, state, device, datasets, flops_per_token, memory_plan, process_start):
        self.settings, self.settings_record = settings, asdict(settings) | {"sources": sources}
        self.device, self.datasets = device, datasets
        self.flops_per_token = flops_per_token
        self.memory_plan, self.process_start = memory_plan, process_start
        self.out_dir, self.writes = settings.out_dir, RANK == 0 and not settings.eval_only
        self.stragglers = StragglerDetector()
        self.loggers, self.wandb_id, self.paused, self.is_finite = {}, state.get("wandb_id"), True, True
        self.iter_num = self.first_iter = state.get("iter_num", 0)
        self.resumes = bool(state)
        self.second_step = None  # (time, position) at which it began
        exit_together(self.start_loggers() if self.writes else [])

    def start_loggers(self):
        """Start the loggers in the settings. Return [message] if one fails; a run that resumes continues without it."""
        for name in LOGGER_FIXES:
            try:
                if self.settings_record[f"{name}_log"]:
                    self.loggers[name] = getattr(self, f"start_{name}")()
            except Exception as error:  # not installed, not logged in, no network: each has its own exception
                why = " ".join(str(error).split()) or type(error).__name__
                problem = f"{name} failed to start ({why}): {LOGGER_FIXES[name]}, or set --{name}_log=False"
                if not self.resumes:
                    return [problem]
                print0(f"{problem}; continuing without it")
        return []

    def start_wandb(self):
        """Start a wandb run, or resume the checkpoint's. Nothing else imports wandb."""
        check_wandb_settings()
        import wandb

        name = self.settings.wandb_run_name or os.path.basename(os.path.abspath(self.out_dir))
        # What wandb has after the checkpoint can't be removed. If the user has discarded it, the
        # run that follows is another one
        goes_back = self.resumes and self.settings.overwrite
        if goes_back and self.wandb_id:
            print0(f"wandb: a new run, because overwrite=True discards what {self.wandb_id} has after step "
                   f"{self.iter_num}")
            self.wandb_id = None
        run = wandb.init(project=self.settings.wandb_project, name=name, config=self.settings_record, id=self.wandb_id,
                         resume="allow")
        # Not wandb's own steps, which only grow: it would drop what a resume repeats
        run.define_metric("train/iter")
        run.define_metric("*", step_metric="train/iter")
        if self.wandb_id:  # the checkpoint's, and it may be somebody else's
            print0(f"wandb: continuing the run {run.id} of project {self.settings.wandb_project}")
        self.wandb_id = run.id
        return Logger(lambda values, step: run.log(values), run.finish)

    def start_tensorboard(self):
        """Write TensorBoard's files to out_dir/tensorboard. A run that resumes hides earlier values after iter_num."""
        from torch.utils.tensorboard import SummaryWriter

        folder = os.path.join(self.out_dir, "tensorboard")
        if os.path.islink(folder):  # in a folder where others write, it may lead anywhere
            raise UserError(f"{folder} is a link: remove it")
        writer = SummaryWriter(folder,
                               purge_step=self.iter_num + 1 if self.iter_num else 0)

        def log(values, step):
            for name, value in values.items():
                writer.add_scalar(name, value, step)

        return Logger(log, writer.close)

    def open_files(self):
        """Drop the records after the checkpoint that this run resumes from, and write settings.json."""
        with all_exit_on(OSError, UserError):
            if self.writes:
                record = {"started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                          "command": shlex.join(sys.argv), "commit": git_commit(), "settings": self.settings_record,
                          "world_size": int(os.environ["WORLD_SIZE"]), **machine_record(self.device),
                          "memory_plan": self.memory_plan}
                trim_history(self.out_dir, self.iter_num if self.resumes else -1)
                write_atomic(os.path.join(self.out_dir, "settings.json"), json.dumps(record, indent=1))

    def restart_clock(self, iter_num, batches, paused=False):
        """Start the clock, or restart it after a pause, so that no step's time includes it."""
        if self.paused or paused:
            self.clock = time.monotonic()
            self.clock_iter = iter_num
            self.clock_position = batches.position
            self.waited_s = batches.waited_s
            self.paused = False

    def step(self, iter_num, loss, lr, step, batches, share, own_work_s):
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
        peak = peak_flops(self.device)
        record = {
            "iter": iter_num,
            "loss": sum(losses) / len(losses),
            "tokens": batches.position * self.settings.block_size,
            "ms": 1000 * seconds / steps,
            "lr": lr,
            "grad_norm": step.grad_norm,
            "tokens_per_s": tokens_per_s,
            "mfu": tokens_per_s * self.flops_per_token / (peak * len(losses)) if peak else None,
            "memory": peak_memory(self.device),
            "data_ms": 1000 * (batches.waited_s - self.waited_s) / steps,
        }
        if step.loss_scale:
            record["loss_scale"] = step.loss_scale
        if step.grad_shares:
            record["grad_shares"] = step.grad_shares
        if self.clock_iter == self.first_iter:
            record["first_step_s"] = time.monotonic() - self.process_start
        progress = self.progress(record, share, batches.position, sequences / steps)
        print0(f"{format_step(record)}, {progress}")
        show_progress(self.settings.max_iters, iter_num, f"loss {record['loss']:.4f}")
        self.record(record)
        self.warn(iter_num, self.stragglers.check(local_work))
        # After the second line, because capturing a CUDA graph may take more memory
        if self.device.type == "cuda" and self.clock_iter == self.first_iter + 1:
            planned = sum(self.memory_plan.values()) - self.memory_plan["CUDA and NCCL"]  # PyTorch's tensors
            print0(f"peak memory {record['memory'] / 1e9:.1f} GB (estimated: {planned / 1e9:.1f} GB)")
        self.restart_clock(iter_num, batches, paused=True)
        self.second_step = self.second_step or (self.clock, self.clock_position)

    def progress(self, record, share, position, per_step):
        """Return the share of the run that is done, and the time left at the speed since the first step, evaluations
        included. The first step is slow, so its line has the time since the start of the process instead.

        share: as for step(). position: the sequences so far. per_step: of each of the last steps.
        """
        percent = f"{100 * min(1, share):.1f}%"
        if self.second_step is None:
            return f"{percent}, {record['first_step_s']:.1f} s after the start"
        began, began_at = self.second_step
        seconds_per_sequence = (time.monotonic() - began) / (position - began_at)
        if self.settings.max_epochs is None:
            sequences_left = (self.settings.max_iters - record["iter"]) * per_step  # if the size stays
        else:
            sequences_left = position * max(0, 1 / share - 1)
        return f"{percent}, {format_time(seconds_per_sequence * sequences_left)} left"

    def evaluation(self, iter_num, losses, seconds):
        """Print and record an evaluation. Return the validation loss, of a mixture the weighted mean. losses: {"train"
        and "val": [(mean, standard error, bytes per target) per dataset]}."""
        shares = [dataset.share for dataset in self.datasets]
        record = {"iter": iter_num, **loss_record(losses, shares), "eval_s": seconds}
        record["perplexity"] = math.exp(min(record["val_loss"], 700))  # without overflow
        bits = f", {record['bits_per_byte']:.3f} bits per byte" if "bits_per_byte" in record else ""
        print0(f"step {iter_num}: {format_losses(record)}; perplexity {record['perplexity']:.2f}{bits}), "
               f"{seconds:.1f} s")
        if len(shares) > 1:
            record["datasets"] = {}
            for number, dataset in enumerate(self.datasets):
                values = {"share": dataset.share / sum(shares),
                         **loss_record({split: own[number : number + 1] for split, own in losses.items()}, [1])}
                record["datasets"][dataset.name] = values
                print0(f"  {dataset.name}: {format_losses(values)}), {100 * values['share']:g}% of the mixture")
        self.record(record)
        self.iter_num, self.paused, self.is_finite = iter_num, True, math.isfinite(record["val_loss"])
        return record["val_loss"]

    def sample(self, iter_num, text):
        """Print and record a sample from the current weights."""
        print0(f"sample at step {iter_num}: {printable(text)}")
        self.record({"iter": iter_num, "sample": text})
        self.paused = True

    def warn(self, iter_num, message):
        """Print and record a warning, if there is one."""
        if message:
            print0(f"step {iter_num}: {message}")
            self.record({"iter": iter_num, "warning": message})

    def saved(self, iter_num, tag, size, seconds, blocked_s):
        """Print and record a checkpoint of `size` bytes, for which training was blocked `blocked_s` seconds. Called by
        the thread that wrote it. The loggers get nothing, because wandb rejects a step from the past."""
        record = {"iter": iter_num, "saved": tag, "bytes": size, "save_s": seconds, "gb_per_s": size / seconds / 1e9,
                  "blocked_s": blocked_s}
        print0(f"saved {tag} in {seconds:.1f} s ({format_bytes(size)}, {record['gb_per_s']:.2f} GB/s), training was "
               f"blocked for {blocked_s:.2f} s")
        self.append(record)

    def not_saved(self):
        """Report why these weights are not saved, and how to continue."""
        self.is_finite = False
        print0("checkpoint not saved, because the loss is not finite: start again with a lower learning rate, and with "
               "--init_from=auto to resume from an earlier checkpoint")

    def close(self, finished, evals_since_best):
        """Print the total time, and the results of a run that has finished. Close the loggers.

        evals_since_best: None unless the run has stopped early because of them.
        """
        if not self.settings.eval_only:
            print0(f"total time {format_time(time.monotonic() - self.process_start)}")
        if finished and evals_since_best is not None:
            print0(f"stopped early at step {self.iter_num}: no better validation loss in {evals_since_best} "
                   "evaluations; to continue, increase --patience")
        elif not finished and not self.settings.eval_only and self.settings.keep_last and self.is_finite:
            print0("to continue from here, repeat the command with --init_from=resume")
        losses = series(read_history(self.out_dir), "val_loss") if finished and self.writes else []
        if losses := [(loss, iter_num) for iter_num, loss in losses if iter_num]:
            print0("best validation loss {:.4f} at step {}".format(*min(losses)))
        if losses and self.settings.keep_last:
            chat = " --chat" * any("template" in dataset.meta for dataset in self.datasets)
            print0(f"to sample from it: python sample.py --out_dir={shlex.quote(self.out_dir)} --tag=best{chat}")
        self.to_loggers("close")

    def record(self, record):
        """Add a record to history.jsonl, and its numbers to the loggers."""
        self.append(record)
        group = "eval" if "val_loss" in record else "train"
        names = {"iter": "train/iter", "memory": "gpu/memory_allocated"}
        values = {names.get(k, f"{group}/{k}"): value for k, value in record.items() if isinstance(value, int | float)}
        values |= {f"eval/val_loss/{name}": losses["val_loss"] for name, losses in record.get("datasets", {}).items()}
        if "memory" in record:
            values["gpu/memory_allocated"] /= 1e9  # the loggers show GB
        self.to_loggers("log", values, record["iter"])

    def append(self, record):
        """Add a record to history.jsonl. Training continues without it if the disk is full."""
        try:
            if self.writes:
                append_history(self.out_dir, record)
        except OSError as error:
            print0(f"history.jsonl could not be written: {error.strerror}")
        except UserError as error:  # somebody has put a link in its place
            print0(f"history.jsonl could not be written: {error}")

    def to_loggers(self, method, *args):
        """Call a method of each logger. One that fails is reported and dropped."""
        for name, logger in list(self.loggers.items()):
            try:
                getattr(logger, method)(*args)
            except Exception as error:  # of any kind
                print0(f"{name} failed; continuing without it: {type(error).__name__}: {error}")
                del self.loggers[name]


def format_step(r):
    """Return the console line of a step's record."""
    mfu = "n/a" if r["mfu"] is None else f"{100 * r['mfu']:.1f}%"
    grad_norm = "n/a" if r["grad_norm"] is None else f"{r['grad_norm']:.3f}"
    return (f"iter {r['iter']}: loss {r['loss']:.4f}, time {r['ms']:.2f}ms, lr {r['lr']:.2e}, grad norm {grad_norm}, "
            f"{r['tokens_per_s']:,.0f} tokens/s, mfu {mfu}, memory {r['memory'] / 1e9:.1f} GB"
            + (f", loss scale {r['loss_scale']:g}" if "loss_scale" in r else ""))


def loss_record(losses, shares):
    """Return the weighted mean losses and their standard errors, with the keys of history.jsonl, and if bytes are known
    the weighted validation loss in bits over the weighted bytes."""
    record = {}
    for split, estimates in losses.items():
        means, errors, sizes = zip(*estimates, strict=True)  # sizes: bytes per target
        record[f"{split}_loss"] = statistics.fmean(means, shares)
        record[f"{split}_loss_stderr"] = math.hypot(*(e * share for e, share in zip(errors, shares))) / sum(shares)
        if split == "val" and all(sizes):
            record["bits_per_byte"] = record["val_loss"] / math.log(2) / statistics.fmean(sizes, shares)
    return record


def format_losses(r):
    """Return the losses of a record for the console, without the closing parenthesis."""
    return (f"train loss {r['train_loss']:.4f}, val loss {r['val_loss']:.4f} "
            f"(standard errors {r['train_loss_stderr']:.4f}, {r['val_loss_stderr']:.4f}")
