"""All checks of a model, for doctor.py --model."""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from runtime.check.kernels import kernels_and_pytorch
from runtime.check.logits import cached_logits, eval_repeats, future_is_hidden
from runtime.check.loss import loss_in_chunks, own_backwards, recomputed_gradients
from runtime.check.parts import initial_weights, kept_buffers, shared_parameters
from runtime.check.shipped import edited_functions
from runtime.check.tiny import (
    DIFFERS,
    NOT_CHECKED,
    RAISES,
    Result,
    default_config,
    make_check,
    tiny_of,
)
from runtime.check.zero import TwoRanks, checks_of
from runtime.chosen_model import GPT, GPTConfig

MOST_SHOWN = 8  # names of functions

IN_PROCESS = [
    ("initial weights", initial_weights),
    ("shared parameters", shared_parameters),
    ("buffers", kept_buffers),
    ("eval mode", eval_repeats),
    ("future tokens", future_is_hidden),
    ("cached logits", cached_logits),
    ("loss", loss_in_chunks),
    ("own gradients", own_backwards),
    ("recomputing", recomputed_gradients),
    ("kernels", kernels_and_pytorch),
]


def check_model() -> Iterator[Result]:
    """Make all checks of the model in runtime/chosen_model.py, and yield their results. Raises
    UserError if it has no tiny model."""
    tiny = tiny_of(GPT, default_config(GPTConfig))
    with tempfile.TemporaryDirectory() as folder:
        ranks = TwoRanks(Path(folder))  # they train meanwhile
        try:
            for name, check in IN_PROCESS:
                yield make_check(name, check, tiny)
            ranks.wait()
            for name, check in checks_of(ranks):
                yield make_check(name, check, tiny)
        finally:
            ranks.end()


def print_report() -> int:
    """Print a table of all checks. Return the exit code: 2 if something differs or raises, else
    0."""
    start = time.monotonic()
    edited = edited_functions(tiny_of(GPT, default_config(GPTConfig)).model())
    shown = ", ".join(edited[:MOST_SHOWN]) or "nothing"
    more = f" and {len(edited) - MOST_SHOWN} more" if len(edited) > MOST_SHOWN else ""
    print(f"model {GPT.__module__}.{GPT.__name__}, edited: {shown}{more}\n")
    counts = {DIFFERS: 0, RAISES: 0, NOT_CHECKED: 0}
    total = 0
    for result in check_model():
        total += 1
        if result.status in counts:
            counts[result.status] += 1
        print(f"{result.status:<11}  {result.name:<17}  {result.sentence}", flush=True)
    seconds = time.monotonic() - start
    same = total - sum(counts.values())
    print(
        f"\n{counts[DIFFERS]} differ, {counts[RAISES]} raise, {counts[NOT_CHECKED]} not checked, "
        f"{same} equal, in {seconds:.0f} s"
    )
    return 2 if counts[DIFFERS] or counts[RAISES] else 0
