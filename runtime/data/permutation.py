"""Shuffle without storing an order: a permutation that is computed index by index."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

# Of Steele et al., 2014: what is added first, then the two factors
SPLITMIX64 = [np.uint64(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)]
ROUNDS = 6  # of the Feistel network


def splitmix64(x: Any) -> Any:
    """Hash uint64 to uint64, elementwise, with splitmix64's finalizer."""
    increment, first_factor, second_factor = SPLITMIX64
    with np.errstate(over="ignore"):
        x = np.asarray(x).astype(np.uint64) + increment
        x = (x ^ (x >> np.uint64(30))) * first_factor
        x = (x ^ (x >> np.uint64(27))) * second_factor
    return x ^ (x >> np.uint64(31))


def mixed_seed(*numbers: int) -> int:
    """Return a seed below 2**63 that depends on each number and on their order."""
    seed = np.uint64(0)
    for number in numbers:
        seed = splitmix64(seed ^ np.uint64(number))
    return int(seed) >> 1


def feistel_permute(i: ArrayLike, n: int, key: ArrayLike) -> np.ndarray:
    """Return the indices i under a permutation of range(n) that `key` chooses, as int64.

    key: a number, or an array like i with one for each. It is a Feistel network over the next power
    of four. Results beyond n are permuted again until they are inside (Black and Rogaway, 2002).
    The memory doesn't depend on n.
    """
    i = np.asarray(i, dtype=np.uint64)
    key = np.asarray(key, dtype=np.uint64)
    i, key = np.broadcast_arrays(i, key)

    # An index has two halves of so many bits
    bits = np.uint64(max(1, (int(n - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << bits) - np.uint64(1)

    # All are permuted once, and those that come out beyond n again
    permuted = i.copy()
    outside = np.ones(i.shape, dtype=bool)
    while outside.any():
        left = permuted[outside] >> bits
        right = permuted[outside] & mask
        for number in range(ROUNDS):
            round_key = splitmix64(key[outside] + np.uint64(number))
            mixed = splitmix64(right ^ round_key) & mask
            left, right = right, left ^ mixed
        permuted[outside] = (left << bits) | right
        outside = permuted >= n
    return permuted.astype(np.int64)


def shuffle_epochs(ids: ArrayLike, n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (indices, keys) of items of an endless list, whose epochs have all n indices once.

    ids: the items' numbers in the list. indices: below n, int64, in another order in each epoch.
    keys: a random uint64 of the epoch of each item.
    """
    epoch, index = np.divmod(np.asarray(ids, dtype=np.int64), n)
    keys = splitmix64(splitmix64(seed) ^ epoch.astype(np.uint64))
    return feistel_permute(index, n, keys), keys
