"""The data sets of a run: one, or a mixture {name: weight} of which each step has its exact share."""

import math
import os
from fractions import Fraction
from types import SimpleNamespace

from runtime.data import dataset as bins
from runtime.data.dataset import DatasetError, check_dataset

LONGEST = 100_000  # sequences after which a mixture's table begins anew


def shares(weights):
    """{name: whole number}: how many sequences of so many are of each data set; ValueError for what are no weights."""
    if not weights or not all(isinstance(name, str) for name in weights) or any(
            isinstance(w, bool) or not isinstance(w, int | float) or not 0 < w < math.inf for w in weights.values()):
        raise ValueError(f"dataset={weights}: a mixture is {{'name': weight, ...}} with weights above 0")
    exact = {name: Fraction(w).limit_denominator(10_000) for name, w in weights.items()}
    common = math.lcm(*(w.denominator for w in exact.values()))
    whole = {name: int(w * common) for name, w in exact.items()}
    divisor = math.gcd(*whole.values())
    whole = {name: count // divisor for name, count in whole.items()} if divisor else {}
    if not whole or min(whole.values()) < 1 or sum(whole.values()) > LONGEST:
        raise ValueError(f"dataset={weights}: these weights have no common measure below {LONGEST:,} sequences: round "
                         "them to two digits, none far below the others")
    return whole


def sets(dataset, root, block_size):
    """(data sets, each with name, share, folder and meta; what they are together: a meta). dataset: a folder below
    data/, a path, or {either: weight}. Raises DatasetError or ValueError."""
    if isinstance(dataset, str) and dataset.strip()[:1] in ("{", "["):
        raise ValueError(f"dataset={dataset} is no mixture: write {{'name': 0.3, 'other': 0.7}}, with numbers")
    whole = shares(dataset) if isinstance(dataset, dict) else {dataset: 1}
    found, problems = [], []
    for (name, share), folder in zip(whole.items(), bins.dataset_dirs(whole, root)):
        try:
            found.append(SimpleNamespace(name=os.path.basename(os.path.normpath(name)), share=share, folder=folder,
                                         meta=check_dataset(folder, block_size)))
        except DatasetError as error:
            problems.append(str(error))
    if problems:
        raise DatasetError("\n".join(problems))
    first = found[0].meta
    for other in found[1:]:
        if not bins.same_tokenizer(other.meta, first):
            raise DatasetError(f"{found[0].name} and {other.name} are of different tokenizers: prepare both with one")
    if len({one.name for one in found}) < len(found):
        raise DatasetError(f"dataset={dataset}: two data sets have one name; give their folders different ones")
    totals = {key: sum(one.meta[key] for one in found) for key in ("train_tokens", "val_tokens")}
    return found, {**first, **totals}


def open_tokens(one, split):
    """The memory-mapped tokens of a data set's "train" or "val"."""
    return bins.open_tokens(one.folder, one.meta, split)
