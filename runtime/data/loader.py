"""Choose the tokens that each step is trained on, and load them.

The training data is an endless list of sequences, which depends only on the seed. The position of a
run in it is the number of sequences before. On W ranks, a step of n micro-steps that begins at
`position` takes the next n * micro * W sequences, in order. Its micro-step m takes those from
position + m * micro * W on, and rank r the r-th `micro` of them:

    2 ranks, micro 2, 2 micro-steps, position 8     micro-step 0    micro-step 1
                                        rank 0        8   9          12  13
                                        rank 1       10  11          14  15

So a position means the same for any number of ranks, any micro-batch and any number of micro-steps.
The early steps of a batch ramp may have another number of micro-steps, or smaller micro-batches:

    2 ranks, micro 1, 1 micro-step, position 8      micro-step 0
                                        rank 0        8
                                        rank 1        9

Shorter sequences, of a length ramp, are equal parts of these, and positions are the same there.
A resumed run only needs this one number to continue, and repeats or skips nothing.

An epoch cuts the text into windows of block_size tokens that don't overlap, from an offset that
differs from epoch to epoch. It takes each once, in the order of a keyed permutation, which is
computed and not stored. In a mixture, each dataset has such a list, and a table interleaves them:
of as many sequences as the shares add up to, each dataset has exactly its share.

A dataset of conversations has rows instead of windows: whole conversations, packed once. Epochs
shuffle the rows.
"""

import functools
import math
import numbers
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from runtime.data.sequences import Sequences, decode_mask
from runtime.errors import UserError

STEPS_AHEAD = 2  # that are read in advance
SWITCH_INTERVAL_S = 5e-4  # Python's default is 5 ms

Located = list[tuple[Sequences, int]]  # sequences, each by its source and its place in it


@dataclass(frozen=True)
class BatchSizes:
    """How many sequences an optimizer step takes."""

    # Per GPU and micro-step, and micro-steps per GPU, unless the training loop takes other numbers
    micro: int
    accumulation: int
    world_size: int
    block_size: int

    @property
    def per_micro_step(self) -> int:
        """The sequences of one micro-step, over all ranks."""
        return self.micro * self.world_size

    @property
    def sequences(self) -> int:
        """The sequences of a step, over all ranks."""
        return self.per_micro_step * self.accumulation

    @property
    def tokens(self) -> int:
        """The targets of a step, over all ranks, those that don't count in the loss included."""
        return self.sequences * self.block_size


@functools.cache
def interleave_table(shares: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return (the dataset, how many of the same dataset precede it) of each sequence of a period.

    shares: of the datasets, in sequences per period. Both arrays are (sum(shares),). Each dataset's
    sequences are evenly spread.
    """
    period = sum(shares)
    datasets = []
    before = []
    seen = [0] * len(shares)

    # How far each dataset is behind its share, times period. The one that is furthest is next
    due = np.zeros(len(shares), np.int64)
    for _ in range(period):
        due += shares
        chosen = int(due.argmax())
        due[chosen] -= period
        datasets.append(chosen)
        before.append(seen[chosen])
        seen[chosen] += 1
    return np.array(datasets), np.array(before)


def locate_sequences(
    ids: np.ndarray, mixture: Sequence[tuple[Sequences, int]], seed: int
) -> Located:
    """Return [(source, place)] of training's sequences with these ids.

    mixture: [(source, share)].
    """
    # Which dataset each sequence is of
    shares = tuple(share for _, share in mixture)
    datasets, before = interleave_table(shares)
    period, number = np.divmod(np.asarray(ids, dtype=np.int64), sum(shares))
    chosen = datasets[number]

    # Among the sequences of its own dataset, each has another id
    own_ids = period * np.array(shares)[chosen] + before[number]
    places = np.zeros_like(own_ids)
    for j, (source, _) in enumerate(mixture):
        is_own = chosen == j
        places[is_own] = source.train_places(own_ids[is_own], seed)
    return [(mixture[j][0], place) for j, place in zip(chosen, places, strict=True)]


def read_sequences(located: Located, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of sequences: see inputs_and_targets()."""
    rows = np.stack([source.row(place) for source, place in located])
    return inputs_and_targets(rows, vocab_size)


def inputs_and_targets(rows: np.ndarray, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets, (B, T) each, int64, of rows (B, T + 1) for decode_mask().

    A target that doesn't count is -1. Raises UserError for an id outside the vocabulary.
    """
    ids, targets = decode_mask(rows)
    if ids.max() >= vocab_size:
        raise UserError(
            f"the data holds token {ids.max()}, beyond the vocabulary of {vocab_size}: prepare it "
            "again"
        )

    # The target of each position is the token after it
    inputs = ids[:, :-1].copy()
    next_tokens = targets[:, 1:].copy()
    return torch.from_numpy(inputs), torch.from_numpy(next_tokens)


def switch_threads_quickly() -> None:
    """Let a thread of this process wait less long for Python's lock.

    It is for the thread of TrainBatches, and call it once before training: a busy thread otherwise
    keeps the lock for 5 ms.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)


class TrainBatches:
    """The micro-batches of training steps, for one rank.

    mixture: [(source, share)]. position: the number of sequences before the first step, over all
    ranks. After each step it is that before the next one. waited_s: seconds that next_step() has
    waited for data so far. trained_on: {tokens per sequence: sequences of block_size tokens} that
    next_step() has returned so far, over all ranks.

    A thread reads and pins whole steps in advance, because each handover between threads waits for
    Python's lock. One handover per micro-batch took 9 of the 663 ms per step of GPT-2 XL at
    micro-batch 8 x accumulation 4.
    """

    def __init__(
        self,
        mixture: Sequence[tuple[Sequences, int]],
        position: int,
        batch: BatchSizes,
        rank: int,
        seed: int,
        vocab_size: int,
        device: torch.device | str,
    ):
        self.mixture = mixture
        self.position = position
        self.batch = batch
        self.rank = rank
        self.seed = seed
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.is_masked = any(source.is_masked for source, _ in mixture)
        self.waited_s = 0.0
        self.trained_on: dict[int, int] = {}

        self.reader = ThreadPoolExecutor(max_workers=1)
        self.ahead: deque[Future] = deque()  # the next steps, from self.position on
        self.micro_steps_ahead = batch.accumulation  # that each of these steps has
        self.micro_ahead = batch.micro  # that each of these micro-steps has
        self.read_ahead()

    def next_step(
        self, micro_steps: int, length: int | None = None, micro: int | None = None
    ) -> list[tuple[torch.Tensor, ...]]:
        """Return this rank's micro-batches of the next step, `micro_steps` of them.

        A micro-batch is (x, y) on the device, (micro, block_size) each, int64. If a source is
        masked, it is (x, y, weight): the sum of the losses of a micro-batch's targets times weight,
        averaged over these micro-steps and the ranks, is the mean over all targets of the step.

        length: tokens per sequence. Each sequence of block_size tokens is cut into such parts, one
        below the other: (micro * block_size / length, length). None: they stay whole.

        micro: sequences per rank and micro-step, before that cut. None: those of the batch.

        All ranks call this with the same numbers. If micro_steps or micro is another one than for
        the step before, what has been read ahead is read again. Raises UserError for what is not a
        whole number of at least 1, for a length that doesn't divide block_size, and for data that
        can't be used.
        """
        length = self.batch.block_size if length is None else length
        self.check_length(length)
        micro = self.batch.micro if micro is None else micro
        check_number("micro_steps", micro_steps)
        check_number("micro", micro)

        # Take the step that was read ahead, if it is of these numbers
        start = time.perf_counter()
        if micro_steps != self.micro_steps_ahead or micro != self.micro_ahead:
            for future in self.ahead:
                future.cancel()
            self.ahead.clear()
            self.micro_steps_ahead = int(micro_steps)
            self.micro_ahead = int(micro)
            self.read_ahead()
        tensors = self.ahead.popleft().result()
        self.waited_s += time.perf_counter() - start

        # Have the thread read the next one, while this one is copied to the GPU
        sequences = self.sequences_ahead
        self.position += sequences
        self.trained_on[length] = self.trained_on.get(length, 0) + sequences
        self.read_ahead()
        x, y, *weight = [tensor.to(self.device, non_blocking=True) for tensor in tensors]

        # The tokens of a sequence lie one after another, so its parts are a view
        shape = (self.micro_steps_ahead, -1, length)
        return list(zip(x.view(shape), y.view(shape), *weight, strict=True))

    @property
    def sequences_ahead(self) -> int:
        """The sequences of each step that is read ahead, over all ranks."""
        return self.micro_steps_ahead * self.micro_ahead * self.batch.world_size

    def check_length(self, length: int) -> None:
        """Raise UserError unless the sequences can be cut into parts of so many tokens."""
        block_size = self.batch.block_size
        is_whole = isinstance(length, numbers.Integral) and length >= 1
        if not is_whole or block_size % length:
            raise UserError(
                f"a length of {length} doesn't divide block_size={block_size}: change the training "
                "loop"
            )
        if self.is_masked and length != block_size:
            raise UserError(
                f"a length of {length} would cut conversations: change the training loop"
            )

    def read_ahead(self) -> None:
        """Have the thread read until STEPS_AHEAD steps wait, all of the same numbers."""
        while len(self.ahead) < STEPS_AHEAD:
            begin = self.position + len(self.ahead) * self.sequences_ahead
            future = self.reader.submit(
                self.read_step, begin, self.micro_steps_ahead, self.micro_ahead
            )
            self.ahead.append(future)

    def read_step(self, begin: int, micro_steps: int, micro: int) -> list[torch.Tensor]:
        """Return this rank's part of the step that begins at a position. Runs on the thread.

        x, y: (micro_steps, micro, block_size), int64. weight, if masked: (micro_steps,).
        """
        # In each micro-step, a rank takes a run of sequences: see the table above
        batch = self.batch
        ids = begin + np.arange(micro_steps * micro * batch.world_size)
        by_rank = ids.reshape(micro_steps, batch.world_size, micro)
        own_ids = by_rank[:, self.rank].ravel()
        located = locate_sequences(own_ids, self.mixture, self.seed)
        x, y = read_sequences(located, self.vocab_size)
        shape = (micro_steps, micro, batch.block_size)
        tensors = [x.view(shape), y.view(shape)]

        # Each target of the step weighs the same, on whichever rank and in whichever micro-step
        if self.is_masked:
            weight = micro_steps * batch.world_size / self.count_targets(ids)
            tensors.append(torch.full((micro_steps,), weight))
        if self.device.type == "cuda":
            tensors = [tensor.pin_memory() for tensor in tensors]
        return tensors

    def count_targets(self, ids: np.ndarray) -> int:
        """Return how many targets count in the loss of the sequences with these ids."""
        located = locate_sequences(ids, self.mixture, self.seed)
        return sum(source.count_targets(place) for source, place in located)


def check_number(name: str, number: object) -> None:
    """Raise UserError for what is not a whole number of at least 1. name: what it is."""
    if not isinstance(number, numbers.Integral) or number < 1:
        raise UserError(
            f"{name}={number} must be a whole number of at least 1: change the training loop"
        )


def eval_batches(
    source: Sequences,
    n: int,
    batch: BatchSizes,
    rank: int,
    vocab_size: int,
    device: torch.device | str,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield this rank's (x, y) of the n sequences of an evaluation.

    Every rank gets as many batches of one size, padded with ignored sequences: at ZeRO-3 a forward
    is collective, and a new batch size would recompile the blocks.
    """
    # This rank's part, padded to whole batches
    places = source.eval_places(n)
    per_rank = math.ceil(len(places) / batch.world_size)
    mine = places[rank * per_rank : (rank + 1) * per_rank]
    n_batches = math.ceil(per_rank / batch.micro)
    padded = np.pad(mine, (0, n_batches * batch.micro - len(mine)))

    # A batch at a time: an evaluation may be longer than memory allows
    for first in range(0, len(padded), batch.micro):
        located = [(source, place) for place in padded[first : first + batch.micro]]
        x, y = read_sequences(located, vocab_size)

        # Padding repeats sequence 0, so its targets must not count
        n_real = max(0, len(mine) - first)
        y[n_real:] = -1
        yield x.to(device), y.to(device)
