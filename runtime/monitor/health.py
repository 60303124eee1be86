"""What is told, and done, when a step goes wrong: a gradient that is not finite, or far above those before it."""

import contextlib
import math
import os
import statistics
import sys
from collections import deque

import torch

from runtime.cluster.ranks import all_reduce_sum
from runtime.data.download import FetchError
from runtime.data.loader import rank_numbers, train_places
from runtime.data.tokenizer import tokenizer_of

BEFORE = 50  # norms that a new one is held against; fewer than 20 tell nothing
SPIKE = 6  # times their median
SHOWN = 4  # sequences of a rank that are named, and tokens of each are SHOWN * 4


def look_at_step(engine, norms, loss, iter_num, sources, settings, run, rank, world_size):
    """(whether the step that made `iter_num` counts as a bad one, what there is to tell of it or None). All ranks call
    it, and those where a step was not made are all of them: the norm is of the sum over the ranks."""
    grad_norm = getattr(engine.optimizer, "seen_norm", engine.get_global_grad_norm())
    times = norms.add(None if grad_norm is None else float(grad_norm))
    why = f"the gradient norm {float(grad_norm):.3g} is {times:.0f} times the median before it" if times else None
    if engine.was_step_applied():
        return False, why
    told = look_at_loss(loss, iter_num - 1, sources, settings, run.meta, rank, world_size) or why
    if not told and run.dtype == "float16":
        scale, tried = engine.optimizer.loss_scaler.cur_scale, norms.scale
        norms.scale = scale
        if scale > getattr(engine.optimizer.loss_scaler, "min_scale", math.inf) or scale != tried:
            return False, f"the gradient overflows float16; skipped, the loss scale is {scale:g} now"
        told = (f"the gradient overflows float16 at a loss scale of {scale:g}, which gets no smaller: weights or "
                "activations have grown too large; go on from an earlier tag with a lower learning_rate or "
                "--dtype=float32, or on a card with bfloat16")
    return True, f"{told or 'the gradient is not finite'}; skipped"


def explain_lack_of_memory(words):
    """From now on a GPU without memory left ends this process with words() and exit code 2, wherever that comes: while
    the engine is built, in a step or an evaluation. The other ranks see it, and leave; what is saved is whole."""
    def hook(kind, error, trace):
        if issubclass(kind, RuntimeError) and "out of memory" in str(error):  # PyTorch's, and CUDA's own
            try:
                print(words(), file=sys.stderr, flush=True)
            finally:
                os._exit(2)
        plain(kind, error, trace)

    plain, sys.excepthook = sys.excepthook, hook


def skip_at_stage_0(engine):
    """Have DeepSpeed skip a step whose gradient is not finite also at stage 0 (float32), where it looks at none."""
    def look(optimizer, *_):
        params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        optimizer.overflow = not torch.nn.utils.get_total_norm([p.grad for p in params]).isfinite()  # DeepSpeed asks
        for p in params if optimizer.overflow else ():
            p.grad = None

    if engine.zero_optimization_stage() == 0:
        engine.optimizer.register_step_pre_hook(look)


def outlive_the_loss_scale(engine):
    """float16: have DeepSpeed skip steps also at the least loss scale, where it would end the run with a traceback."""
    if hasattr(getattr(engine.optimizer, "loss_scaler", None), "raise_error_at_min_scale"):
        engine.optimizer.loss_scaler.raise_error_at_min_scale = False


def look_at_loss(loss, iter_num, sources, settings, meta, rank, world_size):
    """Why the step after `iter_num` finished ones was not made, as a sentence that names the ranks whose loss is not
    finite and where in the data their sequences begin. All ranks call it. None where all losses are finite."""
    flags = [float(rank == r and not math.isfinite(loss.item())) for r in range(world_size)]
    bad = [r for r, flag in enumerate(all_reduce_sum(*flags, device=loss.device)) if flag]
    if not bad:
        return None
    told = [f"rank {r}, at tokens {where(iter_num, r, world_size, sources, settings, meta)}" for r in bad]
    return f"the loss is not finite on {'; on '.join(told)}"


def where(iter_num, rank, world_size, sources, settings, meta):
    """Where the first sequences of a rank's step begin, with their first words."""
    numbers = rank_numbers(iter_num, rank, world_size, settings["batch_size"], settings["gradient_accumulation_steps"])
    which, offsets = train_places(numbers.flatten(), sources, settings["block_size"], settings["seed"])
    first = [(sources[j][0], f" of set {j + 1}" * (len(sources) > 1), offset)
             for j, offset in zip(which[:SHOWN], offsets[:SHOWN].tolist(), strict=True)]
    words = [f"{offset}{of}" for _, of, offset in first]
    with contextlib.suppress(FetchError, OSError, ImportError):  # GPT-2's ranks may be out of reach
        _, decode = tokenizer_of(meta["tokenizer"])
        words = [f"{offset}{of} ({decode(tokens[offset : offset + 4 * SHOWN].tolist())!r})"
                 for tokens, of, offset in first]
    return ", ".join(words) + (f" and {len(offsets) - SHOWN} more" if len(offsets) > SHOWN else "")


class Norms:
    """The gradient norms of late, and what is far above them. seen: those of a run that resumes."""

    def __init__(self, seen=()):
        self.seen = deque(seen, maxlen=BEFORE)
        self.scale = None  # float16's, after the last step that was skipped

    def limit(self):
        """The norm from which on one is a spike; infinite while too few have been seen."""
        return SPIKE * statistics.median(self.seen) if len(self.seen) >= 20 else math.inf

    def add(self, norm):
        """Take a norm in; returns how many times the median it is if it is a spike, which does not count, or None."""
        if norm is None or not math.isfinite(norm):
            return None
        if norm >= self.limit():
            return SPIKE * norm / self.limit()
        self.seen.append(norm)
        return None
