"""Copy token shards to a dataset: the .bin files of llm.c and modded-nanogpt, and the .npy files of build-nanogpt.

A .bin file has a header of 256 int32 (MAGIC, VERSION, number of tokens) and tokens as uint16. An .npy file is an array.
Their <|endoftext|> begins a document, ours ends one. Either way it stands between two documents of a split's stream."""

import os
import re

import numpy as np

from runtime.data.dataset import DTYPES, SLICE, SPLITS, write_dataset
from runtime.data.meta import GPT2_VOCAB
from runtime.errors import UserError
from runtime.files import lock_folder

MAGIC, VERSION, HEADER_BYTES, TOKEN = 20240520, 1, 1024, DTYPES["uint16"]
# What NumPy raises for the header of a damaged file
NUMPY_ERRORS = (ValueError, TypeError, OverflowError, MemoryError, RecursionError, SyntaxError)
SPLIT_IN_NAME = re.compile(r"(?<![a-z])(train|val)(?:id(?:ation)?)?(?![a-z])", re.I)  # of a file, or else its folder
NUMBER_0 = re.compile(r"(?<!\d)0+\.\w+$")  # early llm.c: for validation


def prepare(folder, files, source):
    """Write a dataset of shards, in the order of `files`, and return its meta.json. Raises UserError."""
    shards, documents = {split: [] for split in SPLITS}, dict.fromkeys(SPLITS, 0)
    for file in files:
        names = os.path.split(os.path.normpath(file))
        named = SPLIT_IN_NAME.search(names[1]) or SPLIT_IN_NAME.search(os.path.basename(names[0]))
        split = named[1].lower() if named else "val" if NUMBER_0.search(file) else "train"
        shards[split].append((file, *layout_of(file)))

    def read(split):
        for file, tokens, start in shards[split]:
            for first in range(0, tokens, SLICE):
                ids = np.fromfile(file, TOKEN, min(SLICE, tokens - first), offset=start + 2 * first)
                if (largest := ids.max()) >= GPT2_VOCAB:
                    raise UserError(f"{file} has token {largest}, which isn't one of GPT-2's: download it again")
                documents[split] += int(np.count_nonzero(ids == GPT2_VOCAB - 1))  # <|endoftext|>
                yield ids

    for split in SPLITS:
        if not sum(tokens for _, tokens, _ in shards[split]):
            raise UserError(f"{source['name']} has no tokens for {split}: add a shard with {split!r} in its name")
    with lock_folder(folder, "--name"):
        return write_dataset(folder, *map(read, SPLITS), {"kind": "gpt2"}, GPT2_VOCAB, source, documents=documents)


def layout_of(file):
    """Return (a shard's number of tokens, the byte at which they begin). Raises UserError."""
    try:
        if file.lower().endswith(".npy"):
            with np.errstate(over="ignore"):  # of a shape that is refused
                array = np.lib.format.open_memmap(file, mode="r")
            if array.dtype != TOKEN or array.ndim != 1:
                raise ValueError(f"its array is {array.dtype}{list(array.shape)}, not one row of uint16")
            return array.size, array.offset
        header = np.fromfile(file, "<i4", 256).tolist()
        size = os.path.getsize(file)
        if len(header) < 256:
            raise ValueError(f"it has {size:,} bytes, fewer than its header")
        if header[:2] != [MAGIC, VERSION]:
            raise ValueError(f"its header begins with {header[:2]}, not {[MAGIC, VERSION]}")
        if size != (expected := HEADER_BYTES + 2 * header[2]):
            raise ValueError(f"it has {size:,} bytes, but its {header[2]:,} tokens take {expected:,}")
        return header[2], HEADER_BYTES
    except NUMPY_ERRORS as error:
        raise UserError(f"{file} is no shard of GPT-2's tokens ({error}): download it again, prepare "
                        "texts and shards apart, or, if it is nanoGPT's, train on it as it is") from None
