"""What a run reports: rates, the lines on the console, history.jsonl, wandb, TensorBoard, and how it was made."""

import datetime
import errno
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys

import torch

from runtime.cluster.ranks import print0
from runtime.files import write_atomic

DIFF = 200_000  # characters that are kept of what differs from the commit


def step_line(r):
    """One step's record as the line on the console."""
    mfu = "n/a" if r["mfu"] is None else f"{100 * r['mfu']:.1f}%"
    grad_norm = "n/a" if r["grad_norm"] is None else f"{r['grad_norm']:.3f}"
    return (
        f"iter {r['iter']}: loss {r['loss']:.4f}, time {r['ms']:.2f}ms, lr {r['lr']:.2e}, "
        f"grad norm {grad_norm}, {r['tokens_per_s']:,.0f} tokens/s, mfu {mfu}, "
        f"memory {r['memory'] / 2**30:.1f} GiB" + (f", loss scale {r['loss_scale']:g}" if "loss_scale" in r else "")
    )


def perplexity(loss):
    """exp(loss); of one that says nothing any more, infinity."""
    return math.inf if loss >= 50 else math.exp(loss)


def of_mixture(losses, shares):
    """(mean, standard error) of a whole mixture, from those of its data sets by their shares."""
    parts = [share / sum(shares) for share in shares]
    return (sum(part * mean for part, (mean, _) in zip(parts, losses, strict=True)),
            math.hypot(*(part * error for part, (_, error) in zip(parts, losses, strict=True))))


def each_set(sets, losses, counts):
    """{name: {...}} of each data set of a mixture: its share, the sequences so far, and its losses."""
    share = sum(one.share for one in sets)
    return {one.name: {"share": one.share / share, "sequences": count, "train_loss": train[0], "train_error": train[1],
                       "val_loss": val[0], "val_error": val[1]}
            for one, count, train, val in zip(sets, counts, losses["train"], losses["val"], strict=True)}


def set_lines(of_sets):
    """The lines of an evaluation's data sets on the console."""
    total = sum(one["sequences"] for one in of_sets.values())
    return [f"  {name}: train loss {one['train_loss']:.4f}, val loss {one['val_loss']:.4f} (standard errors "
            f"{one['train_error']:.4f}, {one['val_error']:.4f}); "
            + (f"{one['sequences']:,} of {total:,} sequences so far, " if total else "")
            + f"{100 * one['share']:g}% of the mixture" for name, one in of_sets.items()]


def append_history(out_dir, record):
    """Add one record to out_dir/history.jsonl, whole or, with an OSError, not at all."""
    line = (json.dumps(record) + "\n").encode()
    with open(os.path.join(out_dir, "history.jsonl"), "ab", buffering=0) as f:
        size = f.tell()
        if f.write(line) < len(line):
            f.truncate(size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def is_record(line):
    """Whether a line of history.jsonl is whole."""
    try:
        return line.endswith("\n") and isinstance(json.loads(line), dict)
    except ValueError:
        return False


def read_history(out_dir):
    """The whole records of out_dir/history.jsonl, in order; none where there is no such file."""
    path = os.path.join(out_dir, "history.jsonl")
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8", errors="replace") as f:
        return [json.loads(line) for line in f if is_record(line)]


def trim_history(out_dir, iter_num):
    """Drop what an earlier run recorded after step iter_num, from where a new one now goes on."""
    path = os.path.join(out_dir, "history.jsonl")
    if os.path.exists(path):
        with open(path, encoding="utf-8", errors="replace") as f:
            lines = [line for line in f if is_record(line) and json.loads(line).get("iter", 0) <= iter_num]
        write_atomic(path, "".join(lines))


def start_loggers(settings, wandb_id, iter_num):
    """({name: (log(names, iter_num), close())}, the wandb run's id, to be kept for resuming, why one does not start):
    those that the settings ask for."""
    loggers, problems = {}, []
    if settings["wandb_log"]:
        wandb_run, problems = start_wandb(settings, wandb_id)
        if wandb_run:
            wandb_id = wandb_run.id
            loggers["wandb"] = lambda names, step: wandb_run.log(names, step=step), wandb_run.finish
    if settings["tensorboard_log"] and not settings["eval_only"] and not problems:
        writer, problems = start_tensorboard(settings["out_dir"], iter_num)
        if writer:
            loggers["TensorBoard"] = lambda names, step: [writer.add_scalar(*item, step) for item in names.items()], (
                writer.close)
    return loggers, wandb_id, problems


def start_wandb(settings, run_id=None):
    """(a wandb run or None; why there is none). Nobody imports wandb but this."""
    try:
        import wandb

        return wandb.init(project=settings["wandb_project"], name=settings["wandb_run_name"], config=settings,
                          id=run_id, resume="allow"), []  # fmt: skip
    except Exception as error:  # not installed, not logged in, no network: each has an exception of its own
        why = " ".join(str(error).split()) or type(error).__name__
        mend = "python -m pip install wandb" if isinstance(error, ImportError) else "wandb login, WANDB_MODE=offline"
        return None, [f"wandb does not start ({why}): {mend}, or --wandb_log=False"]


def start_tensorboard(out_dir, iter_num):
    """(a SummaryWriter into out_dir/tensorboard or None; why there is none). A resumed run hides what lies after
    iter_num."""
    try:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(os.path.join(out_dir, "tensorboard"), purge_step=iter_num + 1 if iter_num else 0), []
    except Exception as error:  # not installed, not fit for its own packages, no room: each has an exception of its own
        mend = "python -m pip install tensorboard" if isinstance(error, ImportError) else "mend that"
        return None, [f"TensorBoard does not start ({error}): {mend}, or leave out --tensorboard_log"]


def tell(loggers, record):
    """A record to each logger. One that fails is told of and left out from then on: training is worth more."""
    names = shown_names(record)
    for name, (log, _) in list(loggers.items()):
        try:
            log(names, record["iter"])
        except Exception as error:  # theirs, of every kind
            print0(f"{name} fails and is left out from here on: {type(error).__name__}: {error}")
            del loggers[name]


def close(loggers):
    """Let each logger finish what it has begun."""
    for name, (_, end) in loggers.items():
        try:
            end()
        except Exception as error:
            print0(f"{name} did not end well: {type(error).__name__}: {error}")


def shown_names(record):
    """The numbers of a record of ours under the names that wandb and TensorBoard show."""
    names = {
        "loss": "train/loss", "lr": "train/lr", "iter": "train/iter", "grad_norm": "train/grad_norm",
        "ms": "train/ms", "tokens_per_s": "train/tokens_per_s", "mfu": "train/mfu",
        "memory": "gpu/memory_allocated", "train_loss": "eval/train_loss", "val_loss": "eval/val_loss",
        "perplexity": "eval/perplexity", "loss_scale": "train/loss_scale",
    }  # fmt: skip
    of_sets = {f"eval/val_loss/{name}": one["val_loss"] for name, one in record.get("sets", {}).items()}
    return {names[key]: value for key, value in record.items() if key in names and value is not None} | of_sets


def git(root, *args):
    """What a git command says of the project; None outside git."""
    try:
        return subprocess.run(["git", "-C", root, *args], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError, UnicodeDecodeError):
        return None


def git_commit(root):
    """The project's commit, with '+' where files differ from it; None outside git."""
    commit = git(root, "rev-parse", "HEAD")
    return commit and commit + ("+" if git(root, "status", "--porcelain", "--untracked-files=no") else "")


def run_record(root, settings, world_size, device):
    """How this run is made: command, settings, versions, hardware, commit and what differs from it."""
    cuda = torch.device(device).type == "cuda"
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "commit": git_commit(root),
        "git_diff": (git(root, "diff", "HEAD") or "")[:DIFF],
        "settings": settings,
        "world_size": world_size,
        "hardware": torch.cuda.get_device_name(device) if cuda else f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "versions": {
            "python": platform.python_version(),
            "cuda": torch.version.cuda,
            **{name: importlib.metadata.version(name) for name in ("torch", "deepspeed", "numpy")},
        },
    }
