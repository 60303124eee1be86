"""The ramps of a run: whether they fit its batch, its data, and the loop of its script."""

import os
from pathlib import Path
from typing import Any

from runtime.data.loader import BatchSizes
from runtime.data.ramp import Ramp, make_ramp
from runtime.plan.problems import Problems

OUR_LENGTH = "ramp.length("  # the text that the loop of a training script has


def ramp_of(s: Any, batch: BatchSizes) -> Ramp:
    """Return the Ramp of the settings. Raises UserError if it doesn't fit the batch and
    block_size."""
    return make_ramp(s.batch_ramp, s.length_ramp, s.max_iters, batch)


def check_ramp(s: Any, data: dict | None, batch: BatchSizes, problems: Problems) -> None:
    """Add a problem if a ramp doesn't fit. Its numbers only mean something if there is no other
    problem."""
    if problems:
        return
    ramp = problems.attempt(ramp_of, s, batch)
    has_ramp = s.batch_ramp is not None or s.length_ramp is not None
    if ramp and has_ramp and s.script:
        check_loop(s, problems)
    # A part of a conversation may begin in the middle of an answer
    if s.length_ramp is not None and data and data["template"]:
        problems.add(
            f"length_ramp={s.length_ramp} would cut the conversations of dataset={s.dataset}: "
            "leave it out"
        )


def check_loop(s: Any, problems: Problems) -> None:
    """Add a problem if the loop of an edited script doesn't follow a ramp."""
    code = Path(s.script).read_text(encoding="utf-8")
    name = os.path.basename(s.script)
    if s.length_ramp is not None and OUR_LENGTH not in code:
        problems.add(
            f"length_ramp={s.length_ramp} needs batches.next_step(micro_steps, "
            f"ramp.length(iter_num)) in the loop of {name}: edit it, or leave length_ramp out"
        )
