"""Check the output folder of a run, and the space on its disk."""

import os
from typing import Any

from runtime.checkpoint.staging import beyond_memory, fits_in_memory
from runtime.checkpoint.tags import TagStore
from runtime.cluster.ranks import Ranks
from runtime.errors import UserError
from runtime.files import format_bytes, free_bytes, nearest_existing_dir, refuse_broken_link
from runtime.hardware import available_memory
from runtime.plan.memory import HOST_BYTES_PER_PROCESS, ParamCount
from runtime.plan.rules import evaluations_through
from runtime.plan.start import Start

WRITTEN = ("history.jsonl", "settings.json", "latest")
SIZE_IS_OFF_BY = 1.02  # the size of a checkpoint is an estimate


def expected_on_disk(s: Any, params: ParamCount, tag_bytes: int, ranks: Ranks) -> int:
    """Estimate the bytes that a save of compact state takes on the disk besides the tag: those of
    fp32 tensors for which host memory is short.

    s: the settings. tag_bytes: of a checkpoint. All machines are taken to be like this one.
    """
    if not s.compact_optimizer or s.target_gpu is not None:
        return 0
    ranks_here = ranks.local_world_size
    free = available_memory() - HOST_BYTES_PER_PROCESS * ranks_here

    # Each rank's part of the weights and moments: Muon has one moment
    sizes = [4 * params.trainable, 4 * params.trainable, 4 * (params.trainable - params.muon)]
    of_rank = [size // ranks.world_size for size in sizes]

    # If there is memory for a copy of all that a rank writes, nothing else is made. Rank 0 writes
    # the model's file, too
    of_rank_0 = tag_bytes - sum(of_rank) * (ranks.world_size - 1)
    if s.async_save and fits_in_memory(of_rank_0, free, ranks_here):
        return 0
    return beyond_memory(of_rank, free, ranks_here) * ranks.world_size


def check_out_dir(
    s: Any,
    start: Start | None,
    params: ParamCount | None,
    tag_bytes: int,
    ranks: Ranks,
    notes: list[str],
) -> None:
    """Raise UserError if out_dir can't be written, holds another run, or has no space.

    s: the settings. params: of the model; None: don't check the space. tag_bytes: of a checkpoint.
    Rank 0 alone looks at the space.
    """
    if s.eval_only:
        return
    refuse_broken_link(s.out_dir, "--out_dir")

    # Is another run there?
    newest = TagStore(s.out_dir).newest()
    if newest and start and start.kind != "resume" and not s.overwrite:
        problem = (
            f"{s.out_dir} already holds a run ({newest}): resume it with --init_from=resume, "
            "choose another --out_dir=DIR, or delete it with --overwrite=True"
        )
        if not s.dry_run:
            raise UserError(problem)
        notes.append(problem)
    if newest and s.overwrite and start and start.parent:
        parent, _ = start.parent
        if os.path.samefile(parent, s.out_dir):
            raise UserError(
                f"overwrite=True would delete init_from={s.init_from}: choose another --out_dir=DIR"
            )
    if os.path.exists(os.path.join(s.out_dir, "manifest.json")):
        raise UserError(
            f"out_dir={s.out_dir} is a checkpoint of a run: choose another with --out_dir=DIR"
        )

    # Can it be written?
    folder = nearest_existing_dir(s.out_dir)
    if not s.out_dir or not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise UserError(f"out_dir={s.out_dir} cannot be written: choose another with --out_dir=DIR")
    for name in WRITTEN:
        path = os.path.join(s.out_dir, name)
        usable = os.path.isfile(path) and os.access(path, os.R_OK | os.W_OK)
        if os.path.exists(path) and not usable:
            raise UserError(
                f"{path} cannot be read and written: fix that, or choose another --out_dir=DIR"
            )
    if s.keep_last and start and params and ranks.rank == 0:
        on_disk = expected_on_disk(s, params, tag_bytes, ranks)
        check_disk(s, start, tag_bytes, on_disk)


def check_disk(s: Any, start: Start, tag_bytes: int, on_disk: int = 0) -> None:
    """Raise UserError unless the disk has room for the newest checkpoint, the best one and the one
    being written, of tag_bytes each, and for `on_disk` more bytes.

    It need not have room for keep_last of them: a save that finds none deletes the oldest one.
    """
    store = TagStore(s.out_dir)

    # What is kept: TagStore.clean() and Saver delete all others
    kept: dict[str, int] = {}
    first_iter = 0
    if start.kind == "resume":
        assert start.tag is not None
        first_iter = store.iteration(start.tag)
        needed = {store.iteration(tag) for tag in (start.tag, "best", "final")}
        for tag in store.list():
            iter_num = store.iteration(tag)
            if iter_num in needed:
                kept[tag] = iter_num
    held = len(set(kept.values()))  # best and final are links

    # What is saved: at each evaluation, and at the end. Unless only better ones are saved, best may
    # be older than newest. final stays until the end
    evaluations = evaluations_through(s.max_iters - 1, s) - evaluations_through(first_iter, s)
    saves = evaluations + 1
    at_once = 2
    if s.always_save_checkpoint:
        at_once += 1
    if "final" in kept:
        at_once += 1
    most = max(held + 1, min(held + saves, at_once))

    free = free_bytes(s.out_dir) + store.bytes_besides(kept)
    besides = ","
    if on_disk:
        free = max(0, free - on_disk)
        besides = (
            f", and a save takes {format_bytes(on_disk)} more, for which host memory is short,"
        )
    room = held + int(free // (SIZE_IS_OFF_BY * tag_bytes))
    if saves <= 0 or most <= room:
        return
    if room == most - 1 > 1 and s.always_save_checkpoint:
        fix = "add --always_save_checkpoint=False"
    elif room > held:
        fix = f"save once, at the end, with --eval_interval={s.max_iters}"
        if s.eval_epochs:
            fix += " --eval_epochs=None"
    else:
        fix = "save none with --keep_last=0"
    raise UserError(
        f"{most} checkpoints of {format_bytes(tag_bytes)} exist at the same time{besides} but the "
        f"disk of {s.out_dir} has room for {room}: {fix}, make room, or choose another "
        "--out_dir=DIR"
    )
