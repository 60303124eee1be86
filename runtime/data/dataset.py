"""A dataset's folder: train.bin and val.bin (raw token ids), meta.json, and meta.pkl for nanoGPT.

meta.json (format 1):
    tokenizer   {"kind": "gpt2"}, {"kind": "char", "chars": all characters in id order}, or
                {"kind": "hf", "sha256", "end_of_text"} of the tokenizer.json in the same folder
    vocab_size, dtype ("uint16" or "uint32", little-endian), train_tokens, val_tokens
    source      {"name", "sha256", "bytes"} of the text
    files       {"train.bin": {"bytes", "sha256"}, "val.bin": {"bytes", "sha256"}}
    template    only for conversations: the Jinja template that made text of them
                (runtime/data/chat_template.jinja)
Conversations also have train_mask.bin and val_mask.bin, with a byte per token: COUNTS if its
prediction counts in the loss, and BEGINS if a conversation begins with it.
data/prepare.py adds its options and the numbers of documents (docs/data.md).
"""

import json
import os
import pickle
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from runtime.data.folders import how_to_fix
from runtime.data.meta import parse_meta, parse_meta_of_nanogpt
from runtime.data.token_files import described_type_problem, type_problem
from runtime.data.tokenizer import tokenizer_content
from runtime.errors import UserError
from runtime.files import ROOT, TEMP_NAME, write_temp
from runtime.untrusted import check_regular, read_regular

SPLITS = ("train", "val")
DTYPES: dict[str, np.dtype] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
# In the order in which they get their names. No reader accepts a dataset without train.bin
FILES = (
    "tokenizer.json",
    "meta.pkl",
    "val_mask.bin",
    "train_mask.bin",
    "val.bin",
    "meta.json",
    "train.bin",
)
# Bits of a mask
COUNTS = 1
BEGINS = 2
SLICE = 2**22  # tokens handled at once
CHECKED_SLICES = 64  # per split, evenly spread: all of Shakespeare, 3% of OpenWebText

Ids = np.ndarray | Sequence[int]


class Dataset(NamedTuple):
    """One of a run's datasets."""

    name: str
    share: int  # of a mixture's sequences, relative to the other shares
    folder: str | Path
    meta: dict  # the content of meta.json


# ---------------------------------------------------------------------------------------------
# Writing


class NewFiles:
    """Files of a folder, written under temporary names until rename() gives them theirs."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.temps: dict[str, Path] = {}

    def write(self, name: str, chunks: Iterable[bytes]) -> dict:
        """Write a file. Return {"bytes", "sha256"}."""
        self.temps[name], size, sha256 = write_temp(self.folder / name, chunks)
        return {"bytes": size, "sha256": sha256}

    def rename(self) -> None:
        """Give the files their names, in the order of FILES."""
        # A kill between two renames leaves no train.bin
        for name in FILES:
            if name in self.temps:
                os.replace(self.temps[name], self.folder / name)

    def remove(self) -> None:
        """Remove the files that have no name yet."""
        for temp in self.temps.values():
            temp.unlink(missing_ok=True)


def write_dataset(
    folder: str | os.PathLike,
    train_ids: Ids | Iterator[Ids],
    val_ids: Ids | Iterator[Ids],
    tokenizer_meta: dict,
    vocab_size: int,
    source: dict,
    masks: dict[str, Iterable[Any]] | None = None,
    **details: Any,
) -> dict:
    """Write a dataset to `folder`, created if missing, and return its meta.json as a dict.

    The ids of a split are an array, a list, or an iterator over arrays or lists. masks: {file:
    iterator over arrays of bytes}, only for conversations. details: more entries of meta.json. All
    files are first written under temporary names, and train.bin is removed first and renamed last.
    So a killed process leaves the old dataset, the new one, or one without train.bin, which
    check_dataset() rejects. Raises UserError for an id outside the vocabulary.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # What a process that was killed has left
    for name in os.listdir(folder):
        if TEMP_NAME.fullmatch(name):
            os.remove(folder / name)

    # Large files first: the others say how long these are, and their hashes
    dtype = "uint16" if vocab_size <= 2**16 else "uint32"
    contents = {
        "train.bin": _packed(train_ids, DTYPES[dtype], vocab_size),
        "val.bin": _packed(val_ids, DTYPES[dtype], vocab_size),
        **(masks or {}),
    }
    new = NewFiles(folder)

    # Each file is hashed while it is written
    try:
        files = {name: new.write(name, chunks) for name, chunks in contents.items()}
        if tokenizer_meta["kind"] == "hf":
            new.write("tokenizer.json", [tokenizer_content(tokenizer_meta)])

        # All that readers need, without opening the large files
        meta = {
            "format": 1,
            "tokenizer": _without_place(tokenizer_meta),
            "vocab_size": vocab_size,
            "dtype": dtype,
            "train_tokens": files["train.bin"]["bytes"] // DTYPES[dtype].itemsize,
            "val_tokens": files["val.bin"]["bytes"] // DTYPES[dtype].itemsize,
            "source": source,
            "files": files,
            **details,
        }
        new.write("meta.pkl", [_pickle_for_nanogpt(meta)])
        new.write("meta.json", [(json.dumps(meta, indent=1) + "\n").encode()])

        # From here on, there is no complete dataset until all files have their names. A
        # tokenizer.json may stay: meta.json says whether it counts
        for name in reversed(FILES[1:]):
            (folder / name).unlink(missing_ok=True)
        new.rename()
    finally:
        new.remove()
    return meta


def slices(ids: Ids) -> Iterator[Ids]:
    """Return an iterator over slices of at most SLICE elements of an array or list."""
    return (ids[i : i + SLICE] for i in range(0, len(ids), SLICE))


def _packed(ids: Ids | Iterator[Ids], dtype: np.dtype, vocab_size: int) -> Iterator[bytes]:
    """Yield the bytes of ids. Raises UserError for an id outside the vocabulary."""
    # An array or list is cut, so that a slice at a time is copied
    pieces = ids if isinstance(ids, Iterator) else slices(ids)
    for piece in pieces:
        piece = np.asarray(piece)

        # A cast would wrap such an id silently
        if piece.size and not 0 <= piece.min() <= piece.max() < vocab_size:
            raise UserError(
                f"token ids {piece.min()} to {piece.max()} don't fit a vocabulary of {vocab_size}"
            )
        yield piece.astype(dtype).tobytes()


def _without_place(tokenizer_meta: dict) -> dict:
    """Return a "tokenizer" as meta.json has it: its tokenizer.json is in the same folder."""
    return {key: value for key, value in tokenizer_meta.items() if key not in ("file", "content")}


def _pickle_for_nanogpt(meta: dict) -> bytes:
    """Return the content of a meta.pkl, with the characters as nanoGPT's scripts write them."""

    content = {"vocab_size": meta["vocab_size"], "described_by": "meta.json"}

    # nanoGPT's own sample.py encodes and decodes with these
    chars = meta["tokenizer"].get("chars")
    if chars:
        content["itos"] = dict(enumerate(chars))
        content["stoi"] = {char: i for i, char in enumerate(chars)}
    return pickle.dumps(content)


# ---------------------------------------------------------------------------------------------
# Reading


def open_tokens(dataset: Dataset, split: str) -> np.ndarray:
    """Return the token ids of "train" or "val" as a memory-mapped array. Raises UserError."""
    dtype = DTYPES[dataset.meta["dtype"]]
    return open_array(Path(dataset.folder, f"{split}.bin"), dtype)


def open_mask(dataset: Dataset, split: str) -> np.ndarray:
    """Return the mask of "train" or "val" as a memory-mapped array. Raises UserError."""
    return open_array(Path(dataset.folder, f"{split}_mask.bin"), np.dtype("u1"))


def open_array(path: Path, dtype: np.dtype) -> np.ndarray:
    """Return a file without a header as a memory-mapped array. Raises UserError."""
    check_regular(path)
    return np.memmap(path, dtype, mode="r")


def read_meta(folder: str | os.PathLike) -> dict:
    """Return the meta.json of a dataset, or an equivalent for one that nanoGPT's scripts prepared.

    Those write uint16, and a meta.pkl only for characters; without one, the tokens are GPT-2's.
    Raises UserError.
    """
    folder = Path(folder)
    path = folder / "meta.json"

    # Ours if it is there: it says more than nanoGPT's
    try:
        if path.exists():
            meta = parse_meta(read_regular(path))
        else:
            path = folder / "meta.pkl"
            meta = _meta_of_nanogpt(folder)
    except UserError:
        raise
    except (FileNotFoundError, NotADirectoryError) as error:
        missing = os.path.relpath(error.filename)
        raise UserError(f"{missing} does not exist: {how_to_fix(folder)}") from None
    except Exception as error:  # a corrupt pickle raises nearly anything
        reason = f"{type(error).__name__}: {error}"
        fix = how_to_fix(folder)
        raise UserError(f"{os.path.relpath(path)} can't be used ({reason}): {fix}") from None

    # A checkpoint's manifest keeps this path. In the project's folder, it begins there
    if meta["tokenizer"]["kind"] == "hf":
        file = (folder / "tokenizer.json").absolute()
        if file.is_relative_to(ROOT):
            file = file.relative_to(ROOT)
        meta["tokenizer"]["file"] = str(file)
    return meta


def nanogpt_vocabulary(folder: str | os.PathLike) -> tuple[dict, int] | None:
    """Return the tokenizer and vocab_size of nanoGPT's meta.pkl in a folder.

    Returns None if there is none. Raises UserError.
    """
    path = Path(folder, "meta.pkl")
    if not path.exists():
        return None
    tokens = {"train_tokens": 1, "val_tokens": 1}  # nobody asks for them
    try:
        meta = parse_meta_of_nanogpt(read_regular(path), tokens)
    except Exception as error:  # a corrupt pickle raises nearly anything
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{path} can't be used ({reason}): restore or remove it") from None
    if meta is None:
        raise UserError(
            f"{path} is of a dataset with a meta.json: restore that, or prepare the dataset again"
        )
    return meta["tokenizer"], meta["vocab_size"]


def _meta_of_nanogpt(folder: Path) -> dict:
    """Return what a meta.json would say of a dataset that nanoGPT's scripts prepared.

    Raises what parse_meta_of_nanogpt() raises, UserError and OSError.
    """
    # nanoGPT writes no meta.pkl for GPT-2's tokens
    pickled = None
    path = folder / "meta.pkl"
    if path.exists():
        pickled = read_regular(path)

    # Without a meta.json, the sizes alone tell the number of tokens
    tokens = {}
    for split in SPLITS:
        size = check_regular(folder / f"{split}.bin")
        tokens[f"{split}_tokens"] = size // DTYPES["uint16"].itemsize
    meta = parse_meta_of_nanogpt(pickled, tokens)

    # The meta.pkl is ours, and the data perhaps of conversations or in uint32
    if meta is None:
        raise FileNotFoundError(None, None, str(folder / "meta.json"))
    return meta


# ---------------------------------------------------------------------------------------------
# Checking


def check_dataset(folder: str | os.PathLike, block_size: int = 1) -> dict:
    """Return the meta of a dataset that can be trained on with sequences of `block_size` tokens.

    Raises UserError with all problems, one line each. Of a large file, evenly spread slices are
    read.
    """
    folder = Path(folder)
    meta = read_meta(folder)
    # Without a meta.json, the files only seem to be what nanoGPT writes
    if not (folder / "meta.json").exists():
        _check_types(folder, meta["vocab_size"])

    # Report all at once, so that one repair is enough
    problems = []
    for split in SPLITS:
        problem = _file_problem(folder, split, meta)
        if problem:
            problems.append(problem)
        else:
            problems += _content_problems(folder, split, meta, block_size)
    if problems:
        raise UserError("\n".join(problems))
    return meta


def _check_types(folder: Path, vocab_size: int) -> None:
    """Raise UserError if files without a meta.json hold other ids than the uint16 of nanoGPT."""
    is_known = (folder / "meta.pkl").exists()
    problems = [type_problem(folder / f"{split}.bin", vocab_size, is_known) for split in SPLITS]
    for problem in problems:
        if problem:
            raise UserError(problem)


def _file_problem(folder: Path, split: str, meta: dict) -> str | None:
    """Return what is wrong with the sizes or the type of a split's files, or None."""
    # The bytes that meta.json's numbers amount to
    tokens = meta[f"{split}_tokens"]
    sizes = {f"{split}.bin": tokens * DTYPES[meta["dtype"]].itemsize}
    if "template" in meta:
        sizes[f"{split}_mask.bin"] = tokens
    for file, expected in sizes.items():
        path = os.path.relpath(folder / file)
        if not os.path.exists(path):
            return f"{path} does not exist: {_how_to_prepare_again(folder, meta)}"
        size = check_regular(path)
        if size != expected:
            fix = _how_to_prepare_again(folder, meta)
            return f"{path} has {size} bytes, but its {tokens} tokens take {expected}: {fix}"

    # The same size can be of another type
    wrong_type = described_type_problem(folder / f"{split}.bin", meta)
    if wrong_type:
        fix = _how_to_prepare_again(folder, meta)
        return f"{wrong_type}: restore the file that meta.json describes, or {fix}"
    return None


def _content_problems(folder: Path, split: str, meta: dict, block_size: int) -> list[str]:
    """Return what is wrong with the tokens of a split, as sentences."""
    problems = []
    name = os.path.relpath(folder / f"{split}.bin")
    tokens = meta[f"{split}_tokens"]
    # A sequence has one token more, because its last token is only a target. Conversations are
    # padded
    if "template" not in meta and tokens <= block_size:
        largest_block = min(meta["train_tokens"], meta["val_tokens"]) - 1
        problems.append(
            f"{name} has {tokens} tokens, but block_size={block_size} needs {block_size + 1}: "
            f"train with --block_size={largest_block}, or prepare a longer text"
        )

    # Whether the tokens are of its vocabulary
    ids = open_tokens(Dataset("", 1, folder, meta), split)
    starts = range(0, tokens, max(SLICE, tokens // CHECKED_SLICES))
    largest = max(ids[start : start + SLICE].max() for start in starts)
    if largest >= meta["vocab_size"]:
        fix = _how_to_prepare_again(folder, meta)
        problems.append(
            f"{name} holds token {largest}, which is outside its vocabulary of "
            f"{meta['vocab_size']}: {fix}"
        )
    return problems


def _how_to_prepare_again(folder: Path, meta: dict) -> str:
    """Return the command that makes a dataset whose meta.json is known."""
    fix = how_to_fix(folder)
    return f"{fix} --format=chat" if "template" in meta else fix
