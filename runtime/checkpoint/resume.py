"""Find the newest tag that every rank finds intact."""

import math
import time

import torch.distributed as dist

from runtime.checkpoint.tags import OTHER_TAG, CheckpointError, UnreadableError, verify_files
from runtime.cluster.ranks import RANK, all_gather_objects, broadcast_from_rank0, exit_together, print0


def newest_intact(store, start, resume_tag="latest", overwrite=False):
    """Return the newest Tag that every rank finds intact, or None if the run doesn't resume. resume_tag: the one tag to
    check, or "latest" for all. Corrupt tags are skipped and added to store.skipped. A tag that can't be read ends the
    search, because an older one would lose work. All ranks call it."""
    # List again on rank 0: the previous run may have saved since, and other machines may see that later
    newest = broadcast_from_rank0(store.newest_first() if RANK == 0 else None)
    if start.kind != "resume":
        exit_together([f"{store.out_dir} now holds a run ({newest[0]}): start again with --init_from=resume or auto"]
                      if newest and not overwrite and not store.read_only else [])
        return None
    began = time.monotonic()
    for name in newest or ["latest"] if resume_tag == "latest" else [resume_tag]:
        tag, unreadable, problems = inspect(store, name)
        exit_together(unreadable)
        if not any(problems_of_ranks := all_gather_objects(problems)):
            break
        store.skipped[name] = list(dict.fromkeys(problem for problems in problems_of_ranks for problem in problems))
    else:
        exit_together([*sum(store.skipped.values(), []), f"nothing to resume from: {OTHER_TAG}"])
    for skipped_name, problems in store.skipped.items():
        print0(f"skipping {store.path(skipped_name)}: {problems[0].removesuffix(f': {OTHER_TAG}')}")
    print0(f"resuming from {store.path(name)}, iteration {tag.manifest['iter_num']}; its files were checked in "
           f"{time.monotonic() - began:.1f} s")
    return tag


def note_another_schedule(before: float | None, again: float, following: float, iter_num: int) -> None:
    """Print a note if this run's settings give another learning rate to step iter_num, which is done.

    before: that step's rate, if its tag has it. again: the rate that this run would give it.
    following: the rate of the next step.
    """
    if before is None or math.isclose(before, again, rel_tol=1e-9):
        return
    print0(
        f"note       step {iter_num} had the learning rate {before:.2e}, and step {iter_num + 1} has "
        f"{following:.2e}: by the schedule of this run's settings, step {iter_num} has {again:.2e}. "
        "--lr_decay_iters and --learning_rate change it"
    )


def inspect(store, name):
    """Return (Tag, messages on what can't be read, messages on what is corrupt)."""
    try:
        tag = store.find(name)
        return tag, [], verify_files(store.path(name), tag.manifest["files"], RANK, dist.get_world_size())
    except OSError as error:
        return None, [str(UnreadableError.of(error, store.path(name)))], []
    except UnreadableError as error:
        return None, [str(error)], []
    except CheckpointError as error:
        return None, [], [str(error)]
