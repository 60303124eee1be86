"""The datasets of a run: one, or several that are mixed by weight."""

import contextlib
import math
import os
from fractions import Fraction
from typing import Any

from runtime.data.dataset import Dataset, check_dataset
from runtime.data.folders import dataset_dir
from runtime.data.same_ids import have_same_ids
from runtime.data.tokenizer import end_of_text
from runtime.errors import UserError

MAX_MIXTURE_PERIOD = 100_000  # sequences after which a mixture's pattern repeats


def mixture_shares(weights: Any) -> dict[str, int]:
    """Return the shares of a mixture {name: weight} as whole numbers, {name: share}.

    Of as many sequences as the shares add up to, each dataset gets exactly its share. Raises
    UserError.
    """
    if not is_mixture(weights):
        raise UserError(
            f"dataset={weights} is not a mixture: write {{'name': 0.3, 'other': 0.7}}, all above 0"
        )
    # Each weight as a fraction of all, and the number of sequences of which all fractions are whole
    total = sum(Fraction(weight) for weight in weights.values())
    exact = {}
    for name, weight in weights.items():
        part = Fraction(weight) / total
        exact[name] = part.limit_denominator(MAX_MIXTURE_PERIOD)
    period = math.lcm(*(part.denominator for part in exact.values()))
    shares: dict[str, int] = {name: int(part * period) for name, part in exact.items()}

    # A weight that is too small for such a period has been rounded
    needed = math.ceil(total / Fraction(min(weights.values())))
    if max(sum(shares.values()), needed) > MAX_MIXTURE_PERIOD:
        raise UserError(
            f"dataset={weights} repeats after over {MAX_MIXTURE_PERIOD:,} sequences: round the "
            "weights"
        )
    return shares


def is_mixture(weights: object) -> bool:
    """Return whether a value is {name: weight}, with weights above 0."""
    # An empty mixture is none
    if not isinstance(weights, dict) or not weights:
        return False
    for name, weight in weights.items():
        if not isinstance(name, str) or not isinstance(weight, int | float):
            return False
        if not 0 < weight < math.inf:
            return False
    return True


def open_datasets(dataset: str | dict[str, float], block_size: int) -> tuple[list[Dataset], dict]:
    """Check datasets and return (Datasets, what they have in common, as a meta.json has it).

    dataset: a folder below data/, a path, or {either: weight}. Raises UserError or ValueError.
    """
    # One dataset is a mixture of one
    if isinstance(dataset, str) and not dataset.startswith("{"):
        shares = {dataset: 1}
    else:
        shares = mixture_shares(dataset)

    # Each by itself
    datasets = []
    problems = []
    for path, share in shares.items():
        name = os.path.basename(os.path.normpath(path))
        folder = dataset_dir(path)
        try:
            meta = check_dataset(folder, block_size)
        except UserError as error:
            problems.append(str(error))
        else:
            datasets.append(Dataset(name, share, folder, meta))
    if problems:
        raise UserError("\n".join(problems))

    # Whether they fit together
    first = datasets[0]
    for other in datasets:
        if not same_tokenizer(other.meta, first.meta):
            raise UserError(
                f"{first.name} and {other.name} have different tokenizers: prepare both with the "
                "same"
            )

    # Plain texts have no template, and go with any
    with_template = [data for data in datasets if "template" in data.meta]
    for other in with_template:
        one = with_template[0]
        if other.meta["template"] != one.meta["template"]:
            raise UserError(
                f"{one.name} and {other.name} have different chat templates: prepare both with the "
                "same"
            )
    if len({data.name for data in datasets}) < len(datasets):
        raise UserError(
            f"dataset={dataset} has two datasets of the same name: rename one of their folders"
        )

    return datasets, _in_common(datasets)


def _in_common(datasets: list[Dataset]) -> dict:
    """Return what the data of a run is, as a meta.json has it, with "datasets", a dict of each."""
    # What each dataset is, as a checkpoint records it
    templates = [data.meta["template"] for data in datasets if "template" in data.meta]
    parts = []
    for data in datasets:
        part: dict[str, Any] = {"share": data.share}
        for key in ("train_tokens", "val_tokens", "files"):
            part[key] = data.meta.get(key)
        parts.append(part)
    first = datasets[0].meta
    return {
        "tokenizer": first["tokenizer"],
        "vocab_size": first["vocab_size"],
        "template": templates[0] if templates else None,
        "train_tokens": sum(data.meta["train_tokens"] for data in datasets),
        "val_tokens": sum(data.meta["val_tokens"] for data in datasets),
        "datasets": parts,
    }


def same_data(a: list[dict], b: list[dict]) -> bool:
    """Return whether two lists of "datasets" are the same, wherever they lie.

    nanoGPT's have no hashes.
    """
    # In the same order, because the mixture's order depends on it
    if len(a) != len(b):
        return False
    for mine, theirs in zip(a, b, strict=True):
        if {**mine, "files": None} != {**theirs, "files": None}:
            return False
        has_hashes = mine["files"] and theirs["files"]
        if has_hashes and mine["files"] != theirs["files"]:
            return False
    return True


def same_tokenizer(a: dict, b: dict) -> bool:
    """Return whether two metas have as many tokens and the same ids and end of text.

    It doesn't matter where their files are.
    """
    mine = a["tokenizer"]
    theirs = b["tokenizer"]
    if a["vocab_size"] != b["vocab_size"] or end_of_text(mine) != end_of_text(theirs):
        return False
    if {**mine, "file": None} == {**theirs, "file": None}:
        return True
    with contextlib.suppress(UserError):  # a tokenizer.json is gone, or has changed
        return have_same_ids(mine, theirs)
    return False
