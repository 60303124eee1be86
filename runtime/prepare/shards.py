"""Copy token files to a dataset: the .bin shards of llm.c and modded-nanogpt, the .npy shards of build-nanogpt, and
.bin files without a header, whose type --dtype names.

A shard of llm.c has a header of 256 int32 (MAGIC, VERSION, number of tokens) and tokens as uint16. An .npy file says
its type. In shards, <|endoftext|> begins a document, ours ends one. Either way it stands between two documents."""

import os
import re

import numpy as np

from runtime.data.dataset import DTYPES, SLICE, SPLITS, write_dataset
from runtime.data.token_files import seeming_type
from runtime.data.tokenizer import end_of_text
from runtime.errors import UserError
from runtime.files import new_files_in
from runtime.prepare.splits import split_said

MAGIC, VERSION, HEADER_BYTES = 20240520, 1, 1024
RAW_DTYPES = {**DTYPES, "int32": np.dtype("<i4"), "int64": np.dtype("<i8")}  # of files without a header
# What NumPy raises for the header of a damaged file
NUMPY_ERRORS = (ValueError, TypeError, OverflowError, MemoryError, RecursionError, SyntaxError)
NUMBER_0 = re.compile(r"(?<!\d)0+\.\w+$")  # early llm.c: for validation


def split_shards(files):
    """Return {"train", "val", "test": files} by what their names say, or else their folders, in the order of `files`.

    If there are none for validation, those for testing are."""
    shards = {"train": [], "val": [], "test": []}
    for file in files:
        folder, name = os.path.split(os.path.normpath(file))
        split = split_said(name) or split_said(os.path.basename(folder))
        if split is None:
            split = "val" if NUMBER_0.search(file) else "train"
        shards[split].append(file)
    if not shards["val"]:
        shards["val"], shards["test"] = shards["test"], []
    return shards


def prepare(folder, files_of_splits, source, tokenizer, vocab_size, dtype=None):
    """Write a dataset of token files, and return its meta.json. Raises UserError.

    files_of_splits: as split_shards() returns it. tokenizer, vocab_size: of the tokens. dtype: a key of RAW_DTYPES, of
    .bin files without a header."""
    shards = {split: [(file, *layout_of(file, dtype)) for file in files_of_splits[split]] for split in SPLITS}
    documents = dict.fromkeys(SPLITS, 0)
    end = end_of_text(tokenizer)

    def read(split):
        for file, tokens, start, kind in shards[split]:
            for first in range(0, tokens, SLICE):
                count = min(SLICE, tokens - first)
                ids = np.fromfile(file, kind, count, offset=start + kind.itemsize * first)
                check_ids(file, ids, tokenizer, vocab_size)
                documents[split] += int(np.count_nonzero(ids == end)) if end is not None else 0
                yield ids

    files = [file for split in SPLITS for file, *_ in shards[split]]
    if dtype and not any(needs_dtype(file) for file in files):
        raise UserError(f"--dtype={dtype} is for .bin files without a header, and all of these say their type: drop it")
    for split in SPLITS:
        if not sum(tokens for _, tokens, *_ in shards[split]):
            raise UserError(f"{source['name']} has no tokens for {split}: add a shard with {split!r} in its name")
    with new_files_in(folder, "--name"):
        return write_dataset(folder, *map(read, SPLITS), tokenizer, vocab_size, source, documents=documents)


def check_ids(file, ids, tokenizer, vocab_size):
    """Raise UserError if a token isn't in the vocabulary."""
    for token in (int(ids.max()), int(ids.min())):
        if 0 <= token < vocab_size:
            continue
        if tokenizer["kind"] == "gpt2":
            raise UserError(f"{file} has token {token}, which isn't one of GPT-2's: download it again, or name its "
                            "tokenizer with --tokenizer=DIR, or its type with --dtype")
        raise UserError(f"{file} has token {token}, which is outside the vocabulary of {vocab_size:,}: name the right "
                        "--tokenizer or --dtype")


def needs_dtype(file):
    """Return whether a token file doesn't say its type."""
    if file.lower().endswith(".npy"):
        return False
    header = np.fromfile(file, "<i4", 2).tolist()
    return header != [MAGIC, VERSION]


def layout_of(file, dtype=None):
    """Return (a file's number of tokens, the byte at which they begin, their NumPy type). dtype: as in prepare().
    Raises UserError."""
    try:
        if file.lower().endswith(".npy"):
            with np.errstate(over="ignore"):  # of a shape that is refused
                array = np.lib.format.open_memmap(file, mode="r")
            if array.dtype.kind not in "iu" or array.ndim != 1:
                raise ValueError(f"its array is {array.dtype}{list(array.shape)}, not one row of whole numbers")
            return array.size, array.offset, array.dtype
        header = np.fromfile(file, "<i4", 256).tolist()
        size = os.path.getsize(file)
        has_header = len(header) == 256 and header[:2] == [MAGIC, VERSION]
        if dtype and not has_header:
            kind = RAW_DTYPES[dtype]
            if size % kind.itemsize:
                raise ValueError(f"its {size:,} bytes are no multiple of the {kind.itemsize} of {dtype}")
            if kind.itemsize == 4 and seeming_type(file) == "int64":
                raise ValueError(f"it seems to hold int64, not {dtype}")
            return size // kind.itemsize, 0, kind
        if len(header) < 256:
            raise ValueError(f"it has {size:,} bytes, fewer than its header")
        if not has_header:
            raise ValueError(f"its header begins with {header[:2]}, not {[MAGIC, VERSION]}")
        if size != (expected := HEADER_BYTES + 2 * header[2]):
            raise ValueError(f"it has {size:,} bytes, but its {header[2]:,} tokens take {expected:,}")
        return header[2], HEADER_BYTES, DTYPES["uint16"]
    except NUMPY_ERRORS as error:
        raise UserError(f"{file} is no shard of tokens ({error}): download it again, prepare texts and shards apart, "
                        "or, if it has no header, name its type with --dtype, or train on it as nanoGPT's") from None
