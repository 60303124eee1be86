"""Ranks: who am I, what do all of us say, and how do we part. torch is imported late, so that a refusal is quick."""

import contextlib
import io
import os
import socket
import sys
import threading
from typing import NamedTuple

from runtime.output import exit_with_error

RANK = int(os.environ.get("RANK", 0))
BAR = []  # the progress bar, while there is one
EXITING = threading.Event()  # set when this rank ends in good order
PARTED = threading.Event()  # set when all ranks have come so far: from then on one that ends has not died


def print0(*args):
    """Print on rank 0 alone, at once; above the progress bar, if there is one."""
    if RANK == 0 and BAR:
        BAR[0].write(" ".join(map(str, args)), file=sys.stdout)
    elif RANK == 0:
        print(*args, flush=True)


def show_progress(total, done):
    """From now on, a bar below what rank 0 prints, where that is a terminal. Returns update(steps made, words)."""
    if RANK or not sys.stdout.isatty():
        return lambda made, words: None
    from tqdm import tqdm

    BAR.append(tqdm(total=total, initial=done, unit="step", file=sys.stdout, dynamic_ncols=True, smoothing=0.1,
                    bar_format="{percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt}, {remaining} left{postfix}"))

    def update(made, words):
        BAR[0].set_postfix_str(words, refresh=False)
        BAR[0].update(made - BAR[0].n)

    return update


def end_progress():
    while BAR:
        BAR.pop().close()


def silence_stdout():
    """A context in which DeepSpeed's chatter on stdout goes nowhere; what is wrong it raises or logs to stderr."""
    return contextlib.redirect_stdout(io.StringIO())


def gather_unique(problems):
    """The sentences of all ranks' lists, each once. All ranks call it."""
    import torch

    gathered = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, problems)
    return list(dict.fromkeys(problem for one in gathered for problem in one))


def exit_together(problems):
    """refuse() once the process group is up, where one rank may see what the others don't: all ranks call it with
    their own list of sentences, and go on if all lists are empty."""
    found = gather_unique(problems)
    if found:
        shut_down()
        exit_with_error("\n".join(found))


def broadcast_from_rank0(value):
    """What rank 0 has given. All ranks call it."""
    import torch

    given = [value]
    torch.distributed.broadcast_object_list(given, src=0)
    return given[0]


def require_same_on_all_ranks(choice):
    """Refuse unless all ranks say the same, settings as they are typed. All ranks call it."""
    found = gather_unique([choice])
    exit_together([f"the ranks' machines differ in what 'auto' is there: {', or '.join(found)}; say one of them"]
                    if len(found) > 1 else [])


class Ranks(NamedTuple):
    """This process among all."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int  # ranks on this machine


def ranks_from_environment(dry_run=False):
    """Return the Ranks that torchrun and deepspeed give; without a launcher, one process.

    Without a launcher it also sets what torch.distributed reads. A dry run pretends to the ranks that WORLD_SIZE names,
    and LOCAL_WORLD_SIZE on each of several machines.
    """
    if dry_run and "RANK" not in os.environ:
        asked = os.environ.get("WORLD_SIZE", "1"), os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1"))
        if not all(ranks.isdecimal() and int(ranks) for ranks in asked):
            exit_with_error(f"WORLD_SIZE={asked[0]} and LOCAL_WORLD_SIZE={asked[1]} must be whole numbers above 0")
        return Ranks(0, 0, *map(int, asked))
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    if "RANK" in os.environ and "LOCAL_RANK" not in os.environ and not alone:
        exit_with_error("RANK is set and LOCAL_RANK is not: start with torchrun or deepspeed, or set LOCAL_RANK, "
                        "WORLD_SIZE, MASTER_ADDR and MASTER_PORT as well")
    if "RANK" not in os.environ or "LOCAL_RANK" not in os.environ:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    return Ranks(RANK, int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"]), local_world_size())


def is_multi_node():
    """Whether some of the ranks are on other machines, by the launcher's word."""
    return "RANK" in os.environ and local_world_size() < int(os.environ["WORLD_SIZE"])


def local_world_size():
    """The ranks on this machine, by torchrun's name for it or deepspeed's."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", os.environ["WORLD_SIZE"])))


def all_reduce_sum(*values, device="cpu"):
    """The values summed over all ranks, in double precision: floats or 0-dimensional tensors -> a list of floats."""
    import torch

    sums = torch.stack([torch.as_tensor(v, dtype=torch.float64, device=device) for v in values])
    torch.distributed.all_reduce(sums)
    return sums.tolist()


def all_gather_scalars(*values, device="cpu"):
    """All ranks' values, in double precision: a list for each rank of what it gave, floats or 0-dimensional tensors."""
    import torch

    mine = torch.stack([torch.as_tensor(v, dtype=torch.float64, device=device) for v in values])
    each = torch.zeros((torch.distributed.get_world_size(), len(values)), dtype=torch.float64, device=device)
    each[RANK] = mine
    torch.distributed.all_reduce(each)
    return each.tolist()


def shut_down(code=0):
    """Leave together: without the barrier, a third of gloo's runs abort at exit. A group that has not come apart in a
    minute, as NCCL's had not when it waited for a recording, is left to the system: the process ends with `code`."""
    import torch

    from runtime.engine.fast_path import forget

    EXITING.set()
    forget()
    torch.distributed.barrier()
    PARTED.set()
    sys.stdout.flush()
    last = threading.Timer(60, os._exit, [code])
    last.daemon = True
    last.start()
    torch.distributed.destroy_process_group()
    last.cancel()
