"""Which runs of a text's tokens stand in the training data, word for word."""

import os

import numpy as np

from runtime.bins import DatasetError, read_meta, same_tokens, tokens_of

SLICE = 2**22  # tokens looked at together
FACTOR = 0x9E3779B97F4A7C15  # odd, its bits well mixed: 2**64 over the golden ratio


def runs(sample, tokens, n):
    """[(start in the sample, length, where in tokens)] of the longest runs, of at least n tokens, of a sample (a list)
    that stand in tokens (an array, perhaps mapped); the longest first, and none within another.

    One pass over the data: the next n tokens of each place have a hash, whose upper bits are looked up in a table of
    the sample's; what is left is compared token by token.
    """
    sample = np.asarray(sample, dtype=np.uint64)
    if len(sample) < n:
        return []
    grams = hashes(sample, n)
    starts = {}
    for start, gram in enumerate(grams.tolist()):
        starts.setdefault(gram, []).append(start)
    table = np.zeros(2**16, dtype=bool)
    table[grams >> 48] = True
    longest, seen = {}, {}  # {start: (length, where)}; {where - start: the place up to which it has been compared}
    for first in range(0, len(tokens) - n + 1, SLICE):
        there = hashes(np.asarray(tokens[first:first + SLICE + n - 1]).astype(np.uint64), n)
        places = np.flatnonzero(table[there >> 48])
        for place in places[np.isin(there[places], grams)].tolist():
            where = first + place
            for start in starts[int(there[place])]:
                if seen.get(where - start, 0) <= where:
                    length = in_common(sample[start:], tokens, where)
                    seen[where - start] = where + length
                    if length >= n and length > longest.get(start, (0,))[0]:
                        longest[start] = length, where
    kept, reached = [], 0
    for start, (length, where) in sorted(longest.items()):
        if start + length > reached:
            kept.append((start, length, where))
            reached = start + length
    return sorted(kept, key=lambda run: -run[1])


def hashes(tokens, n):
    """A hash of each n tokens in a row, (len(tokens) - n + 1,) in uint64: they are the digits of a number to the base
    FACTOR, modulo 2**64. Put together from those of 1, 2, 4, ... tokens."""
    part, width, factor = tokens, 1, FACTOR  # of the next `width` tokens of each place; FACTOR**width
    whole, done = None, 0  # of the next `done` tokens
    while True:
        if n & width:
            if whole is None:
                whole = part
            else:
                rest = part[done:]
                whole = whole[: len(rest)] * np.uint64(factor) + rest
            done += width
        if done == n:
            return whole[: len(tokens) - n + 1]
        rest = part[width:]
        part = part[: len(rest)] * np.uint64(factor) + rest
        width, factor = 2 * width, factor**2 % 2**64


def in_common(sample, tokens, where):
    """How many tokens from the sample's start on stand in tokens from `where` on."""
    there = np.asarray(tokens[where:where + len(sample)]).astype(np.uint64)
    differ = np.flatnonzero(there != sample[: len(there)])
    return int(differ[0]) if len(differ) else len(there)


def open_data(folders, data):
    """[(name, tokens)] of the training data in these folders, whose tokens must be those of data, {"tokenizer",
    "vocab_size"}. Raises DatasetError, ValueError where it is not known."""
    if not folders:
        raise ValueError("memorised needs the training data, which these weights don't name: --dataset=NAME")
    found = []
    for folder in folders:
        meta = read_meta(folder)
        if not same_tokens(meta, data):
            raise DatasetError(f"{folder} has another tokenizer than these weights: name their data, --dataset=NAME")
        found.append((os.path.basename(os.path.normpath(folder)), tokens_of(folder, meta, "train")))
    return found


def report(ids, data, n, decode):
    """The runs of a text's tokens that open_data()'s data hold: dicts with tokens (how many), start (in the text), data
    (the name), at (where in its train.bin) and text; the longest first."""
    found = [{"tokens": length, "start": start, "data": name, "at": where, "text": decode(ids[start:start + length])}
             for name, tokens in data for start, length, where in runs(ids, tokens, n)]
    return sorted(found, key=lambda run: -run["tokens"])


def in_words(found, total, n):
    """A report() on a text of `total` tokens, for people."""
    covered = len({place for run in found for place in range(run["start"], run["start"] + run["tokens"])})
    lines = [f"memorised  {covered} of {total} tokens, in runs of {n} and more"]
    lines += [f"           {run['tokens']} tokens at {run['at']:,} of {run['data']}: {run['text']!r}" for run in found]
    return "\n".join(lines)
