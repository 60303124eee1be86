"""Find the newest tag that every rank finds intact."""

import math
import time
from collections.abc import Iterable

import torch.distributed as dist

from runtime.checkpoint.errors import OTHER_TAG, CheckpointError, UnreadableError
from runtime.checkpoint.tags import Tag, TagStore
from runtime.checkpoint.verify import verify_files
from runtime.cluster.ranks import (
    RANK,
    all_gather_objects,
    broadcast_from_rank0,
    exit_together,
    print0,
)


def newest_intact(
    store: TagStore,
    resumes: bool,
    resume_tag: str = "latest",
    overwrite: bool = False,
    share: tuple[int, int] | None = None,
) -> tuple[Tag | None, list[str]]:
    """Return (the newest Tag that every rank finds intact, the names of newer, corrupt ones).

    They are None and [] unless the run `resumes`. One that doesn't ends if out_dir holds another
    run, unless `overwrite` is set or the store is read-only.

    resume_tag: the one tag to check, or "latest" for all. share: (number of this rank, of ranks)
    that share the hashing; None: all ranks. If each node may have its own files, it is a node's
    ranks. A tag that can't be read ends the run, because an older one would lose work. So does it
    if there is no intact one. All ranks call it.
    """
    # List again on rank 0: the previous run may have saved since, and other machines may see that
    # later
    newest_first = broadcast_from_rank0(store.newest_first() if RANK == 0 else None)
    if not resumes:
        problems = []
        if newest_first and not overwrite and not store.read_only:
            problems.append(
                f"{store.out_dir} now holds a run ({newest_first[0]}): start again with "
                "--init_from=resume or auto"
            )
        exit_together(problems)
        return None, []

    # Which tags to look at, in which order
    began = time.monotonic()
    names = [resume_tag]
    if resume_tag == "latest" and newest_first:
        names = newest_first
    tag, corrupt = first_intact(store, names, share or (RANK, dist.get_world_size()))
    if tag is None:
        problems = [problem for problems in corrupt.values() for problem in problems]
        exit_together([*problems, f"nothing to resume from: {OTHER_TAG}"])
    assert tag is not None  # or all ranks have ended

    # Tell what was chosen, and what was not
    for name, problems in corrupt.items():
        problem = problems[0].removesuffix(f": {OTHER_TAG}")
        print0(f"skipping {store.path(name)}: {problem}")
    print0(
        f"resuming from {store.path(tag.name)}, iteration {tag.manifest['iter_num']}; its files "
        f"were checked in {time.monotonic() - began:.1f} s"
    )
    return tag, list(corrupt)


def first_intact(
    store: TagStore, names: Iterable[str], share: tuple[int, int]
) -> tuple[Tag | None, dict[str, list[str]]]:
    """Return (the first of these tags that is intact, {corrupt tag before it: its problems}).

    The first is None if none is intact. All ranks call it, and exit if one can't read a tag.
    """
    corrupt: dict[str, list[str]] = {}
    for name in names:
        tag, unreadable, problems = inspect(store, name, share)
        exit_together(unreadable)

        # The problems of all ranks, each once. A dict keeps the order
        found = {}
        for problems_of_rank in all_gather_objects(problems):
            for problem in problems_of_rank:
                found[problem] = True
        if not found:
            return tag, corrupt
        corrupt[name] = list(found)
    return None, corrupt


def inspect(
    store: TagStore, name: str, share: tuple[int, int]
) -> tuple[Tag | None, list[str], list[str]]:
    """Return (Tag, messages on what can't be read, messages on what is corrupt)."""
    try:
        tag = store.find(name)
        files = tag.manifest["files"]
        problems = verify_files(store.path(name), files, *share)
    except OSError as error:
        return None, [str(UnreadableError.of(error, store.path(name)))], []
    except UnreadableError as error:
        return None, [str(error)], []
    except CheckpointError as error:
        return None, [], [str(error)]
    return tag, [], problems


def note_another_schedule(
    before: float | None, again: float, following: float, iter_num: int
) -> None:
    """Print a note if this run's settings give another learning rate to step iter_num.

    That step is done. before: its rate, if its tag has it. again: the rate that this run would give
    it. following: the rate of the next step.
    """
    if before is None or math.isclose(before, again, rel_tol=1e-9):
        return
    print0(
        f"note       step {iter_num} had the learning rate {before:.2e}, and step {iter_num + 1} "
        f"has {following:.2e}: by the schedule of this run's settings, step {iter_num} has "
        f"{again:.2e}. --lr_decay_iters and --learning_rate change it"
    )
