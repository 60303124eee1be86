"""Choose the tokens that each step is trained on, and load them.

The training data is an endless list of sequences, which depends only on the seed. The position of a run in it is the
number of sequences before. On W ranks, a step of n micro-steps that begins at `position` takes the next n * micro * W
sequences, in order. Its micro-step m takes those from position + m * micro * W on, and rank r the r-th `micro` of them:

    2 ranks, micro 2, 2 micro-steps, position 8     micro-step 0    micro-step 1
                                        rank 0        8   9          12  13
                                        rank 1       10  11          14  15

So a position means the same for any number of ranks, any micro-batch and any number of micro-steps. A resumed run only
needs this one number to continue, and repeats or skips nothing.

Each epoch has every window of block_size tokens once, in the order of a keyed permutation, which is computed and not
stored. In a mixture, each dataset has such a list, and a table interleaves them: of as many sequences as the shares add
up to, each dataset has exactly its share.

A dataset of conversations has rows instead of windows: whole conversations, packed once. Epochs shuffle the rows."""

import functools
import numbers
import sys
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from runtime.data.dataset import BEGINS, COUNTS, open_mask, open_tokens
from runtime.errors import UserError

STEPS_AHEAD = 2  # that are read in advance
SPLITMIX64 = [np.uint64(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)]


@dataclass(frozen=True)
class Batch:
    """The sequences of one optimizer step."""

    micro: int  # per GPU and micro-step
    accumulation: int  # micro-steps per GPU, unless the training loop makes another number
    world_size: int
    block_size: int

    @property
    def per_micro_step(self):
        """The sequences of one micro-step, over all ranks."""
        return self.micro * self.world_size

    @property
    def sequences(self):
        return self.per_micro_step * self.accumulation

    @property
    def tokens(self):
        return self.sequences * self.block_size


def splitmix64(x):
    """Hash uint64 to uint64, elementwise, with splitmix64's finalizer (Steele et al., 2014)."""
    with np.errstate(over="ignore"):
        x = np.asarray(x).astype(np.uint64) + SPLITMIX64[0]
        x = (x ^ (x >> np.uint64(30))) * SPLITMIX64[1]
        x = (x ^ (x >> np.uint64(27))) * SPLITMIX64[2]
    return x ^ (x >> np.uint64(31))


def mixed_seed(*numbers):
    """Return a seed below 2**63 that depends on each number and on their order."""
    seed = np.uint64(0)
    for number in numbers:
        seed = splitmix64(seed ^ np.uint64(number))
    return int(seed) >> 1


def feistel_permute(i, n, key):
    """Return the indices i under a permutation of range(n) that `key`, a number or an array like i, chooses. It is a
    Feistel network of six rounds over the next power of four. Results beyond n are permuted again until they are inside
    (Black and Rogaway, 2002). The memory doesn't depend on n."""
    bits = np.uint64(max(1, (int(n - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << bits) - np.uint64(1)
    i, key = np.broadcast_arrays(np.asarray(i, dtype=np.uint64), np.asarray(key, dtype=np.uint64))
    out, outside = i.copy(), np.ones(i.shape, dtype=bool)
    while outside.any():
        left, right = out[outside] >> bits, out[outside] & mask
        for round_key in range(6):
            left, right = right, left ^ (splitmix64(right ^ splitmix64(key[outside] + np.uint64(round_key))) & mask)
        out[outside] = (left << bits) | right
        outside = out >= n
    return out.astype(np.int64)


class Conversations:
    """The conversations of a split, in rows of block_size + 1 tokens. Each row begins with a conversation and has as
    many more as fit, in a fixed shuffled order. The rest of it is padding.

    A longer conversation is cut at its end, `cut` of them. One in which nothing is left that counts in the loss is left
    out, `dropped` of them. counts: the number of targets in each row. Raises UserError if there are no rows."""

    def __init__(self, name, tokens, mask, block_size):
        self.tokens, self.mask, self.length = tokens, mask, block_size + 1
        begins = np.flatnonzero(mask & BEGINS)
        ends = np.append(begins[1:], len(tokens))
        self.cut = int((ends - begins > self.length).sum())
        spans = np.stack([begins, np.minimum(ends, begins + self.length)], axis=1)
        counted = np.append(mask & COUNTS, np.uint8(0))  # reduceat takes no end beyond the last element
        counts = np.add.reduceat(counted, spans.ravel(), dtype=np.int64)[::2]
        self.dropped = int((counts == 0).sum())
        if self.dropped == len(spans):
            raise UserError(f"{name} has no answer within block_size={block_size} ({len(spans):,} conversations): use "
                            "a larger --block_size, or prepare more conversations for this split")
        order = np.flatnonzero(counts)
        order = order[feistel_permute(np.arange(len(order)), len(order), 0)]
        self.spans = spans[order]
        totals, firsts = np.append(0, np.cumsum(self.spans[:, 1] - self.spans[:, 0])), [0]
        while firsts[-1] < len(order):
            firsts.append(int(np.searchsorted(totals, totals[firsts[-1]] + self.length, "right")) - 1)
        self.firsts = np.array(firsts)  # of each row, and the end
        self.counts = np.add.reduceat(counts[order], self.firsts[:-1])

    def row(self, i):
        """Return the ids of a row, (block_size + 1,), as int64. A token that doesn't count is ~id."""
        row, spans = np.full(self.length, ~0), self.spans[self.firsts[i] : self.firsts[i + 1]]
        places = np.concatenate([np.arange(begin, end) for begin, end in spans])
        ids = self.tokens[places].astype(np.int64)
        row[: len(ids)] = np.where(self.mask[places] & COUNTS, ids, ~ids)
        return row


def open_sequences(dataset, split, block_size):
    """Return the tokens of a Dataset's split as a memory-mapped array, or its Conversations. Raises UserError."""
    tokens = open_tokens(dataset, split)
    if "template" not in dataset.meta:
        return tokens
    return Conversations(f"{dataset.name}/{split}.bin", tokens, open_mask(dataset, split), block_size)


def extent(source, block_size):
    """Return (tokens, block_size) of a source. A row of Conversations stands for one token."""
    return (len(source.counts) + 1, 1) if isinstance(source, Conversations) else (len(source), block_size)


def windows_per_epoch(n_tokens, block_size):
    """Return (windows, largest shift). Each epoch shifts its windows by a different amount, so their borders move."""
    windows = max(1, (n_tokens - block_size) // block_size)
    return windows, min(block_size - 1, n_tokens - 1 - windows * block_size)


def train_offsets(ids, n_tokens, block_size, seed):
    """Return the offsets in the data of the sequences with these ids, int64."""
    windows, max_shift = windows_per_epoch(n_tokens, block_size)
    epoch, index = np.divmod(np.asarray(ids, dtype=np.int64), windows)
    key = splitmix64(splitmix64(seed) ^ epoch.astype(np.uint64))
    shift = (splitmix64(key) % np.uint64(max_shift + 1)).astype(np.int64)
    return feistel_permute(index, windows, key) * block_size + shift


@functools.cache
def interleave_table(shares):
    """Return two arrays (sum(shares),): each sequence's dataset, evenly spread, and how many of the same precede it."""
    due, table, seen = np.zeros(len(shares), np.int64), [], [0] * len(shares)
    for _ in range(sum(shares)):
        due += shares
        chosen = int(due.argmax())
        due[chosen] -= sum(shares)
        table.append((chosen, seen[chosen]))
        seen[chosen] += 1
    return np.array(table).T


def locate_sequences(ids, sources, block_size, seed):
    """Return arrays (dataset, offset or row) of the sequences with these ids; sources: [(tokens, share)]."""
    shares = tuple(share for _, share in sources)
    which, before = interleave_table(shares)
    period, place = np.divmod(np.asarray(ids, dtype=np.int64), sum(shares))
    chosen = which[place]
    own_ids, offsets = period * np.array(shares)[chosen] + before[place], np.zeros_like(period)
    for j, (tokens, _) in enumerate(sources):
        offsets[chosen == j] = train_offsets(own_ids[chosen == j], *extent(tokens, block_size), seed)
    return chosen, offsets


def eval_offsets(n_tokens, block_size, n):
    """Return the offsets of n windows, evenly spread over the data, or fewer if n don't fit without overlap."""
    n = min(n, (n_tokens - 1) // block_size)
    return np.linspace(0, n_tokens - 1 - block_size, n).astype(np.int64)


def read_windows(windows, block_size, vocab_size):
    """Return inputs and targets (B, T), int64, of [(tokens, offset)]. A target that doesn't count is -1."""
    rows = np.stack([tokens.row(start) if isinstance(tokens, Conversations) else tokens[start : start + block_size + 1]
                     for tokens, start in windows]).astype(np.int64)
    ids = np.maximum(rows, ~rows)
    if ids.max() >= vocab_size:
        raise UserError(f"the data holds token {ids.max()}, beyond the vocabulary of {vocab_size}: prepare it again")
    return torch.from_numpy(ids[:, :-1].copy()), torch.from_numpy(np.maximum(rows[:, 1:], -1))


class TrainBatches:
    """The micro-batches of training steps, for one rank.

    sources: [(tokens or Conversations, share)]. position: the number of sequences before the first
    step, over all ranks. After each step it is that before the next one. waited_s: seconds that
    next_step() has waited for data so far.

    A thread reads and pins whole steps in advance, because each handover between threads waits for
    Python's lock. One handover per micro-batch took 9 of the 663 ms per step of GPT-2 XL at
    micro-batch 8 x accumulation 4.
    """

    def __init__(
        self,
        sources: list[tuple[Any, int]],
        position: int,
        batch: Batch,
        rank: int,
        seed: int,
        vocab_size: int,
        device: torch.device | str,
    ):
        self.sources = sources
        self.position = position
        self.batch = batch
        self.rank = rank
        self.seed = seed
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.is_masked = any(isinstance(tokens, Conversations) for tokens, _ in sources)
        self.waited_s = 0.0

        sys.setswitchinterval(5e-4)  # until a busy thread releases the lock; the default is 5 ms
        self.reader = ThreadPoolExecutor(max_workers=1)
        self.ahead = deque()  # futures of the next steps, from self.position on
        self.micro_steps_ahead = batch.accumulation  # of each of them
        self.read_ahead()

    def next_step(self, micro_steps: int) -> list[tuple[torch.Tensor, ...]]:
        """Return this rank's micro-batches of the next step, `micro_steps` of them.

        A micro-batch is (x, y) on the device, (micro, block_size) each, int64. If a source is
        Conversations, it is (x, y, weight): the sum of the losses of a micro-batch's targets times
        weight, averaged over these micro-steps and the ranks, is the mean over all targets of the
        step.

        All ranks call this with the same number. If it is another one than for the step before,
        what has been read ahead is read again. Raises UserError for what is not a whole number of
        at least 1, and for data that can't be used.
        """
        if not isinstance(micro_steps, numbers.Integral) or micro_steps < 1:
            raise UserError(
                f"micro_steps={micro_steps} must be a whole number of at least 1: change the training loop"
            )

        start = time.perf_counter()
        if micro_steps != self.micro_steps_ahead:
            for future in self.ahead:
                future.cancel()
            self.ahead.clear()
            self.micro_steps_ahead = int(micro_steps)
            self.read_ahead()
        tensors = self.ahead.popleft().result()
        self.waited_s += time.perf_counter() - start

        self.position += self.micro_steps_ahead * self.batch.per_micro_step
        self.read_ahead()
        on_device = [tensor.to(self.device, non_blocking=True) for tensor in tensors]
        return list(zip(*on_device, strict=True))

    def read_ahead(self) -> None:
        """Have the thread read until STEPS_AHEAD steps wait, all of micro_steps_ahead."""
        per_step = self.micro_steps_ahead * self.batch.per_micro_step
        while len(self.ahead) < STEPS_AHEAD:
            begin = self.position + len(self.ahead) * per_step
            self.ahead.append(self.reader.submit(self.read_step, begin, self.micro_steps_ahead))

    def read_step(self, begin: int, micro_steps: int) -> list[torch.Tensor]:
        """Return this rank's part of the step that begins at a position. Runs on the thread.

        x, y: (micro_steps, micro, block_size), int64. weight, if masked: (micro_steps,).
        """
        batch = self.batch
        ids = begin + np.arange(micro_steps * batch.per_micro_step)
        by_rank = ids.reshape(micro_steps, batch.world_size, batch.micro)
        windows = self.locate(by_rank[:, self.rank].ravel())
        shape = (micro_steps, batch.micro, batch.block_size)
        x, y = read_windows(windows, batch.block_size, self.vocab_size)
        tensors = [x.view(shape), y.view(shape)]
        if self.is_masked:
            weight = micro_steps * batch.world_size / self.count_targets(ids)
            tensors.append(torch.full((micro_steps,), weight))
        if self.device.type == "cuda":
            tensors = [tensor.pin_memory() for tensor in tensors]
        return tensors

    def locate(self, ids: np.ndarray) -> list[tuple[Any, int]]:
        """Return [(tokens or Conversations, offset or row)] of the sequences with these ids."""
        which, offsets = locate_sequences(ids, self.sources, self.batch.block_size, self.seed)
        return [(self.sources[j][0], offset) for j, offset in zip(which, offsets, strict=True)]

    def count_targets(self, ids: np.ndarray) -> int:
        """Return how many targets count in the loss of the sequences with these ids."""
        total = 0
        for tokens, row in self.locate(ids):
            if isinstance(tokens, Conversations):
                total += tokens.counts[row]
            else:
                total += self.batch.block_size
        return int(total)


def eval_batches(tokens, n, batch, rank, vocab_size, device):
    """Yield this rank's (x, y) of the n windows of an evaluation. Every rank gets as many batches of one size, padded
    with ignored windows: at ZeRO-3 a forward is collective, and a new batch size would recompile the blocks."""
    offsets = eval_offsets(*extent(tokens, batch.block_size), n)
    per_rank = -(-len(offsets) // batch.world_size)
    mine = offsets[rank * per_rank : (rank + 1) * per_rank]
    padded = np.pad(mine, (0, -(-per_rank // batch.micro) * batch.micro - len(mine)))
    for i in range(0, len(padded), batch.micro):
        x, y = read_windows([(tokens, offset) for offset in padded[i : i + batch.micro]], batch.block_size, vocab_size)
        y[max(0, len(mine) - i) :] = -1
        yield x.to(device), y.to(device)
