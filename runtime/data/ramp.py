"""The batch ramp: how many sequences each step takes, if early steps take fewer.

A ramp is written as "8@0, 16@0.1, 32@0.3": 8 sequences per step at first, 16 after a tenth of all
tokens, and 32 from three tenths on.
"""

import re
from dataclasses import dataclass

from runtime.errors import UserError


@dataclass(frozen=True)
class Ramp:
    """The sizes of a run's steps. All that it says depends on the iteration only.

    sizes: sequences per step, over all ranks, of each stage. starts: the number of iterations
    before each stage; the first is 0. max_iters: iterations of the run.
    """

    sizes: tuple[int, ...]
    starts: tuple[int, ...]
    max_iters: int

    def size(self, iteration: int) -> int:
        """Return the sequences of the step that follows `iteration` finished ones."""
        # The last stage that has begun
        size = self.sizes[0]
        for of_stage, start in zip(self.sizes, self.starts, strict=True):
            if iteration >= start:
                size = of_stage
        return size

    def sequences_before(self, iteration: int) -> int:
        """Return the sequences of the first `iteration` steps."""
        ends = (*self.starts[1:], iteration)
        total = 0
        for size, start, end in zip(self.sizes, self.starts, ends, strict=True):
            steps = max(0, min(iteration, end) - start)
            total += steps * size
        return total

    @property
    def total(self) -> int:
        """The sequences of the whole run."""
        return self.sequences_before(self.max_iters)

    def describe(self) -> str:
        """Return the stages as text."""
        stages = []
        for size, start in zip(self.sizes, self.starts, strict=True):
            stages.append(f"{size:,} from step {start:,}")
        return f"{', '.join(stages)} (sequences per step)"


def parse_stages(text: str) -> list[tuple[int, float]]:
    """Return [(sequences per step, share of all tokens before)] of a ramp as the user writes it.

    Raises UserError.
    """
    # One stage after the other
    stages = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,12})@([0-9]*\.?[0-9]+)\s*", part)
        if match is None:
            raise UserError(
                f"batch_ramp={text} is not of the form SEQUENCES@SHARE, SEQUENCES@SHARE: write "
                '--batch_ramp="8@0, 16@0.1, 32@0.3"'
            )
        stages.append((int(match[1]), float(match[2])))

    # Both numbers grow
    sizes = [size for size, _ in stages]
    shares = [share for _, share in stages]
    if shares[0] != 0 or shares[-1] >= 1:
        raise UserError(f"batch_ramp={text}: begin at share 0, and stay below 1")
    if sizes[0] < 1 or sizes != sorted(set(sizes)):
        raise UserError(f"batch_ramp={text}: each stage needs more sequences than the one before")
    if shares != sorted(set(shares)):
        raise UserError(f"batch_ramp={text}: each stage needs a larger share than the one before")
    return stages


def make_ramp(text: str | None, max_iters: int, sequences: int, per_micro_step: int) -> Ramp:
    """Return the Ramp of a run; without a text, that of equal steps.

    sequences: of a step after the ramp. per_micro_step: of a micro-step, over all ranks. Raises
    UserError for what doesn't fit.
    """
    if text is None:
        return Ramp((sequences,), (0,), max_iters)
    # Each step is made of whole micro-steps
    stages = parse_stages(text)
    sizes = tuple(size for size, _ in stages)
    for size in sizes:
        if size % per_micro_step:
            raise UserError(
                f"batch_ramp={text}: {size} is not divisible by batch_size x GPUs = "
                f"{per_micro_step}"
            )
    if sizes[-1] != sequences:
        raise UserError(
            f"batch_ramp={text} ends with {sizes[-1]} sequences, but batch_size x GPUs x "
            f"gradient_accumulation_steps = {sequences}: make them equal"
        )

    # The steps before each stage, in proportion to those that its tokens take
    ends = [share for _, share in stages[1:]] + [1.0]
    steps = [(end - share) / size for (size, share), end in zip(stages, ends, strict=True)]
    starts = [round(max_iters * sum(steps[:i]) / sum(steps)) for i in range(len(steps))]
    return Ramp(sizes, tuple(starts), max_iters)
