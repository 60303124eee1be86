"""The ramps: early steps may take fewer sequences, and shorter ones.

A batch ramp, such as "8@0, 16@0.1, 32@0.3", takes 8 sequences per step at first, 16 after a tenth
of all tokens, and 32 from three tenths on. A length ramp, such as "256@0, 512@0.2, 1024@0.45", does
the same for the tokens per sequence.

A stage of a batch ramp has whole micro-steps of batch_size sequences per GPU. If it is smaller than
one, it has one micro-step, of fewer sequences per GPU.

A length ramp cuts each sequence of block_size tokens into equal parts. A batch is counted before
the cut, so a step keeps its tokens, and the data has the same order with a length ramp as without.
"""

import math
import re
from dataclasses import dataclass, replace

from runtime.data.loader import BatchSizes
from runtime.errors import UserError
from runtime.output import counted

EXAMPLES = {
    "batch_ramp": '--batch_ramp="8@0, 16@0.1, 32@0.3"',
    "length_ramp": '--length_ramp="256@0, 512@0.2, 1024@0.45"',
}
UNITS = {"batch_ramp": "sequences", "length_ramp": "tokens"}


@dataclass(frozen=True)
class Ramp:
    """The sizes of a run's steps. All that it says depends on the iteration only.

    sizes: sequences per step, of block_size tokens and over all ranks, of each stage. starts: the
    number of iterations before each stage; the first is 0. max_iters: iterations of the run.
    lengths, length_starts: likewise, the tokens per sequence. The last length is block_size. batch:
    of a step after the ramps.
    """

    sizes: tuple[int, ...]
    starts: tuple[int, ...]
    max_iters: int
    lengths: tuple[int, ...]
    length_starts: tuple[int, ...]
    batch: BatchSizes

    def size(self, iteration: int) -> int:
        """Return the sequences of the step that follows `iteration` finished ones."""
        return value_at(iteration, self.sizes, self.starts)

    def micro(self, iteration: int) -> int:
        """Return the sequences per GPU and micro-step of the step that follows `iteration` finished
        ones: batch_size, or fewer in a stage that is smaller than one micro-step."""
        per_gpu = self.size(iteration) // self.batch.world_size
        return min(self.batch.micro, per_gpu)

    def micro_steps(self, iteration: int) -> int:
        """Return the micro-steps of the step that follows `iteration` finished ones."""
        per_micro_step = self.micro(iteration) * self.batch.world_size
        return self.size(iteration) // per_micro_step

    def length(self, iteration: int) -> int:
        """Return the tokens per sequence of the step that follows `iteration` finished ones."""
        return value_at(iteration, self.lengths, self.length_starts)

    @property
    def whole_from(self) -> int:
        """The number of iterations before the first step that has micro-batches of batch_size."""
        for size, start in zip(self.sizes, self.starts, strict=True):
            if size >= self.batch.per_micro_step:
                return start
        return self.max_iters

    @property
    def stages_without_steps(self) -> list[str]:
        """The stages that no step of the run is in, as text, such as "32 sequences"."""
        missing = []
        of_batch = ("sequences", self.sizes, self.starts)
        of_length = ("tokens", self.lengths, self.length_starts)
        for unit, values, starts in (of_batch, of_length):
            ends = (*starts[1:], self.max_iters)
            for value, start, end in zip(values, starts, ends, strict=True):
                if start >= end:
                    missing.append(f"{value:,} {unit}")
        return missing

    @property
    def possible_lengths(self) -> list[int]:
        """The lengths that a sequence can be cut into: an edited loop may take any of them."""
        block_size = self.lengths[-1]
        return [n for n in range(1, block_size + 1) if block_size % n == 0]

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

    def sequences_left(self, iteration: int) -> dict[int, int]:
        """Return {tokens per sequence: the sequences of block_size tokens} of the steps from
        `iteration` on."""
        ends = (*self.length_starts[1:], self.max_iters)
        left = {}
        for length, start, end in zip(self.lengths, self.length_starts, ends, strict=True):
            begin = max(start, iteration)
            if begin < end:
                left[length] = self.sequences_before(end) - self.sequences_before(begin)
        return left

    def describe(self) -> str:
        """Return the stages of the batch as text."""
        return f"{describe_stages(self.sizes, self.starts)} (sequences per step)"

    def describe_lengths(self) -> str:
        """Return the stages of the length as text."""
        stages = describe_stages(self.lengths, self.length_starts)
        return f"{stages} (tokens per sequence; a step keeps its tokens)"


def value_at(iteration: int, values: tuple[int, ...], starts: tuple[int, ...]) -> int:
    """Return the value of the last stage that has begun after `iteration` finished steps."""
    value = values[0]
    for of_stage, start in zip(values, starts, strict=True):
        if iteration >= start:
            value = of_stage
    return value


def describe_stages(values: tuple[int, ...], starts: tuple[int, ...]) -> str:
    """Return stages as text, such as "8 from step 0, 16 from step 267"."""
    stages = []
    for value, start in zip(values, starts, strict=True):
        stages.append(f"{value:,} from step {start:,}")
    return ", ".join(stages)


def parse_stages(setting: str, text: str) -> list[tuple[int, float]]:
    """Return [(value, share of all tokens before)] of a ramp as the user writes it.

    setting: batch_ramp or length_ramp. Raises UserError.
    """
    # One stage after the other
    unit = UNITS[setting]
    stages = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,12})@([0-9]*\.?[0-9]+)\s*", part)
        if match is None:
            form = f"{unit.upper()}@SHARE, {unit.upper()}@SHARE"
            raise UserError(
                f"{setting}={text} is not of the form {form}: write {EXAMPLES[setting]}"
            )
        stages.append((int(match[1]), float(match[2])))

    # Both numbers grow
    values = [value for value, _ in stages]
    shares = [share for _, share in stages]
    if shares[0] != 0 or shares[-1] >= 1:
        raise UserError(f"{setting}={text}: begin at share 0, and stay below 1")
    if values[0] < 1:
        raise UserError(f"{setting}={text}: each stage needs at least 1 of the {unit}")
    if values != sorted(set(values)):
        raise UserError(f"{setting}={text}: each stage needs more {unit} than the one before")
    if shares != sorted(set(shares)):
        raise UserError(f"{setting}={text}: each stage needs a larger share than the one before")
    return stages


def make_ramp(
    batch_ramp: str | None, length_ramp: str | None, max_iters: int, batch: BatchSizes
) -> Ramp:
    """Return the Ramp of a run; without a text, its steps are equal.

    batch: of a step after the ramps. Raises UserError for what doesn't fit.
    """
    sizes: tuple[int, ...] = (batch.sequences,)
    starts: tuple[int, ...] = (0,)
    if batch_ramp is not None:
        sizes, starts = stages_of_batch(batch_ramp, max_iters, batch)
    by_size = Ramp(sizes, starts, max_iters, (batch.block_size,), (0,), batch)
    if length_ramp is None:
        return by_size

    # Shares of tokens are shares of sequences, because a cut keeps the tokens
    stages = stages_of_length(length_ramp, batch.block_size)
    lengths = tuple(length for length, _ in stages)
    length_starts = tuple(iteration_at(share, by_size) for _, share in stages)
    return Ramp(sizes, starts, max_iters, lengths, length_starts, batch)


def stages_of_batch(
    text: str, max_iters: int, batch: BatchSizes
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (sequences per step, iterations before) of each stage. Raises UserError."""
    stages = parse_stages("batch_ramp", text)
    sizes = tuple(size for size, _ in stages)
    check_sizes(text, sizes, batch)
    if sizes[-1] != batch.sequences:
        raise UserError(
            f"batch_ramp={text} ends with {sizes[-1]} sequences, but batch_size x GPUs x "
            f"gradient_accumulation_steps = {batch.sequences}: use "
            f"{settings_that_fit(sizes, batch)}, or change the ramp"
        )

    # A ramp keeps max_iters, so the shares are of the tokens of the run with the ramp. A stage
    # takes steps in proportion to its share of the tokens, divided by its size
    ends = [share for _, share in stages[1:]] + [1.0]
    steps = [(end - share) / size for (size, share), end in zip(stages, ends, strict=True)]
    starts = [round(max_iters * sum(steps[:i]) / sum(steps)) for i in range(len(steps))]
    return sizes, tuple(starts)


def check_sizes(text: str, sizes: tuple[int, ...], batch: BatchSizes) -> None:
    """Raise UserError unless all GPUs can take equal parts of each step.

    text: of the ramp. sizes: sequences per step of each stage.
    """
    # Each GPU has the same number of sequences
    for size in sizes:
        if size % batch.world_size:
            raise UserError(
                f"batch_ramp={text}: {size} is not divisible by the number of GPUs, "
                f"{batch.world_size}: use {gpus_that_fit(sizes, batch)}, or change the ramp"
            )

    # Each step is made of whole micro-steps, or is smaller than one
    for size in sizes:
        if not are_split_by(batch.per_micro_step, (size,)):
            raise UserError(
                f"batch_ramp={text}: {size} is above batch_size x GPUs = {batch.per_micro_step} "
                f"and not divisible by it: use {settings_that_fit(sizes, batch)}, or change the "
                "ramp"
            )


def gpus_that_fit(sizes: tuple[int, ...], batch: BatchSizes) -> str:
    """Return the next smaller number of GPUs that divides all sizes, with settings for it."""
    # With 1, which ends the loop, it does
    number = batch.world_size - 1
    while math.gcd(*sizes) % number:
        number -= 1
    fewer = replace(batch, world_size=number)
    return f"{counted(number, 'GPU')} with {settings_that_fit(sizes, fewer)}"


def settings_that_fit(sizes: tuple[int, ...], batch: BatchSizes) -> str:
    """Return the settings with the largest batch_size, up to the run's, that fit these sizes."""
    # The last size is a whole number of micro-steps. With 1, which ends the loop, all fit, because
    # the number of GPUs divides them
    last = sizes[-1] // batch.world_size
    micro = min(batch.micro, last)
    while last % micro or not are_split_by(micro * batch.world_size, sizes):
        micro -= 1
    return f"--batch_size={micro} --gradient_accumulation_steps={last // micro}"


def are_split_by(per_micro_step: int, sizes: tuple[int, ...]) -> bool:
    """Return whether steps of so many sequences are whole micro-steps, or smaller than one."""
    return all(size <= per_micro_step or size % per_micro_step == 0 for size in sizes)


def stages_of_length(text: str, block_size: int) -> list[tuple[int, float]]:
    """Return [(tokens per sequence, share of all tokens before)] of each stage. Raises UserError.

    iteration_at() turns a share into iterations, because that depends on the batch ramp.
    """
    stages = parse_stages("length_ramp", text)
    for length, _ in stages:
        if length > block_size:
            raise UserError(f"length_ramp={text}: {length} is above block_size={block_size}")
        if block_size % length:
            raise UserError(
                f"length_ramp={text}: block_size={block_size} is not divisible by {length}, so it "
                "can't be cut into such parts"
            )
    last, _ = stages[-1]
    if last != block_size:
        raise UserError(
            f"length_ramp={text} ends with {last} tokens, but block_size={block_size}: make them "
            "equal"
        )
    return stages


def iteration_at(share: float, ramp: Ramp) -> int:
    """Return after how many iterations about this share of a run's sequences is done."""
    wanted = share * ramp.total
    # The last stage of the batch that begins before them, and the rest in its steps
    stage = 0
    for i, start in enumerate(ramp.starts):
        if ramp.sequences_before(start) <= wanted:
            stage = i
    begin = ramp.starts[stage]
    rest = wanted - ramp.sequences_before(begin)
    return min(ramp.max_iters, begin + round(rest / ramp.sizes[stage]))
