"""Copy token files to a dataset.

They are the .bin shards of llm.c and modded-nanogpt, the .npy shards of build-nanogpt, and .bin
files without a header, whose type --dtype names. A shard of llm.c has a header of 256 int32 (MAGIC,
VERSION, number of tokens) and tokens as uint16. An .npy file says its type. In shards,
<|endoftext|> begins a document, ours ends one. Either way it stands between two documents.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runtime.data.dataset import DTYPES, SLICE, SPLITS, write_dataset
from runtime.data.token_files import seeming_type
from runtime.data.tokenizer import end_of_text
from runtime.errors import UserError
from runtime.files import new_files_in
from runtime.prepare.splits import split_said

# A header of llm.c
MAGIC = 20240520
VERSION = 1
HEADER_NUMBERS = 256  # of int32
HEADER_BYTES = 4 * HEADER_NUMBERS
# Types of files without a header
RAW_DTYPES: dict[str, np.dtype] = {**DTYPES, "int32": np.dtype("<i4"), "int64": np.dtype("<i8")}
# What NumPy raises for the header of a damaged file
NUMPY_ERRORS = (ValueError, TypeError, OverflowError, MemoryError, RecursionError, SyntaxError)
NUMBER_0 = re.compile(r"(?<!\d)0+\.\w+$")  # early llm.c: for validation


@dataclass(frozen=True)
class TokenFile:
    """A file of token ids."""

    path: str
    tokens: int
    start: int  # the byte at which they begin
    dtype: np.dtype


def split_shards(files: list[str]) -> dict[str, list[str]]:
    """Return {"train", "val", "test": files}, each in the order of `files`.

    Their names say it, or else their folders. If there are none for validation, those for testing
    are.
    """
    # The file's own name counts more than that of its folder
    by_split: dict[str, list[str]] = {"train": [], "val": [], "test": []}
    for file in files:
        folder, name = os.path.split(os.path.normpath(file))
        split = split_said(name) or split_said(os.path.basename(folder))
        if split is None and NUMBER_0.search(file):
            split = "val"
        by_split[split or "train"].append(file)
    if not by_split["val"]:
        by_split["val"] = by_split["test"]
        by_split["test"] = []
    return by_split


def prepare(
    folder: Path,
    files_of_splits: dict[str, list[str]],
    source: dict[str, Any],
    tokenizer: dict[str, Any],
    vocab_size: int,
    dtype: str | None = None,
) -> dict[str, Any]:
    """Write a dataset of token files, and return its meta.json. Raises UserError.

    files_of_splits: as split_shards() returns it. source: of meta.json. tokenizer, vocab_size: of
    the tokens. dtype: a key of RAW_DTYPES, of .bin files without a header.
    """
    # Refuse what is wrong before anything is written
    token_files = {}
    for split in SPLITS:
        token_files[split] = [token_file(file, dtype) for file in files_of_splits[split]]
    paths = [file.path for split in SPLITS for file in token_files[split]]
    if dtype and not any(needs_dtype(path) for path in paths):
        raise UserError(f"--dtype={dtype} is for .bin files without a header, and all of these say "
                        "their type: drop it")
    for split in SPLITS:
        if not sum(file.tokens for file in token_files[split]):
            raise UserError(f"{source['name']} has no tokens for {split}: add a shard with "
                            f"{split!r} in its name")

    # Documents are counted while the ids are written
    documents = dict.fromkeys(SPLITS, 0)
    end = end_of_text(tokenizer)

    def read(split: str) -> Iterator[np.ndarray]:
        for file in token_files[split]:
            for ids in pieces(file):
                check_ids(file.path, ids, tokenizer, vocab_size)
                if end is not None:
                    documents[split] += int(np.count_nonzero(ids == end))
                yield ids

    with new_files_in(folder, "--name"):
        return write_dataset(
            folder, read("train"), read("val"), tokenizer, vocab_size, source, documents=documents)


def pieces(file: TokenFile) -> Iterator[np.ndarray]:
    """Yield the ids of a file, SLICE at a time."""
    for first in range(0, file.tokens, SLICE):
        count = min(SLICE, file.tokens - first)
        offset = file.start + file.dtype.itemsize * first
        yield np.fromfile(file.path, file.dtype, count, offset=offset)


def check_ids(path: str, ids: np.ndarray, tokenizer: dict[str, Any], vocab_size: int) -> None:
    """Raise UserError if a token isn't in the vocabulary."""
    for token in (int(ids.max()), int(ids.min())):
        if 0 <= token < vocab_size:
            continue
        # OpenAI's tokens are assumed, not asked for, so they may be another tokenizer's
        if tokenizer["kind"] == "gpt2":
            raise UserError(f"{path} has token {token}, which isn't one of GPT-2's: download it "
                            "again, or name its tokenizer with --tokenizer=DIR, or its type with "
                            "--dtype")
        raise UserError(f"{path} has token {token}, which is outside the vocabulary of "
                        f"{vocab_size:,}: name the right --tokenizer or --dtype")


def needs_dtype(path: str) -> bool:
    """Return whether a token file doesn't say its type."""
    if path.lower().endswith(".npy"):
        return False
    return header_of(path)[:2] != [MAGIC, VERSION]


def header_of(path: str) -> list[int]:
    """Return the numbers at the beginning of a .bin file, or fewer if it is short."""
    return np.fromfile(path, "<i4", HEADER_NUMBERS).tolist()


def token_file(path: str, dtype: str | None = None) -> TokenFile:
    """Return where a file has its tokens. dtype: as in prepare(). Raises UserError."""
    try:
        if path.lower().endswith(".npy"):
            return npy_file(path)
        if dtype and needs_dtype(path):
            return raw_file(path, dtype)
        return shard_file(path)
    except NUMPY_ERRORS as error:
        raise UserError(f"{path} is no shard of tokens ({error}): download it again, prepare texts "
                        "and shards apart, or, if it has no header, name its type with --dtype, or "
                        "train on it as nanoGPT's") from None


def npy_file(path: str) -> TokenFile:
    """Return where NumPy's file has its tokens. Raises one of NUMPY_ERRORS."""
    with np.errstate(over="ignore"):  # of a shape that is refused
        array = np.lib.format.open_memmap(path, mode="r")
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise ValueError(f"its array is {array.dtype}{list(array.shape)}, not one row of whole "
                         "numbers")
    return TokenFile(path, array.size, array.offset, array.dtype)


def raw_file(path: str, dtype: str) -> TokenFile:
    """Return the TokenFile of a file without a header. dtype: a key of RAW_DTYPES.

    Raises ValueError.
    """
    kind = RAW_DTYPES[dtype]
    size = os.path.getsize(path)
    if size % kind.itemsize:
        raise ValueError(f"its {size:,} bytes are no multiple of the {kind.itemsize} of {dtype}")
    if kind.itemsize == 4 and seeming_type(path) == "int64":
        raise ValueError(f"it seems to hold int64, not {dtype}")
    return TokenFile(path, size // kind.itemsize, 0, kind)


def shard_file(path: str) -> TokenFile:
    """Return where a shard of llm.c has its tokens. Raises ValueError."""
    header = header_of(path)
    size = os.path.getsize(path)
    if len(header) < HEADER_NUMBERS:
        raise ValueError(f"it has {size:,} bytes, fewer than its header")
    if header[:2] != [MAGIC, VERSION]:
        raise ValueError(f"its header begins with {header[:2]}, not {[MAGIC, VERSION]}")
    tokens = header[2]
    expected = HEADER_BYTES + 2 * tokens
    if size != expected:
        raise ValueError(f"it has {size:,} bytes, but its {tokens:,} tokens take {expected:,}")
    return TokenFile(path, tokens, HEADER_BYTES, RAW_DTYPES["uint16"])
