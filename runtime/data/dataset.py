"""A prepared data set's folder: train.bin and val.bin (raw token ids), meta.json, and meta.pkl for nanoGPT's readers.

meta.json (format 1):
    tokenizer   {"kind": "gpt2"}, {"kind": "char", "chars": all characters in id order}, or
                {"kind": "hf", "sha256", "end_of_text"} of the tokenizer.json beside it
    vocab_size, dtype ("uint16" or "uint32", little-endian), train_tokens, val_tokens
    source      {"name", "sha256", "bytes"} of the text
    files       {"train.bin": {"bytes", "sha256"}, "val.bin": {"bytes", "sha256"}}
data/prepare.py adds what it was asked for and what it found (docs/data.md).
"""

import contextlib
import json
import os
import pickle
import sys
from pathlib import Path

import numpy as np

from runtime.files import TEMP_SUFFIX, UserError, write_temp
from runtime.output import protect_output

SPLITS = ("train", "val")
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
# In the order in which they are put in place: as long as train.bin is missing, nobody takes the rest for nanoGPT's.
FILES = ("tokenizer.json", "meta.pkl", "val.bin", "train.bin", "meta.json")
ROOT = Path(__file__).resolve().parents[2]
SLICE = 2**22  # tokens handled at once
MAX_CHECKED_TOKENS = 2**28  # tokens of a split whose ids are checked: all of Shakespeare, a part of OpenWebText
GPT2_VOCAB = 50257


class DatasetError(UserError):
    """A data set or its text can't be used; the message has one line a problem, with the mend."""


def write_dataset(folder, train_ids, val_ids, tokenizer_meta, vocab_size, source, **details):
    """Write a data set into `folder`, made if missing, and return its meta.json as a dict.

    The ids of a split are an array, a list, or an iterator over such pieces, for a text larger than the
    memory. details: more for meta.json. Stopped at any moment, the folder holds the old data set, or one that
    check_dataset refuses, or the new one: everything is first written aside; meta.json goes first and comes last.
    Raises DatasetError on an id outside 0 ... vocab_size - 1.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        for leftover in folder.glob(f".{name}.*{TEMP_SUFFIX}"):  # of a preparation that was killed
            leftover.unlink()
    dtype = "uint16" if vocab_size <= 2**16 else "uint32"
    kept = {key: value for key, value in tokenizer_meta.items() if key != "file"}
    meta = {"format": 1, "tokenizer": kept, "vocab_size": vocab_size, "dtype": dtype}
    files, parts = {}, {}

    def write(name, chunks):
        parts[name], size, sha256 = write_temp(folder / name, chunks)
        return {"bytes": size, "sha256": sha256}

    try:
        for split, ids in zip(SPLITS, (train_ids, val_ids)):
            name = f"{split}.bin"
            files[name] = write(name, _packed(ids, DTYPES[dtype], vocab_size))
            meta[f"{split}_tokens"] = files[name]["bytes"] // DTYPES[dtype].itemsize
        if tokenizer_meta["kind"] == "hf":
            write("tokenizer.json", [Path(tokenizer_meta["file"]).read_bytes()])
        meta |= {"source": source, "files": files, **details}
        write("meta.pkl", [pickle.dumps(_nanogpt_meta(meta))])
        write("meta.json", [(json.dumps(meta, indent=1) + "\n").encode()])
        for name in reversed(FILES[1:]):
            (folder / name).unlink(missing_ok=True)
        for name in filter(parts.get, FILES):
            os.replace(parts[name], folder / name)
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)
    return meta


def same_tokenizer(a, b):
    """Whether two metas are of the same tokenizer, wherever its file lies, and vocabulary."""
    return a["vocab_size"] == b["vocab_size"] and {**a["tokenizer"], "file": 0} == {**b["tokenizer"], "file": 0}


def open_tokens(folder, meta, split):
    """A split's token ids, a memory-mapped array."""
    return np.memmap(Path(folder, f"{split}.bin"), DTYPES[meta["dtype"]], mode="r")


def _packed(ids, dtype, vocab_size):
    pieces = ids if hasattr(ids, "__next__") else (ids[i:i + SLICE] for i in range(0, len(ids), SLICE))
    for piece in pieces:
        piece = np.asarray(piece)
        if piece.size and not 0 <= piece.min() <= piece.max() < vocab_size:
            raise DatasetError(f"token ids {piece.min()} ... {piece.max()} don't fit a vocabulary of {vocab_size}")
        yield piece.astype(dtype).tobytes()


def _nanogpt_meta(meta):
    if meta["tokenizer"]["kind"] != "char":
        return {"vocab_size": meta["vocab_size"], "tokenizer": meta["tokenizer"]["kind"]}
    chars = meta["tokenizer"]["chars"]
    return {"vocab_size": len(chars), "itos": dict(enumerate(chars)), "stoi": {c: i for i, c in enumerate(chars)}}


def dataset_dirs(dataset, root):
    """The folders that a setting means: a name is that of one below data/ in `root`, or it is a path; of a mixture,
    {name or path: weight}, each one's."""
    names = [dataset] if isinstance(dataset, str) else dataset
    return [name if os.sep in name else os.path.join(root, "data", name) for name in names]


def read_meta(folder):
    """Return the meta.json of a data set, or the same made up from what nanoGPT's own scripts leave.

    Those write uint16, and a meta.pkl for characters only; without one, the tokens are GPT-2's.
    Raises DatasetError when there is no data set, or its meta.json or meta.pkl can't be trusted.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise DatasetError(f"there is no folder {_display_path(folder)}; {_how_to_fix(folder)}")
    if (folder / "meta.json").exists():
        try:
            meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
            _check_meta(meta)
            if meta["tokenizer"]["kind"] == "hf":  # a checkpoint's manifest keeps this, to find it again
                file = (folder / "tokenizer.json").absolute()
                meta["tokenizer"]["file"] = str(file.relative_to(ROOT) if file.is_relative_to(ROOT) else file)
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise DatasetError(f"{_display_path(folder / 'meta.json')} can't be used ({type(error).__name__}: "
                               f"{error}); {_how_to_fix(folder)}") from None
        return meta
    missing = [folder / name for name in ("train.bin", "val.bin") if not (folder / name).exists()]
    if missing:
        raise DatasetError("\n".join(f"{_display_path(path)} is missing; {_how_to_fix(folder)}" for path in missing))
    return _meta_of_nanogpt(folder)


def _check_meta(meta):
    if meta["format"] != 1:
        raise ValueError(f"format {meta['format']} is not 1")
    if meta["dtype"] not in DTYPES:
        raise ValueError(f"dtype {meta['dtype']!r} is not one of {', '.join(DTYPES)}")
    counts = [meta["vocab_size"], *(meta[f"{split}_tokens"] for split in SPLITS),
              *(meta["files"][f"{split}.bin"]["bytes"] for split in SPLITS)]
    if not all(type(count) is int and count >= 0 for count in counts):
        raise ValueError("its counts are not all whole numbers")
    kind = meta["tokenizer"]["kind"]
    if kind not in ("gpt2", "char", "hf"):
        raise ValueError(f"tokenizer kind {kind!r} is none of 'gpt2', 'char' and 'hf'")
    if kind == "char" and len(meta["tokenizer"]["chars"]) != meta["vocab_size"]:
        raise ValueError(f"{len(meta['tokenizer']['chars'])} chars are not a vocabulary of {meta['vocab_size']}")


def _meta_of_nanogpt(folder):
    tokenizer, vocab_size = {"kind": "gpt2"}, GPT2_VOCAB
    path = folder / "meta.pkl"
    if path.exists():
        try:
            with open(path, "rb") as file:
                pickled = _PlainUnpickler(file).load()
            vocab_size = pickled["vocab_size"]
            if "itos" in pickled:
                tokenizer = {"kind": "char", "chars": "".join(pickled["itos"][i] for i in range(vocab_size))}
        except Exception as error:  # a damaged pickle raises nearly anything
            raise DatasetError(f"{_display_path(path)} can't be used ({error}); {_how_to_fix(folder)}") from None
    sizes = {f"{split}.bin": (folder / f"{split}.bin").stat().st_size for split in SPLITS}
    meta = {"format": 1, "tokenizer": tokenizer, "vocab_size": vocab_size, "dtype": "uint16",
            "train_tokens": sizes["train.bin"] // 2, "val_tokens": sizes["val.bin"] // 2,
            "source": {"name": "prepared without a meta.json", "sha256": None, "bytes": None},
            "files": {name: {"bytes": size, "sha256": None} for name, size in sizes.items()}}
    try:
        _check_meta(meta)
    except (ValueError, TypeError) as error:
        raise DatasetError(f"{_display_path(path)} can't be used ({error}); {_how_to_fix(folder)}") from None
    return meta


class _PlainUnpickler(pickle.Unpickler):
    """Reads dicts, strings and numbers only: anything that names code is refused before it is looked up."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it names {module}.{name}; a meta.pkl holds dicts, strings and numbers only")


def check_dataset(folder, block_size=None):
    """Return the meta of a data set that is fit for training with sequences of `block_size` tokens.

    Raises DatasetError with all that is wrong, one line each. Token ids are read up to MAX_CHECKED_TOKENS a split,
    evenly spread over it.
    """
    folder = Path(folder)
    meta = read_meta(folder)
    problems = [problem for split in SPLITS for problem in _problems(folder, split, meta, block_size)]
    if problems:
        raise DatasetError("\n".join(problems))
    return meta


def _problems(folder, split, meta, block_size):
    tokens, mend = meta[f"{split}_tokens"], _how_to_fix(folder)
    name = _display_path(folder / f"{split}.bin")
    if problem := _problem_of_file(folder / f"{split}.bin", tokens, meta):
        return [f"{problem}; {mend}"]
    problems = []
    needed = (block_size or 1) + 1  # a sequence and the token after it
    if tokens < needed:
        shorter = f"train with --block_size={tokens - 1}, or " if block_size and tokens > 1 else ""
        problems.append(f"{name} has {tokens} tokens, but block_size {block_size or 1} needs {needed}; "
                        f"{shorter}prepare a longer text")
    stray = _out_of_vocab_id(open_tokens(folder, meta, split), meta["vocab_size"]) if tokens else None
    if stray is not None:
        problems.append(f"{name} holds the token id {stray}, outside its vocabulary of {meta['vocab_size']}; {mend}")
    return problems


def _problem_of_file(path, tokens, meta):
    """What is wrong with the size of a split's file, or None."""
    name, itemsize = _display_path(path), DTYPES[meta["dtype"]].itemsize
    if not path.exists():
        return f"{name} is missing"
    size, promised = path.stat().st_size, meta["files"][path.name]["bytes"]
    if size % itemsize:
        return f"{name} has {size} bytes, which is not a multiple of {itemsize} ({meta['dtype']})"
    if size != promised or size != tokens * itemsize:
        return f"{name} has {size} bytes, but meta.json says {promised} bytes and {tokens} tokens"
    return None


def _out_of_vocab_id(ids, vocab_size):
    """A token id >= vocab_size, or None."""
    tokens = len(ids)
    if vocab_size > np.iinfo(ids[:1].dtype).max:
        return None
    slices = -(-min(tokens, MAX_CHECKED_TOKENS) // SLICE)
    # Short files: slices touch and cover all. Long ones: the first and the last token are always in.
    starts = np.linspace(0, max(tokens - SLICE, 0), slices).astype(np.int64)
    for start in starts:
        largest = int(ids[start:start + SLICE].max())
        if largest >= vocab_size:
            return largest
    return None


def _display_path(path):
    """The path as the user would type it."""
    path = Path(os.path.abspath(path))
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _how_to_fix(folder):
    if (folder / "prepare.py").exists():
        return f"run: python {_display_path(folder / 'prepare.py')}"
    others = sorted(_display_path(script) for script in folder.parent.glob("*/prepare.py"))
    own = f"prepare it with its own script ({'; '.join(others)})" if others else "prepare it with its own script"
    any_text = folder.parent / "prepare.py"
    return own + f", or a text of yours: python {_display_path(any_text)} PATH --name={folder.name}" * any_text.exists()


@contextlib.contextmanager
def exit_on_error(interrupted):
    """Ends a preparation script on an error that is not the program's, with one message on stderr: exit code 2, or 130
    for Ctrl-C, with the words `interrupted`. Prints cannot end it: its result is files."""
    protect_output()
    try:
        yield
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        sys.exit(130)
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        print(f"{error.filename}: {error.strerror}" if error.filename else error.strerror or error, file=sys.stderr)
        sys.exit(2)
