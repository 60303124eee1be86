"""Notice token files that aren't nanoGPT's.

No meta.json says their type, and as uint16 they would be other tokens.
"""

import os
import shlex
from pathlib import Path

import numpy as np

from runtime.files import ROOT
from runtime.untrusted import check_regular

LOOKED_AT = 2**17  # 16-bit values at the start of a file
FEWEST = 64  # values that show a pattern
MAX_HIGH = 3  # the upper half of a 32-bit id is 0 to 3 in all vocabularies of up to 262,144 tokens
LLM_C_MAGIC = 20240520
NUMPY_MAGIC = b"\x93NUMPY"


def type_problem(path: Path, vocab_size: int, is_known: bool) -> str | None:
    """Return what is wrong with reading a file as uint16, with the command that converts it.

    Returns None if nothing is. vocab_size: of its tokens. is_known: whether a meta.pkl has it.
    Without one, the vocabulary may be another one.
    """
    check_regular(path)
    values = np.fromfile(path, "<u2", LOOKED_AT)
    shown = os.path.relpath(path)
    if values[:2].tobytes() == LLM_C_MAGIC.to_bytes(4, "little"):
        return f"{shown} is a shard of llm.c, with a header: {conversion(path)}"
    if values[:3].tobytes() == NUMPY_MAGIC:
        return (
            f"{shown} is a NumPy array, with a header: rename it to .npy, and "
            f"{conversion(path, suffix='.npy')}"
        )
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


def seeming_type(path: str | os.PathLike) -> str:
    """Return the type that the ids at the start of a file without a header seem to have."""
    return wide_type(np.fromfile(path, "<u2", LOOKED_AT), MAX_HIGH) or "uint16"


def wide_type(values: np.ndarray, max_high: int) -> str | None:
    """Return the type of token ids that were read as 16-bit values, or None if they may be uint16.

    max_high: the largest upper half of an id.
    """
    n = len(values) // 4 * 4
    if n < FEWEST:
        return None
    low = values[0:n:2]
    high = values[1:n:2]
    # Real uint16 ids are no smaller at odd places than at even ones
    if high.max() > max_high or high.max() >= low.max():
        return None
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
