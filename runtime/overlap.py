"""How much of validation stands in training too, although no document is in both: runs of tokens, found by their hash.

Constant memory: up to MOST runs of validation, evenly spread, are looked for at every place of training.
"""

import functools

import numpy as np

from runtime.data.dataset import Joined
from runtime.halfdone import grown
from runtime.workers import in_order

MOST = 2**16  # runs looked for: their share is known to within 0.4%
SLICE = 2**20  # tokens of training looked at in one piece
FACTOR, BITS = 0x9E3779B97F4A7C15, 22


def run_hashes(ids, n):
    """The 64-bit hashes of all runs of n tokens, a power of two, along the last axis of an array of ids."""
    hashes, factor, width = ids.astype(np.uint64) * np.uint64(FACTOR), FACTOR, 1
    hashes ^= hashes >> np.uint64(29)
    while width < n:
        hashes = hashes[..., :-width] * np.uint64(factor) + hashes[..., width:]
        factor, width = factor * factor % 2**64, 2 * width
    return hashes


def tokens(partial, split, dtype):
    """Opened anew for each slice: what has been looked at would else count as this process's memory."""
    return Joined([np.memmap(path, dtype, mode="r") for path in grown(partial, split)])


@functools.cache
def looked_for(partial, dtype, n):
    """(hashes of validation's runs; which of them, sorted; the beginnings that they have, as a table)."""
    val = tokens(partial, "val", dtype)
    starts = np.linspace(0, len(val) - n, min(MOST, len(val) // n)).astype(np.int64)
    hashes = np.array([run_hashes(val[start : start + n], n)[0] for start in starts.tolist()], np.uint64)
    table = np.zeros(2**BITS, bool)
    table[hashes >> np.uint64(64 - BITS)] = True
    return hashes, np.unique(hashes), table


def found_in(partial, dtype, n, start):
    """The hashes looked for that training has at its places from `start` on, SLICE of them."""
    _, wanted, table = looked_for(partial, dtype, n)
    hashes = run_hashes(tokens(partial, "train", dtype)[start : start + SLICE + n - 1], n)
    hashes = hashes[table[hashes >> np.uint64(64 - BITS)]]
    return np.intersect1d(hashes, wanted)


def overlap(pool, partial, dtype, n):
    """{"run": n, "looked_for": runs of n tokens of validation, "found": those that training has somewhere}."""
    train, val = (tokens(partial, split, dtype) for split in ("train", "val"))
    if min(len(train), len(val)) < n:
        return {"run": n, "looked_for": 0, "found": 0}
    found, tasks = set(), ((None, (found_in, partial, dtype, n, start)) for start in range(0, len(train), SLICE))
    for _, hashes in in_order(pool, tasks):
        found.update(hashes.tolist())
    runs = looked_for(partial, dtype, n)[0].tolist()
    return {"run": n, "looked_for": len(runs), "found": sum(run in found for run in runs)}
