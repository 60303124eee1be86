"""Compare the checkpoints that must exist at the same time with the space on the disk."""

from runtime.checkpoint.tags import TagStore
from runtime.errors import UserError
from runtime.files import format_bytes, free_bytes
from runtime.plan.rules import evaluations_through


def check_disk(s, start, tag_bytes):
    """Raise UserError unless the disk has room for the newest checkpoint, the best one and the one being written, of
    tag_bytes each. It need not have room for keep_last of them: a save that finds none deletes the oldest one."""
    store, kept, first_iter = TagStore(s.out_dir), {}, 0
    if start.kind == "resume":  # TagStore.clean() and Saver delete all others
        first_iter = store.iteration(start.tag)
        needed = {store.iteration(tag) for tag in (start.tag, "best", "final")}
        kept = {tag: iter_num for tag in store.list() if (iter_num := store.iteration(tag)) in needed}
    held = len(set(kept.values()))  # best and final are links
    saves = evaluations_through(s.max_iters - 1, s) + 1 - evaluations_through(first_iter, s)  # one is at the end
    # Unless only better ones are saved, best is older than newest. final stays until the end
    most = max(held + 1, min(held + saves, 2 + s.always_save_checkpoint + ("final" in kept)))
    free = free_bytes(s.out_dir) + store.bytes_besides(kept)
    room = held + int(free // (1.02 * tag_bytes))  # tag_bytes is an estimate
    if saves > 0 and most > room:
        fix = ("add --always_save_checkpoint=False" if room == most - 1 > 1 and s.always_save_checkpoint else
               f"save once, at the end, with --eval_interval={s.max_iters}{' --eval_epochs=None' * bool(s.eval_epochs)}"
               if room > held else "save none with --keep_last=0")
        raise UserError(f"{most} checkpoints of {format_bytes(tag_bytes)} exist at the same time, but the disk of "
                        f"{s.out_dir} has room for {room}: {fix}, make room, or choose another --out_dir=DIR")
