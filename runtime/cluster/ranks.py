"""Ranks: who this process is, what it exchanges with the others, and how they exit together."""

import atexit
import contextlib
import json
import math
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn, TextIO

import torch
import torch.distributed as dist

from runtime.cluster.launchers import STARTED_BY, launchers_apart
from runtime.errors import UserError
from runtime.output import end_at_signals, error_text, printable

DESTROY_TIMEOUT_S = 60


class Ranks(NamedTuple):
    """Which rank this process is, and of how many."""

    rank: int
    local_rank: int  # on this node
    world_size: int  # all ranks
    local_world_size: int  # ranks on this node


# -----------------------------------------------------------------------------
# Who this process is


def launcher_variable(name: str, default: str | int = "", end: float = math.inf) -> int:
    """Return an environment variable that launchers set, as an int below `end`.

    Raises UserError.
    """
    value = str(os.environ.get(name, default))
    is_usable = value.isdecimal() and int(value) < end
    if value == "0" and name.endswith("SIZE"):
        is_usable = False
    if not is_usable:
        raise UserError(
            f"{name}={value} in the environment can't be used: run unset RANK LOCAL_RANK "
            "WORLD_SIZE LOCAL_WORLD_SIZE, or start with torchrun or deepspeed"
        )
    return int(value)


# The launcher has set it before this process began, and it never changes. A constant, because what
# is printed on rank 0 alone, or with the rank's name, is printed from everywhere
RANK = launcher_variable("RANK", 0)


def ranks_from_environment(dry_run: bool = False) -> Ranks:
    """Return Ranks as torchrun and deepspeed set them.

    Without a launcher there is one rank, and this sets what torch.distributed needs. A dry run
    plans for WORLD_SIZE ranks, LOCAL_WORLD_SIZE of them per node. Raises UserError.
    """
    refuse_runs_apart()

    # A rank outside of the world would wait for others for ever
    world_size = launcher_variable("WORLD_SIZE", 1)
    launcher_variable("RANK", 0, end=world_size)
    if dry_run and "RANK" not in os.environ:
        per_node = launcher_variable("LOCAL_WORLD_SIZE", world_size, end=world_size + 1)
        return Ranks(rank=0, local_rank=0, world_size=world_size, local_world_size=per_node)

    # Without a launcher
    if world_size == 1 and not {"RANK", "LOCAL_RANK"} <= os.environ.keys():
        os.environ["RANK"] = "0"
        os.environ["LOCAL_RANK"] = "0"
        os.environ["WORLD_SIZE"] = "1"
        os.environ["LOCAL_WORLD_SIZE"] = "1"
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        os.environ["MASTER_PORT"] = "0"

    # torch.distributed reads these itself, and its errors don't say what to do
    rank = launcher_variable("RANK")
    local_rank = launcher_variable("LOCAL_RANK")
    world_size = launcher_variable("WORLD_SIZE")
    launcher_variable("MASTER_PORT", end=2**16)
    if not os.environ.get("MASTER_ADDR"):
        raise UserError(
            "MASTER_ADDR is not in the environment: set it to rank 0's host (mpirun -x "
            "MASTER_ADDR=HOST), or start with torchrun"
        )
    return Ranks(rank, local_rank, world_size, local_world_size())


def refuse_runs_apart() -> None:
    """Raise UserError if a launcher has started several processes that don't know of each other.

    Each of them would train by itself.
    """
    # By srun or mpirun, without the variables that say which rank each is
    if STARTED_BY is not None and "RANK" not in os.environ:
        raise UserError(
            f"{STARTED_BY.size}={os.environ[STARTED_BY.size]} in the environment: "
            f"{STARTED_BY.name} has started several processes, but its variables don't say which "
            "is which: start with python launch_deepspeed.py, or set RANK, LOCAL_RANK, WORLD_SIZE, "
            "LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        )

    # By several torchruns or deepspeeds, of which each knows its own ranks only
    apart = launchers_apart(os.environ)
    if apart is not None:
        raise UserError(apart)


def local_world_size() -> int:
    """Return the number of ranks on this node, which torchrun and deepspeed name differently."""
    deepspeeds = os.environ.get("LOCAL_SIZE", os.environ["WORLD_SIZE"])
    return launcher_variable("LOCAL_WORLD_SIZE", deepspeeds)


# -----------------------------------------------------------------------------
# Printing

_progress: Any = None  # the progress bar, a tqdm


def print0(text: object) -> None:
    """Print on rank 0 only, above the progress bar if there is one."""
    if RANK != 0:
        return
    text = printable(str(text))  # it may quote a file of others

    # tqdm redraws the bar below the text
    if _progress is not None:
        _progress.write(text, file=sys.stdout)
        return
    # One write, because the thread that saves prints too
    print(f"{text}\n", end="", flush=True)


def show_progress(total: int, done: int, text: str) -> None:
    """Show the steps done and a text in a progress bar until shut_down().

    On rank 0, and only if stdout is a terminal.
    """
    global _progress
    if RANK != 0 or not sys.stdout.isatty():
        return
    # The first call makes it. After a resume it begins at the steps that were done before
    if _progress is None:
        from tqdm import tqdm

        _progress = tqdm(
            total=total, initial=done, unit="step", file=sys.stdout, dynamic_ncols=True
        )
        on_shut_down(_progress.close)
    _progress.set_postfix_str(text, refresh=False)
    _progress.update(done - _progress.n)


class SilentThread:
    """A stream that drops what this thread writes. Other threads report signals and saves."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.thread = threading.get_ident()

    def write(self, text: str) -> int:
        if threading.get_ident() == self.thread:
            return len(text)
        return self.stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def silence_stdout() -> contextlib.AbstractContextManager:
    """Return a context that drops what DeepSpeed prints to stdout on this thread.

    It raises its errors or logs them to stderr.
    """
    return contextlib.redirect_stdout(SilentThread(sys.stdout))


# -----------------------------------------------------------------------------
# Problems: all ranks print them, and exit with code 2


def exit_together(problems: list[str]) -> None:
    """Print the problems of all ranks, and exit with code 2, if there are any.

    All ranks call this.
    """
    # Hosts tell which machine to repair
    of_ranks = all_gather_objects((socket.gethostname(), problems))
    exit_with_problems(merge_problems(of_ranks))


@contextlib.contextmanager
def all_exit_on(*error_types: type[BaseException]) -> Iterator[None]:
    """Return a context that turns these errors, on any rank, into exit_together()."""
    problems = []
    try:
        yield
    except error_types as error:
        problems = [str(error)]
    exit_together(problems)


def merge_problems(ranks: list) -> list[str]:
    """Return the problems of all ranks, each once, with its hosts if not all ranks have it.

    ranks: [(host name, problems)].
    """
    # The hosts of each problem, in the order in which the ranks report them
    hosts_of: dict[str, list[str]] = {}
    for host, problems in ranks:
        for problem in "\n".join(problems).splitlines():  # one may hold several lines
            hosts_of.setdefault(problem, []).append(host)

    # With its hosts, unless there is one host or all have it
    several_hosts = len({host for host, _ in ranks}) > 1
    merged = []
    for problem, hosts in hosts_of.items():
        if several_hosts and len(hosts) != len(ranks):
            problem = f"{', '.join(dict.fromkeys(hosts))}: {problem}"
        merged.append(problem)
    return merged


def exit_with_problems(problems: list[str]) -> None:
    """Print problems on the first rank of each node, and exit with code 2, if there are any.

    All ranks call this, with the same problems. Nobody leaves before all have printed: a launcher
    ends the other ranks when it sees the first exit.
    """
    if not problems:
        return

    # The others of a node would only repeat it
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(error_text("\n".join(problems)), file=sys.stderr, flush=True)
    with contextlib.suppress(RuntimeError):  # a rank that has died can't change what this one found
        shut_down(2)
    exit_process(2)


# -----------------------------------------------------------------------------
# Exchange of values


def all_gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list:
    """Return the values of all ranks, as a list. All ranks call this.

    value: what JSON can hold. Tuples come back as lists. Unlike torch.distributed's functions, this
    unpickles nothing: a pickle from the network could run code. group: a process group of all
    ranks; None: the default one. Without a process group, in a dry run, there is one rank.
    """
    if not dist.is_initialized():
        return [value]

    # The sizes first: each rank's JSON has its own length
    content = json_tensor(value)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(content)]), group=group)

    # all_gather takes tensors of one size
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(content)] = content
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded, group=group)
    return [json_value(tensor[: size.item()]) for tensor, size in zip(gathered, sizes)]


def broadcast_from_rank0(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Return rank 0's value. All ranks call this. value, group: as for all_gather_objects()."""
    if not dist.is_initialized():
        return value

    # The size first, so that the others can allocate
    content = json_tensor(value)
    size = torch.tensor([len(content)])
    dist.broadcast(size, src=0, group=group)
    if RANK != 0:
        content = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(content, src=0, group=group)
    return json_value(content)


def json_tensor(value: Any) -> torch.Tensor:
    """Return the bytes of a value's JSON, (n,) uint8. Raises TypeError if JSON can't hold it."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def json_value(content: torch.Tensor) -> Any:
    """Return the value of the JSON in (n,) uint8."""
    return json.loads(content.numpy().tobytes())


def all_reduce_sum(*values: float | torch.Tensor) -> list[float]:
    """Return each value, a float or 0-dimensional tensor, summed over all ranks in float64."""
    of_ranks = all_gather_scalars(*values)
    return [sum(column) for column in zip(*of_ranks)]


def all_gather_scalars(*values: float | torch.Tensor) -> list[list[float]]:
    """Return the values of each rank, floats or 0-dimensional tensors, in float64.

    Waits for the GPU.
    """
    # Each rank fills its own row, and the sum of all has every row
    gathered = torch.zeros((dist.get_world_size(), len(values)), dtype=torch.float64)
    gathered[RANK] = torch.tensor([float(value) for value in values], dtype=torch.float64)
    dist.all_reduce(gathered)
    return gathered.tolist()


# -----------------------------------------------------------------------------
# The end

EXITING = threading.Event()  # set when this rank exits without an error
ALL_EXITING = threading.Event()  # set when all ranks do: a rank that ends after this has not died
_cleanup = contextlib.ExitStack()


def on_shut_down(function: Callable, *args: Any) -> None:
    """Have shut_down() call a function, before it waits for the other ranks."""
    _cleanup.callback(function, *args)


def shut_down(code: int = 0) -> NoReturn:
    """End the process group and this process on all ranks together, with an exit code.

    If destroying the group takes over a minute, as NCCL's does while a CUDA graph uses it, exit
    without that.
    """
    # What others have asked for first: they may print, or free what a CUDA graph holds
    EXITING.set()
    _cleanup.close()
    if not dist.is_initialized():  # a dry run
        raise SystemExit(code)
    dist.barrier()
    ALL_EXITING.set()
    sys.stdout.flush()

    # Destroying the group, but not for ever
    last_resort = threading.Timer(DESTROY_TIMEOUT_S, os._exit, [code])
    last_resort.daemon = True
    last_resort.start()
    dist.destroy_process_group()
    last_resort.cancel()
    exit_process(code)


def exit_process(code: int) -> NoReturn:
    """Exit as sys.exit() does in the main thread, but without tearing down modules.

    DeepSpeed's engine keeps process groups, so gloo's threads still run. One that then releases a
    tensor aborts the process: 1% of exits on a busy machine
    (https://github.com/pytorch/pytorch/pull/179291).
    """
    end_at_signals()  # the launcher sends one to the other ranks when the first has ended
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
