"""What a run reports: lines on the console, history.jsonl, settings.json, wandb and TensorBoard."""

import datetime
import importlib.metadata
import json
import math
import operator
import os
import platform
import statistics
import subprocess
import sys
import time

import torch

from runtime.cluster.ranks import RANK, all_gather_scalars, exit_together, print0, show_progress
from runtime.cluster.shutdown import EXIT_REASONS
from runtime.files import format_bytes, write_atomic
from runtime.hardware import peak_flops, peak_memory
from runtime.monitor.history import append_history, trim_history

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
MAX_DIFF_CHARS = 200_000  # of the uncommitted changes, in settings.json


class RunLog:
    """Reports a run: rank 0 prints and writes. All ranks make one, and call open_files() and step(). A logger that does
    not start, or a file that cannot be written, ends them all with exit code 2.

    settings: a dict. state: of the tag that the run resumes from, else {}. datasets: with name and share.
    memory: estimated bytes per GPU at the peak.
    """

    def __init__(self, settings, state, device, datasets, tokens_per_iter, memory):
        self.settings, self.device, self.datasets = settings, device, datasets
        self.tokens_per_iter, self.memory = tokens_per_iter, memory
        self.out_dir, self.writes = settings["out_dir"], RANK == 0 and not settings["eval_only"]
        self.loggers, self.wandb_id = {}, state.get("wandb_id")
        self.iter_num, self.resumes, self.data_wait, self.paused = state.get("iter_num", 0), bool(state), 0.0, False
        exit_together(self.start_loggers() if RANK == 0 else [])

    def open_files(self, record):
        """Drop from history.jsonl what an earlier run recorded after the tag that this one resumes from, and write
        settings.json: how this run is made, and `record`."""
        problems = []
        if self.writes:
            record = {"started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                      "command": " ".join(sys.argv), "commit": git_commit(),
                      "git_diff": (git("diff", "HEAD") or "")[:MAX_DIFF_CHARS], "settings": self.settings,
                      "world_size": int(os.environ["WORLD_SIZE"]), **machine_record(self.device), **record}
            try:
                trim_history(self.out_dir, self.iter_num if self.resumes else -1)
                write_atomic(os.path.join(self.out_dir, "settings.json"), json.dumps(record, indent=1))
            except OSError as error:
                problems = [f"{error.filename or self.out_dir} cannot be written ({error.strerror}): fix that, or "
                            "choose another --out_dir=DIR"]
        exit_together(problems)

    def start_loggers(self):
        """Start those that the settings ask for. Returns [a sentence] on the first that fails; a run that resumes
        continues without it."""
        for logger in (WandbLogger, TensorBoardLogger):
            if not self.settings[logger.setting] or (self.settings["eval_only"] and logger is TensorBoardLogger):
                continue
            try:
                self.loggers[logger.name] = logger(self.settings, self.wandb_id, self.iter_num)
            except Exception as error:  # not installed, not logged in, no network: each has an exception of its own
                fix = f"python -m pip install {logger.name.lower()}" if isinstance(error, ImportError) else logger.fix
                why = " ".join(str(error).split()) or type(error).__name__
                problem = f"{logger.name} does not start ({why}): {fix}, or --{logger.setting}=False"
                if not self.resumes:
                    return [problem]
                print0(f"{problem}; the run continues without it")
        if "wandb" in self.loggers:
            self.wandb_id = self.loggers["wandb"].run.id
        return []

    def evaluation(self, iter_num, losses, sequences_seen, seconds):
        """Print and record an evaluation; returns the validation loss, of a mixture by its shares. losses: {"train" and
        "val": [(mean, standard error) of each data set]}; sequences_seen: {name of a data set: sequences so far}."""
        shares = [one.share for one in self.datasets]
        record = {"iter": iter_num, **loss_record(losses, shares), "eval_s": seconds}
        record["perplexity"] = perplexity(record["val_loss"])
        print0(f"step {iter_num}: {format_losses(record)}; perplexity {record['perplexity']:.2f}), {seconds:.1f} s")
        if len(shares) > 1:
            record["datasets"], total = {}, sum(sequences_seen.values())
            for number, one in enumerate(self.datasets):
                found = {"share": one.share / sum(shares), "sequences": sequences_seen[one.name],
                         **loss_record({split: each[number : number + 1] for split, each in losses.items()}, [1])}
                record["datasets"][one.name] = found
                so_far = f"{found['sequences']:,} of {total:,} sequences so far, " if total else ""
                print0(f"  {one.name}: {format_losses(found)}); {so_far}{100 * found['share']:g}% of the mixture")
        self.record(record)
        self.iter_num, self.paused = iter_num, True
        return record["val_loss"]

    def start(self, process_start, iter_num, max_iters):
        """Start the clock and, on a terminal, the progress bar. process_start: time.time() when the process began."""
        self.process_start, self.first_iter = process_start, iter_num
        if iter_num < max_iters and not self.settings["eval_only"]:
            self.update_bar = show_progress(max_iters, iter_num)
        self.exclude_pauses(iter_num, paused=True)

    def exclude_pauses(self, iter_num, paused=False):
        """Restart the clock after a pause, no part of the next step's time: an evaluation, a sample, `paused`."""
        if self.paused or paused:
            self.clock, self.clock_iter, self.data_wait, self.paused = time.time(), iter_num, 0.0, False

    def time_data(self, batches):
        """The next (x, y) of an iterator; the time that this takes counts as waiting for data."""
        start = time.perf_counter()
        batch = next(batches)
        self.data_wait += time.perf_counter() - start
        return batch

    def step(self, iter_num, loss, lr, flops_per_iter, health):
        """Print and record an optimizer step, and a straggler. loss: of this rank, 0-dimensional; lr: used in this
        step; flops_per_iter: of all ranks; health: a StepHealth after its check."""
        steps = iter_num - self.clock_iter
        data_wait = self.data_wait / steps
        # Waits for the step to end, so that the clock is right
        per_rank = all_gather_scalars(loss, health.stragglers.seconds(), data_wait, device=self.device)
        seconds = (time.time() - self.clock) / steps
        mean_loss, peak = sum(loss for loss, *_ in per_rank) / len(per_rank), peak_flops(self.device)
        record = {"iter": iter_num, "loss": mean_loss, "ms": 1000 * seconds, "lr": lr, "grad_norm": health.grad_norm,
                  "tokens_per_s": self.tokens_per_iter / seconds,
                  "mfu": flops_per_iter / seconds / (peak * len(per_rank)) if peak else None,
                  "memory": peak_memory(self.device), "data_ms": 1000 * data_wait}
        if scale := health.loss_scale():
            record["loss_scale"] = scale
        if self.clock_iter == self.first_iter:
            record["first_step_s"] = time.time() - self.process_start
        print0(format_step(record))
        self.update_bar(iter_num, f"loss {mean_loss:.4f}")
        self.record(record)
        self.warn(iter_num, health.stragglers.check([local for _, *local in per_rank], seconds))
        if "first_step_s" in record:
            print0(f"first step {record['first_step_s']:.1f} s after the start")
        # also after the second step or line, as it may capture a CUDA graph, which takes more
        if self.device.type == "cuda" and self.clock_iter - self.first_iter < 2 * self.settings["log_interval"]:
            print0(f"peak memory {record['memory'] / 1e9:.1f} GB, {self.memory / 1e9:.1f} GB estimated")
        self.exclude_pauses(iter_num, paused=True)

    def saved(self, iter_num, tag, size, seconds, blocked_s):
        """Print and record a checkpoint of `size` bytes; blocked_s: how long training waited for it. The thread that
        wrote it calls this. The loggers get nothing: wandb takes no step from the past."""
        record = {"iter": iter_num, "saved": tag, "bytes": size, "save_s": seconds, "gb_per_s": size / seconds / 1e9,
                  "blocked_s": blocked_s}
        print0(f"saved {tag} in {seconds:.1f} s: {format_bytes(size)}, {record['gb_per_s']:.2f} GB/s; training waited "
               f"{blocked_s:.2f} s")
        self.append(record)

    def sample(self, iter_num, text):
        """Print and record a text from the current weights."""
        print0(f"sample of iteration {iter_num}: {text}")
        self.record({"iter": iter_num, "sample": text})
        self.paused = True

    def warn(self, iter_num, sentence):
        """Print and record a warning; None is no warning."""
        if sentence:
            print0(f"iteration {iter_num}: {sentence}")
            self.record({"iter": iter_num, "warning": sentence})

    def not_saved(self):
        """Say why there is no tag of these weights, and how to continue without them."""
        print0("no tag is saved of weights whose loss is not finite; earlier ones stay. To resume from the best: "
               "--init_from=resume --resume_tag=best --overwrite=True, with a lower learning_rate")

    def leaving(self, exit_code, iter_num, health):
        """Say why the run ends before its last iteration."""
        print0(f"asked to leave ({EXIT_REASONS[exit_code]}) after iteration {iter_num}" if exit_code != 3 else
               f"{health.skipped_in_a_row} steps in a row were skipped: look at the batches above, and take a lower "
               "learning_rate")

    def close(self, early_stop=0):
        """End the loggers. early_stop: evaluations without a better loss that ended the run."""
        if early_stop:
            print0(f"no better validation loss in {early_stop} evaluations: stopped early at iteration "
                   f"{self.iter_num}; to continue, raise --patience")
        self.to_loggers("close")

    def record(self, record):
        """Add a record to history.jsonl, and its numbers to the loggers."""
        self.append(record)
        group = "eval" if "val_loss" in record else "train"
        names = {"iter": "train/iter", "memory": "gpu/memory_allocated"}
        values = {names.get(k, f"{group}/{k}"): value for k, value in record.items() if isinstance(value, int | float)}
        values |= {f"eval/val_loss/{name}": one["val_loss"] for name, one in record.get("datasets", {}).items()}
        self.to_loggers("log", values, record["iter"])

    def append(self, record):
        """Add a record to history.jsonl."""
        try:
            if self.writes:
                append_history(self.out_dir, record)
        except OSError as error:  # training is worth more than its history
            print0(f"history.jsonl could not be written: {error.strerror}")

    def to_loggers(self, method, *args):
        """Call a method of each logger. One that fails is reported and left out."""
        for name, logger in list(self.loggers.items()):
            try:
                getattr(logger, method)(*args)
            except Exception as error:  # theirs, of every kind
                print0(f"{name} fails and is left out from here on: {type(error).__name__}: {error}")
                del self.loggers[name]


class WandbLogger:
    """A run at wandb, resumed where run_id is not None. Nothing else imports wandb."""

    name, setting, fix = "wandb", "wandb_log", "wandb login, WANDB_MODE=offline"

    def __init__(self, settings, run_id, iter_num):
        import wandb

        self.run = wandb.init(project=settings["wandb_project"], name=settings["wandb_run_name"], config=settings,
                              id=run_id, resume="allow")
        self.log, self.close = self.run.log, self.run.finish


class TensorBoardLogger:
    """TensorBoard's files in out_dir/tensorboard. A run that resumes hides what they show after iter_num."""

    name, setting, fix = "TensorBoard", "tensorboard_log", "fix that"

    def __init__(self, settings, run_id, iter_num):
        from torch.utils.tensorboard import SummaryWriter

        folder = os.path.join(settings["out_dir"], "tensorboard")
        self.writer = SummaryWriter(folder, purge_step=iter_num + 1 if iter_num else 0)
        self.close = self.writer.close

    def log(self, values, step):
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)


def format_step(r):
    """One step's record as the line on the console."""
    mfu = "n/a" if r["mfu"] is None else f"{100 * r['mfu']:.1f}%"
    grad_norm = "n/a" if r["grad_norm"] is None else f"{r['grad_norm']:.3f}"
    return (f"iter {r['iter']}: loss {r['loss']:.4f}, time {r['ms']:.2f}ms, lr {r['lr']:.2e}, grad norm {grad_norm}, "
            f"{r['tokens_per_s']:,.0f} tokens/s, mfu {mfu}, memory {r['memory'] / 1e9:.1f} GB"
            + (f", loss scale {r['loss_scale']:g}" if "loss_scale" in r else ""))


def perplexity(loss):
    """exp(loss), or infinity for a loss of 50 or more."""
    return math.inf if loss >= 50 else math.exp(loss)


def loss_record(losses, shares):
    """The losses and standard errors of a whole mixture, as history.jsonl has them; `losses` as evaluation() takes."""
    record = {}
    for split, found in losses.items():
        means, errors = zip(*found, strict=True)
        record[f"{split}_loss"] = statistics.fmean(means, shares)
        record[f"{split}_loss_stderr"] = math.hypot(*map(operator.mul, errors, shares)) / sum(shares)
    return record


def format_losses(r):
    """A record's losses for the console; the caller closes the parenthesis."""
    return (f"train loss {r['train_loss']:.4f}, val loss {r['val_loss']:.4f} "
            f"(standard errors {r['train_loss_stderr']:.4f}, {r['val_loss_stderr']:.4f}")


def git(*args):
    """What a git command prints about the project; None outside git."""
    try:
        return subprocess.run(["git", "-C", ROOT, *args], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError, UnicodeDecodeError):
        return None


def git_commit():
    """The project's commit, with '+' where files differ from it; None outside git."""
    return git("describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+")


def machine_record(device):
    """What measurements depend on: the hardware and the versions."""
    cuda = torch.device(device).type == "cuda"
    return {
        "hardware": torch.cuda.get_device_name(device) if cuda else f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "versions": {"python": platform.python_version(), "cuda": torch.version.cuda,
                     **{name: importlib.metadata.version(name) for name in ("torch", "deepspeed", "numpy")}}}
