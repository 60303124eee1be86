"""Ranks: who this process is, what it exchanges with the other ranks, and how they exit together."""

import contextlib
import io
import math
import os
import sys
import threading
from collections import namedtuple

import torch
import torch.distributed as dist

from runtime.files import UserError
from runtime.output import exit_with_error

Ranks = namedtuple("Ranks", ("rank", "local_rank", "world_size", "local_world_size"))  # the last: ranks on this node


def launcher_variable(name, default="", end=math.inf):
    """Return an environment variable that launchers set, as an int below `end`. Raises UserError."""
    value = str(os.environ.get(name, default))
    if not value.isdecimal() or (value == "0" and name.endswith("SIZE")) or int(value) >= end:
        raise UserError(f"{name}={value} in the environment can't be used: run unset RANK LOCAL_RANK WORLD_SIZE "
                        "LOCAL_WORLD_SIZE, or start with torchrun or deepspeed")
    return int(value)


RANK = launcher_variable("RANK", 0)
EXITING = threading.Event()  # set when this rank exits without an error
ALL_EXITING = threading.Event()  # set when all ranks do: a rank that ends after this has not died
_progress = None  # the progress bar
_cleanup = contextlib.ExitStack()
on_shut_down = _cleanup.callback  # on_shut_down(function, *args): shut_down() calls it, before the barrier


def ranks_from_environment(dry_run=False):
    """Return Ranks as torchrun and deepspeed set them. Without a launcher there is one rank, and this sets what
    torch.distributed needs. A dry run plans for WORLD_SIZE ranks, LOCAL_WORLD_SIZE of them per node."""
    world_size = launcher_variable("WORLD_SIZE", 1)
    launcher_variable("RANK", 0, end=world_size)
    if dry_run and "RANK" not in os.environ:
        return Ranks(0, 0, world_size, launcher_variable("LOCAL_WORLD_SIZE", world_size))
    if "RANK" not in os.environ or ("LOCAL_RANK" not in os.environ and world_size == 1):
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    launcher_variable("MASTER_PORT")
    return Ranks(RANK, launcher_variable("LOCAL_RANK"), launcher_variable("WORLD_SIZE"), local_world_size())


def local_world_size():
    """Return the number of ranks on this node, which torchrun and deepspeed name differently."""
    return launcher_variable("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", os.environ["WORLD_SIZE"]))


def print0(text):
    """Print on rank 0 only, above the progress bar if there is one."""
    if RANK == 0 and _progress is not None:
        _progress.write(text, file=sys.stdout)
    elif RANK == 0:
        print(text, flush=True)


def show_progress(total, done, text):
    """Show the steps done and a text in a progress bar until shut_down(), on rank 0 if stdout is a terminal."""
    global _progress
    if RANK or not sys.stdout.isatty():
        return
    if _progress is None:
        from tqdm import tqdm

        _progress = tqdm(total=total, initial=done, unit="step", file=sys.stdout, dynamic_ncols=True)
        on_shut_down(_progress.close)
    _progress.set_postfix_str(text, refresh=False)
    _progress.update(done - _progress.n)


def silence_stdout():
    """Return a context that drops what DeepSpeed prints to stdout. It raises its errors or logs them to stderr."""
    return contextlib.redirect_stdout(io.StringIO())


def exit_together(problems):
    """Print the problems (messages) of all ranks, and exit with code 2, if there are any. All ranks call this."""
    if found := gather_unique(problems):
        shut_down()
        exit_with_error("\n".join(found))


def require_same_on_all_ranks(settings):
    """Exit with an error unless `settings`, written as options, are the same on all ranks. All ranks call this."""
    if len(found := gather_unique([settings])) > 1:
        exit_together([f"'auto' gives different values on different nodes ({', or '.join(found)}): set one of them"])


def gather_unique(items):
    """Return the items of all ranks' lists, each once. All ranks call this."""
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, items)
    return list(dict.fromkeys(item for one in gathered for item in one))


def broadcast_from_rank0(value, group=None):
    """Return rank 0's value. All ranks call this. group: a process group of all ranks; None: the default one."""
    values = [value]
    dist.broadcast_object_list(values, src=0, group=group)
    return values[0]


def all_reduce_sum(*values, device="cpu"):
    """Return a list of floats: each value (a float or 0-dimensional tensor) summed over all ranks in float64."""
    return [sum(column) for column in zip(*all_gather_scalars(*values, device=device))]


def all_gather_scalars(*values, device="cpu"):
    """Return a list of floats per rank: its values (floats or 0-dimensional tensors) in float64."""
    gathered = torch.zeros((dist.get_world_size(), len(values)), dtype=torch.float64, device=device)
    gathered[RANK] = torch.stack([torch.as_tensor(v, dtype=torch.float64, device=device) for v in values])
    dist.all_reduce(gathered)
    return gathered.tolist()


def shut_down(code=0):
    """End the process group on all ranks together: without the barrier, a third of gloo's runs abort at exit. If
    destroying the group takes over a minute, as NCCL's does while a CUDA graph uses it, exit with `code`."""
    EXITING.set()
    _cleanup.close()
    dist.barrier()
    ALL_EXITING.set()
    sys.stdout.flush()
    last_resort = threading.Timer(60, os._exit, [code])
    last_resort.daemon = True
    last_resort.start()
    dist.destroy_process_group()
    last_resort.cancel()
