"""The ramps of a run: whether they fit its batch, its data, and the loop of its script."""

import ast
import math
import os
from pathlib import Path
from typing import Any

from runtime.data.loader import BatchSizes
from runtime.data.ramp import Ramp, make_ramp
from runtime.plan.problems import Problems

# What the loop of a training script asks `ramp` for
OUR_LENGTH = "length"
OUR_STEPS = "micro_steps"
OUR_MICRO = "micro"
OUR_SIZE = "size"


def ramp_of(s: Any, batch: BatchSizes) -> Ramp:
    """Return the Ramp of the settings. Raises UserError if it doesn't fit the batch and
    block_size."""
    return make_ramp(s.batch_ramp, s.length_ramp, s.max_iters, batch)


def check_ramp(
    s: Any, data: dict | None, batch: BatchSizes, problems: Problems, notes: list[str]
) -> None:
    """Add a problem if a ramp doesn't fit, and a note if the run is too short for it. Its numbers
    only mean something if there is no other problem."""
    if problems:
        return
    ramp = problems.attempt(ramp_of, s, batch)
    has_ramp = s.batch_ramp is not None or s.length_ramp is not None
    if ramp and has_ramp and s.script:
        check_loop(s, ramp, problems)
    if ramp and not s.eval_only:
        notes += note_missing_stages(ramp)
    # A part of a conversation may begin in the middle of an answer
    if s.length_ramp is not None and data and data["template"]:
        problems.add(
            f"length_ramp={s.length_ramp} would cut the conversations of dataset={s.dataset}: "
            "leave it out"
        )


def note_missing_stages(ramp: Ramp) -> list[str]:
    """Return a note if no step of the run is in some of a ramp's stages."""
    missing = ramp.stages_without_steps
    if not missing or not ramp.max_iters:
        return []
    return [
        f"the run has no step of {' and '.join(missing)}, although a ramp names them: "
        f"max_iters={ramp.max_iters:,} is too small for its shares"
    ]


def check_loop(s: Any, ramp: Ramp, problems: Problems) -> None:
    """Add a problem if the loop of an edited script doesn't follow a ramp."""
    used = names_of_ramp(s.script)
    name = os.path.basename(s.script)

    # A loop with a number of micro-steps of its own. Loops from before micro_steps() have size()
    if s.batch_ramp is not None and not used & {OUR_STEPS, OUR_SIZE}:
        problems.add(
            f"batch_ramp={s.batch_ramp} needs micro_steps = ramp.micro_steps(iter_num) in the loop "
            f"of {name}: edit it, or leave batch_ramp out"
        )

    # A stage that is smaller than a micro-step. Without such a stage, older loops are right
    smallest = ramp.sizes[0]
    if smallest < ramp.batch.per_micro_step and not {OUR_STEPS, OUR_MICRO} <= used:
        micro = math.gcd(*ramp.sizes) // ramp.batch.world_size
        accumulation = ramp.sizes[-1] // (micro * ramp.batch.world_size)
        problems.add(
            f"batch_ramp={s.batch_ramp}: {smallest} is below batch_size x GPUs = "
            f"{ramp.batch.per_micro_step}, which needs micro_steps = ramp.micro_steps(iter_num) "
            "and batches.next_step(micro_steps, ramp.length(iter_num), ramp.micro(iter_num)) in "
            f"the loop of {name}: edit it, or use --batch_size={micro} "
            f"--gradient_accumulation_steps={accumulation}"
        )

    if s.length_ramp is not None and OUR_LENGTH not in used:
        problems.add(
            f"length_ramp={s.length_ramp} needs batches.next_step(micro_steps, "
            f"ramp.length(iter_num)) in the loop of {name}: edit it, or leave length_ramp out"
        )


def names_of_ramp(script: str) -> set[str]:
    """Return the attributes of `ramp` that a script uses, such as "length". Comments don't
    count."""
    code = ast.parse(Path(script).read_text(encoding="utf-8"))
    names = set()
    for node in ast.walk(code):
        if not isinstance(node, ast.Attribute):
            continue
        owner = node.value
        if isinstance(owner, ast.Name) and owner.id == "ramp":
            names.add(node.attr)
    return names
