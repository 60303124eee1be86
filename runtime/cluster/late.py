"""Say who waits for whom, if ranks don't find each other soon."""

import os
import threading
import time

import psutil
import torch.distributed as dist

from runtime.cluster.launchers import STARTED_BY
from runtime.cluster.ranks import RANK
from runtime.cluster.store import is_launcher
from runtime.errors import UserError

NOTICE_S = 20
POLL_S = 0.05
MOST_LISTED = 8  # ranks
VARIABLES = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT"


class LateNotice:
    """A context. After NOTICE_S in it, one line says for which ranks this one waits, and why."""

    def __init__(self) -> None:
        self.store: dist.Store | None = None  # where each rank that has started sets its key
        self.timer = threading.Timer(NOTICE_S, self.print_notice)
        self.timer.daemon = True

    def __enter__(self) -> "LateNotice":
        self.timer.start()
        return self

    def __exit__(self, *_) -> None:
        self.timer.cancel()

    def print_notice(self) -> None:
        """Print for whom this rank waits, unless another rank does."""
        world_size = int(os.environ["WORLD_SIZE"])
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"

        # Ranks on one node set keys in a store, so it is known who is missing. Otherwise each names
        # whom it connects to
        if self.store is not None:
            missing = self.missing(world_size)
            here = [rank for rank in range(world_size) if rank not in missing]
            if not missing or here[0] != RANK:
                return  # the first rank that is here prints it
            awaited = listed(missing)
        elif RANK == 0:
            awaited = f"the others at {address}"
        else:
            awaited = f"rank 0 at {address}"
        print(
            f"rank {RANK} has waited {NOTICE_S:g} s for {awaited}, of {world_size} ranks; "
            f"{source()}",
            flush=True,
        )

    def missing(self, world_size: int) -> list[int]:
        """Return the ranks that are not here yet, as the store knows them."""
        assert self.store is not None
        return [rank for rank in range(world_size) if not self.store.check([f"here/{rank}"])]

    def wait_for_all(self, store: dist.Store, world_size: int, timeout_s: float) -> None:
        """Wait for all ranks of a store. Raises UserError after timeout_s."""
        # Each rank says that it is here. The notice looks for the same keys
        store.set(f"here/{RANK}", "")
        self.store = store
        deadline = time.monotonic() + timeout_s
        everybody = [f"here/{rank}" for rank in range(world_size)]
        while not store.check(everybody):
            if time.monotonic() > deadline:
                missing = listed(self.missing(world_size))
                raise UserError(
                    f"rank {RANK} could not join the other ranks within {timeout_s / 60:g} minutes "
                    f"({missing} of {world_size} did not join): check their output; {source()}"
                )
            time.sleep(POLL_S)


def listed(ranks: list[int]) -> str:
    """Return "rank 1" or "ranks 1, 2, 3"; of many, the first ones."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = [str(rank) for rank in ranks[:MOST_LISTED]]
    if len(ranks) > MOST_LISTED:
        shown.append("...")
    return f"ranks {', '.join(shown)}"


def source() -> str:
    """Return where the number of ranks comes from, and what to do if it is wrong."""
    world_size = os.environ["WORLD_SIZE"]
    # By srun or mpirun
    if STARTED_BY is not None:
        return (
            f"{STARTED_BY.size}={world_size} in the environment says that {STARTED_BY.name} has "
            f"started so many: if it has not, run unset {STARTED_BY.size}"
        )
    # By torchrun or deepspeed, or by variables that an earlier run has left in this shell
    parent = psutil.Process().parent()
    if parent is not None and is_launcher(parent):
        return f"the launcher, process {parent.pid}, has started them: look for their errors above"
    return (
        f"RANK={RANK} and WORLD_SIZE={world_size} are in this shell's environment: if you want one "
        f"process, run unset {VARIABLES}"
    )
