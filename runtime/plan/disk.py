"""Compare the checkpoints that exist at the same time with the space on the disk, and keep fewer if they don't fit."""

from dataclasses import replace

from runtime.checkpoint.tags import TagStore
from runtime.errors import UserError
from runtime.files import format_bytes, free_bytes
from runtime.plan.rules import evaluations_through


def fit_checkpoints(s, start, tag_bytes, notes):
    """Return (the settings, how many checkpoints exist at the same time at most). If they don't fit on the disk, lower
    keep_last, and then save only if the validation loss improves. Raises UserError if that isn't enough."""
    store, kept, first_iter = TagStore(s.out_dir), {}, 0
    if start.kind == "resume":  # TagStore.clean() deletes all other tags
        first_iter = store.iteration(start.tag)
        kept = {tag: iter_num for tag in store.list() if (iter_num := store.iteration(tag)) <= first_iter}
    held = len(set(kept.values()))  # best and final are links
    free = free_bytes(s.out_dir) + store.bytes_besides(kept)
    with_margin = 1.02 * tag_bytes  # an estimate
    room = held + int(free // with_margin)
    evaluations = evaluations_through(s.max_iters - 1, s) + 1  # one is always at the end
    saves = max(0, evaluations - evaluations_through(first_iter, s))
    fewer, needed = [n for n in (room - 1, room - 2, room - 3, 1) if 0 < n < s.keep_last], []
    for keep_last, always_save in (*((n, s.always_save_checkpoint) for n in (s.keep_last, *fewer)), (1, False)):
        needed.append(most_at_once(kept, saves, keep_last, always_save))
        if needed[-1] <= room:
            fitting = {"keep_last": keep_last, "always_save_checkpoint": always_save}
            if changed := [f"{name}={value}" for name, value in fitting.items() if value != getattr(s, name)]:
                notes.append(f"{' and '.join(changed)}: the disk has room for {room} checkpoints, not for {needed[0]}")
            return replace(s, **fitting), needed[-1]
    older = [f"{s.out_dir}/{tag}" for tag in ("best", "final") if kept.get(tag, first_iter) < first_iter]
    once = f"--eval_interval={s.max_iters}" + " --eval_epochs=None" * (s.eval_epochs is not None)
    fix = (f"save once, at the end, with {once}" if held < room else
           f"delete {older[0]}" if older else "save none with --keep_last=0")
    raise UserError(f"keep_last=1 needs {format_bytes((needed[-1] - held) * with_margin)} for checkpoints of "
                    f"{format_bytes(tag_bytes)}, but the disk of {s.out_dir} has {format_bytes(free)}: {fix}, make "
                    "room, or choose another --out_dir=DIR")


def most_at_once(tags, saves, keep_last, always_save):
    """Return how many checkpoints exist at the same time at most, with the one being written. tags: those that the run
    starts with, {name: iteration}; saves: the number of its evaluations."""
    newest = sorted(iter_num for tag, iter_num in tags.items() if tag.startswith("iter_"))[-keep_last:]
    now = len({*newest, *(iter_num for tag, iter_num in tags.items() if not tag.startswith("iter_"))})
    # Later, best is older than the newest ones, unless only better ones are saved. final stays until the end
    later = min(now + saves, keep_last + 1 + always_save + ("final" in tags))
    return max(len(set(tags.values())), now + min(saves, 1), later)
