"""Notice token files of another type than they would be read as: the ids would be other tokens.

Without a meta.json they are read as nanoGPT's uint16. With one, a file of another type may have
exactly the size that it names.
"""

import os
import shlex
from pathlib import Path

import numpy as np

from runtime.files import ROOT, file_digest
from runtime.untrusted import check_regular

LOOKED_AT = 2**17  # 16-bit values of a file, at PLACES
PLACES = 16  # evenly spread: a file may begin with anything, such as one id for a million tokens
FEWEST = 64  # values that show a pattern
MAX_HIGH = 3  # the upper half of a 32-bit id is 0 to 3 in all vocabularies of up to 262,144 tokens
LLM_C_MAGIC = 20240520
NUMPY_MAGIC = b"\x93NUMPY"


def type_problem(path: Path, vocab_size: int, is_known: bool) -> str | None:
    """Return what is wrong with reading a file as uint16, with the command that converts it.

    Returns None if nothing is. vocab_size: of its tokens. is_known: whether a meta.pkl has it.
    Without one, the vocabulary may be another one.
    """
    values = values_of(path)
    shown = os.path.relpath(path)

    # Formats with a header
    if values[:2].tobytes() == LLM_C_MAGIC.to_bytes(4, "little"):
        return f"{shown} is a shard of llm.c, with a header: {conversion(path)}"
    if values[:3].tobytes() == NUMPY_MAGIC:
        return (
            f"{shown} is a NumPy array, with a header: rename it to .npy, and "
            f"{conversion(path, suffix='.npy')}"
        )

    # Other types. With a known vocabulary of at most 2**16 tokens, the upper half of an id is 0
    wide = wide_type(values, 0 if is_known else MAX_HIGH)
    if wide:
        return (
            f"{shown} seems to hold {wide}, and without a meta.json it is read as uint16: "
            f"{conversion(path, wide)}, or with --dtype=uint16 if it does hold that"
        )
    if vocab_size > 2**16:
        return (
            f"{shown} is read as uint16 without a meta.json, but a vocabulary of {vocab_size:,} "
            f"doesn't fit: {conversion(path, 'uint32')}"
        )
    return None


def described_type_problem(path: Path, meta: dict) -> str | None:
    """Return what is wrong with reading a file as the type that its meta.json names, or None.

    meta: the content of meta.json, whose size the file has. Ids that are 0 at each second place
    look like wider ones: then the file's hash decides, if meta.json has it.
    """
    dtype = meta["dtype"]
    wide = wide_type(values_of(path), max_high=(meta["vocab_size"] - 1) >> 16)
    if wide is None or wide == dtype:
        return None
    recorded = meta["files"].get(path.name)
    if recorded and file_digest(path)["sha256"] == recorded["sha256"]:
        return None
    return f"{os.path.relpath(path)} seems to hold {wide}, and its meta.json says {dtype}"


def values_of(path: str | os.PathLike) -> np.ndarray:
    """Return some values of a file, read as uint16: all of a small one, else those at PLACES.

    Each place is at a whole number of 64-bit values.
    """
    n = check_regular(path) // 2
    if n <= LOOKED_AT:
        return np.fromfile(path, "<u2")
    piece = LOOKED_AT // PLACES
    pieces = []
    for place in range(PLACES):
        start = (n - piece) * place // (PLACES - 1) // 4 * 4
        pieces.append(np.fromfile(path, "<u2", piece, offset=2 * start))
    return np.concatenate(pieces)


def seeming_type(path: str | os.PathLike) -> str:
    """Return the type that the ids of a file without a header seem to have."""
    return wide_type(values_of(path), MAX_HIGH) or "uint16"


def wide_type(values: np.ndarray, max_high: int) -> str | None:
    """Return the type of token ids that were read as 16-bit values, or None if they may be uint16.

    max_high: the largest upper half of an id.
    """
    n = len(values) // 4 * 4
    if n < FEWEST:
        return None

    # Real uint16 ids are no smaller at odd places than at even ones
    low = values[0:n:2]
    high = values[1:n:2]
    if high.max() > max_high or high.max() >= low.max():
        return None

    # The upper half of an int64 is 0, too
    if not values[2:n:4].any() and not values[3:n:4].any():
        return "int64"
    return "uint32"


def conversion(path: Path, dtype: str | None = None, suffix: str = ".bin") -> str:
    """Return the command that makes a dataset with a meta.json of a folder's token files."""
    script = os.path.relpath(ROOT / "data" / "prepare.py")
    files = [os.path.relpath(path.with_name(f"{split}{suffix}")) for split in ("train", "val")]
    name = path.parent.name
    option = f" --dtype={dtype}" if dtype else ""
    words = shlex.join([script, *files, f"--name={name}-converted"])
    return f"run python {words}{option}"
