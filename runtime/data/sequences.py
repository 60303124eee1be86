"""The two kinds of data that a run trains on: windows of one long text, and packed conversations.

Both give rows of block_size + 1 tokens. In a row, a token that doesn't count in the loss is ~id.
"""

from typing import Protocol

import numpy as np

from runtime.data.dataset import BEGINS, COUNTS, Dataset, open_mask, open_tokens
from runtime.data.permutation import feistel_permute, shuffle_epochs, splitmix64
from runtime.errors import UserError


def decode_mask(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (ids, targets) of rows, as int64 of the same shape. A target that doesn't count is -1.

    A row holds ~id, which is -1 - id, for a token that doesn't count. So one array has the ids and
    the mask, also for id 0, which has no negative. No branch decodes it: of a number and its ~, the
    id is the one that isn't negative, and each ~id is -1 or less.
    """
    rows = rows.astype(np.int64)
    ids = np.maximum(rows, ~rows)
    targets = np.maximum(rows, -1)
    return ids, targets


class Sequences(Protocol):
    """The sequences of a split of a dataset. Each has a place, from which its row is read."""

    block_size: int
    is_masked: bool  # only some targets count in the loss
    cut: int  # conversations that are longer than a row, and end with it
    dropped: int  # those of them in which nothing is left that counts

    @property
    def per_epoch(self) -> int:
        """The number of sequences of an epoch."""

    def train_places(self, ids: np.ndarray, seed: int) -> np.ndarray:
        """Return the places of training's sequences with these ids, int64."""

    def eval_places(self, n: int) -> np.ndarray:
        """Return n places, evenly spread, int64, or fewer if n don't fit without overlap."""

    def row(self, place: int) -> np.ndarray:
        """Return the sequence at a place, (block_size + 1,), integers for decode_mask()."""

    def count_targets(self, place: int) -> int:
        """Return how many targets of the sequence at a place count in the loss."""

    def all_rows(self) -> list[np.ndarray]:
        """Return rows, the last of which may be shorter, in which each token is a target once."""


class TokenStream(Sequences):
    """One long text. A sequence is a window of it, and its place is the window's offset.

    The windows of an epoch don't overlap.

    tokens: (N,), integers, with N > block_size.
    """

    is_masked = False
    cut = 0
    dropped = 0

    def __init__(self, tokens: np.ndarray, block_size: int):
        self.tokens = tokens
        self.block_size = block_size

    @property
    def per_epoch(self) -> int:
        """The number of windows of an epoch."""
        # Room for the last target, and for any shift below block_size
        return max(1, (len(self.tokens) - self.block_size) // self.block_size)

    @property
    def max_shift(self) -> int:
        """The most tokens before an epoch's first window.

        Each epoch shifts its windows by a different amount, so their borders move.
        """
        # One token more than the windows have: the last one's target
        left_over = len(self.tokens) - 1 - self.per_epoch * self.block_size
        return min(self.block_size - 1, left_over)

    def train_places(self, ids: np.ndarray, seed: int) -> np.ndarray:
        """Return the offsets of training's windows with these ids, int64."""
        # All windows of an epoch have its shift
        index, keys = shuffle_epochs(ids, self.per_epoch, seed)
        shift = splitmix64(keys) % np.uint64(self.max_shift + 1)
        return index * self.block_size + shift.astype(np.int64)

    def eval_places(self, n: int) -> np.ndarray:
        """Return the offsets of n windows, evenly spread, or fewer if n would overlap."""
        last_token = len(self.tokens) - 1

        # The last token is only a target
        n = min(n, last_token // self.block_size)
        return np.linspace(0, last_token - self.block_size, n).astype(np.int64)

    def row(self, place: int) -> np.ndarray:
        """Return a window, (block_size + 1,), in the type of the tokens: all of it counts."""
        return self.tokens[place : place + self.block_size + 1]

    def count_targets(self, place: int) -> int:
        """Return block_size."""
        return self.block_size

    def all_rows(self) -> list[np.ndarray]:
        """Return windows, each of which begins with the last token of the one before."""
        return [self.row(start) for start in range(0, len(self.tokens) - 1, self.block_size)]


class Conversations(Sequences):
    """Conversations, packed into rows of block_size + 1 tokens once. A place is a row's number.

    Each row begins with a conversation and has as many more as fit, in a fixed shuffled order. The
    rest of it is padding. A longer conversation is cut at its end, `cut` of them. One in which
    nothing is left that counts in the loss is left out, `dropped` of them.

    tokens: (N,), integers. mask: (N,), uint8, COUNTS and BEGINS of each token. counts: the number
    of targets in each row. Raises UserError, with `name`, if there are no rows.
    """

    is_masked = True

    def __init__(self, name: str, tokens: np.ndarray, mask: np.ndarray, block_size: int):
        self.tokens = tokens
        self.mask = mask
        self.block_size = block_size
        length = block_size + 1

        # Where each conversation begins and ends
        begins = np.flatnonzero(mask & BEGINS)
        whole_ends = np.append(begins[1:], len(tokens))
        ends = np.minimum(whole_ends, begins + length)
        self.cut = int((whole_ends > ends).sum())
        spans = np.stack([begins, ends], axis=1)

        # How many targets each has. reduceat adds up from each border to the next, so every second
        # sum is a conversation's. It takes no border beyond the last element
        counted = np.append(mask & COUNTS, np.uint8(0))
        targets = np.add.reduceat(counted, spans.ravel(), dtype=np.int64)[::2]
        self.dropped = int((targets == 0).sum())
        if self.dropped == len(spans):
            raise UserError(
                f"{name} has no answer within block_size={block_size} ({len(spans):,} "
                "conversations): use a larger --block_size, or prepare more conversations for this "
                "split"
            )

        # Those that have some, in an order that is the same in every run
        kept = np.flatnonzero(targets)
        order = kept[feistel_permute(np.arange(len(kept)), len(kept), 0)]
        self.spans = spans[order]

        lengths = self.spans[:, 1] - self.spans[:, 0]
        self.firsts = first_of_each_row(lengths, length)
        self.counts = np.add.reduceat(targets[order], self.firsts[:-1])

    @property
    def per_epoch(self) -> int:
        """The number of rows."""
        return len(self.counts)

    def train_places(self, ids: np.ndarray, seed: int) -> np.ndarray:
        """Return the rows of training's sequences with these ids, int64."""
        index, _ = shuffle_epochs(ids, self.per_epoch, seed)
        return index

    def eval_places(self, n: int) -> np.ndarray:
        """Return n rows, evenly spread over all, or all."""
        # Rows don't overlap, so n is at most their number
        n = min(n, self.per_epoch)
        return np.linspace(0, self.per_epoch - 1, n).astype(np.int64)

    def row(self, place: int) -> np.ndarray:
        """Return a row, (block_size + 1,), as int64. A token that doesn't count is ~id."""
        # Where the tokens of its conversations are
        spans = self.spans[self.firsts[place] : self.firsts[place + 1]]
        taken = np.concatenate([np.arange(begin, end) for begin, end in spans])
        ids = self.tokens[taken].astype(np.int64)
        counts = self.mask[taken] & COUNTS

        # Padding is token 0, which doesn't count
        row = np.full(self.block_size + 1, ~0)
        row[: len(ids)] = np.where(counts, ids, ~ids)
        return row

    def count_targets(self, place: int) -> int:
        """Return how many targets of a row count."""
        return int(self.counts[place])

    def all_rows(self) -> list[np.ndarray]:
        """Return all rows."""
        return [self.row(place) for place in range(self.per_epoch)]


def first_of_each_row(lengths: np.ndarray, room: int) -> np.ndarray:
    """Return the number of the first item of each row, and that of all items: (rows + 1,).

    lengths: of the items, (N,), none above `room`. A row takes as many items as fit, in order.
    """
    # The lengths of all items before each one say where a row that begins with it ends
    lengths_before = np.append(0, np.cumsum(lengths))
    firsts = [0]
    while firsts[-1] < len(lengths):
        end_of_row = lengths_before[firsts[-1]] + room

        # The last item that ends within the row
        fitting = np.searchsorted(lengths_before, end_of_row, side="right") - 1
        firsts.append(int(fitting))
    return np.array(firsts)


def open_sequences(dataset: Dataset, split: str, block_size: int) -> Sequences:
    """Return the sequences of "train" or "val", memory-mapped. Raises UserError."""
    tokens = open_tokens(dataset, split)
    if "template" not in dataset.meta:
        return TokenStream(tokens, block_size)
    mask = open_mask(dataset, split)
    return Conversations(f"{dataset.name}/{split}.bin", tokens, mask, block_size)
