"""A prepared dataset's folder: train.bin and val.bin (raw token ids), meta.json, and meta.pkl for nanoGPT's readers.

meta.json (format 1):
    tokenizer   {"kind": "gpt2"}, {"kind": "char", "chars": all characters in id order}, or
                {"kind": "hf", "sha256", "end_of_text"} of the tokenizer.json in the same folder
    vocab_size, dtype ("uint16" or "uint32", little-endian), train_tokens, val_tokens
    source      {"name", "sha256", "bytes"} of the text
    files       {"train.bin": {"bytes", "sha256"}, "val.bin": {"bytes", "sha256"}}
data/prepare.py adds its request and the counts of documents (docs/data.md).
"""

import contextlib
import json
import math
import os
import pickle
import sys
from dataclasses import dataclass
from fractions import Fraction
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
MAX_CHECKED_TOKENS = 2**28  # of a split, whose ids are checked: all of Shakespeare, a part of OpenWebText
MAX_MIXTURE_PERIOD = 100_000  # sequences after which a mixture's table begins anew
GPT2_VOCAB = 50257


class DatasetError(UserError):
    """A dataset or its text can't be used; the message has one line per problem, with the fix."""


@dataclass(frozen=True)
class Dataset:
    """One of those that a run is trained on."""

    name: str
    share: int  # of the mixture's sequences, in a ratio to the others' shares
    folder: str
    meta: dict  # its meta.json


def write_dataset(folder, train_ids, val_ids, tokenizer_meta, vocab_size, source, **details):
    """Write a dataset into `folder`, made if missing, and return its meta.json as a dict.

    The ids of a split are an array, a list, or an iterator over such pieces, for a text larger than the memory.
    details: more for meta.json. Stopped at any moment, the folder holds the old dataset, or one that check_dataset
    refuses, or the new one: all files are first written under temporary names; meta.json goes first and comes last.
    Raises DatasetError on an id outside 0 ... vocab_size - 1.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        for leftover in folder.glob(f".{name}.*{TEMP_SUFFIX}"):  # of a preparation that was killed
            leftover.unlink()
    dtype = "uint16" if vocab_size <= 2**16 else "uint32"
    meta = {"format": 1, "tokenizer": {key: value for key, value in tokenizer_meta.items() if key != "file"},
            "vocab_size": vocab_size, "dtype": dtype}
    files, parts = {}, {}
    with contextlib.ExitStack() as cleanup:
        def write(name, chunks):
            parts[name], size, sha256 = write_temp(folder / name, chunks)
            cleanup.callback(parts[name].unlink, missing_ok=True)
            return {"bytes": size, "sha256": sha256}

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
    return meta


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
    """The folders of a dataset, a path or the name of one below data/ in `root`, or of a mixture {either: weight}."""
    names = [dataset] if isinstance(dataset, str) else dataset
    return [name if os.sep in name else os.path.join(root, "data", name) for name in names]


def mixture_shares(weights):
    """{name: share} of {name: weight}: how many sequences, of as many as the shares add up to, are of each dataset.

    Raises ValueError for weights that cannot be used.
    """
    if not weights or not all(isinstance(name, str) for name in weights) or any(
            isinstance(w, bool) or not isinstance(w, int | float) or not 0 < w < math.inf for w in weights.values()):
        raise ValueError(f"dataset={weights}: a mixture is {{'name': weight, ...}} with weights above 0")
    exact = {name: Fraction(w).limit_denominator(10_000) for name, w in weights.items()}
    unit = Fraction(math.gcd(*(w.numerator for w in exact.values())) or 1,  # the largest that divides them all
                    math.lcm(*(w.denominator for w in exact.values())))
    shares = {name: int(w / unit) for name, w in exact.items()}
    if min(shares.values()) < 1 or sum(shares.values()) > MAX_MIXTURE_PERIOD:
        raise ValueError(f"dataset={weights}: these weights have no common measure below {MAX_MIXTURE_PERIOD:,} "
                         "sequences: round them to two digits, none far below the others")
    return shares


def open_datasets(dataset, root, block_size):
    """(Datasets, what they have in common: tokenizer, vocab_size and both sums of tokens), once all are checked.

    dataset: a folder below data/, a path, or {either: weight}. Raises DatasetError or ValueError.
    """
    if isinstance(dataset, str) and dataset.strip()[:1] in ("{", "["):
        raise ValueError(f"dataset={dataset} is not a mixture: write {{'name': 0.3, 'other': 0.7}}, with numbers")
    shares = mixture_shares(dataset) if isinstance(dataset, dict) else {dataset: 1}
    datasets, problems = [], []
    for (name, share), folder in zip(shares.items(), dataset_dirs(shares, root)):
        try:
            name = os.path.basename(os.path.normpath(name))
            datasets.append(Dataset(name, share, folder, check_dataset(folder, block_size)))
        except DatasetError as error:
            problems.append(str(error))
    if problems:
        raise DatasetError("\n".join(problems))
    first = datasets[0]
    for other in datasets:
        if not same_tokenizer(other.meta, first.meta):
            raise DatasetError(f"{first.name} and {other.name} have different tokenizers: prepare both with one")
    if len({one.name for one in datasets}) < len(datasets):
        raise DatasetError(f"dataset={dataset}: two datasets have the same name; rename one of their folders")
    totals = {key: sum(one.meta[key] for one in datasets) for key in ("train_tokens", "val_tokens")}
    return datasets, {"tokenizer": first.meta["tokenizer"], "vocab_size": first.meta["vocab_size"], **totals}


def open_tokens(dataset, split):
    """The token ids of a Dataset's "train" or "val", a memory-mapped array."""
    return np.memmap(Path(dataset.folder, f"{split}.bin"), DTYPES[dataset.meta["dtype"]], mode="r")


def same_tokenizer(a, b):
    """Whether two metas have the same tokenizer, wherever its file is, and vocabulary."""
    return a["vocab_size"] == b["vocab_size"] and {**a["tokenizer"], "file": 0} == {**b["tokenizer"], "file": 0}


def read_meta(folder):
    """Return the meta.json of a dataset, or the same made up from what nanoGPT's own scripts leave.

    Those write uint16, and a meta.pkl for characters only; without one, the tokens are GPT-2's.
    Raises DatasetError when there is no dataset, or its meta.json or meta.pkl can't be trusted.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise DatasetError(f"the folder {_display_path(folder)} does not exist; {_how_to_fix(folder)}")
    path = folder / "meta.json"
    own = path.exists()
    if not own:
        path = folder / "meta.pkl"
        missing = [name for name in ("train.bin", "val.bin") if not (folder / name).exists()]
        if missing:
            raise DatasetError("\n".join(f"{_display_path(folder / name)} is missing; {_how_to_fix(folder)}"
                                         for name in missing))
    try:
        meta = json.loads(path.read_text(encoding="utf-8")) if own else _meta_of_nanogpt(folder)
        _check_meta(meta)
    except Exception as error:  # a damaged pickle raises nearly anything
        raise DatasetError(f"{_display_path(path)} can't be used ({type(error).__name__}: {error}); "
                           f"{_how_to_fix(folder)}") from None
    if meta["tokenizer"]["kind"] == "hf":  # a checkpoint's manifest keeps this, to find it again
        file = (folder / "tokenizer.json").absolute()
        meta["tokenizer"]["file"] = str(file.relative_to(ROOT) if file.is_relative_to(ROOT) else file)
    return meta


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
    if (folder / "meta.pkl").exists():
        with open(folder / "meta.pkl", "rb") as file:
            pickled = _PlainUnpickler(file).load()
        vocab_size = pickled["vocab_size"]
        if "itos" in pickled:
            tokenizer = {"kind": "char", "chars": "".join(pickled["itos"][i] for i in range(vocab_size))}
    sizes = {split: (folder / f"{split}.bin").stat().st_size for split in SPLITS}
    return {"format": 1, "tokenizer": tokenizer, "vocab_size": vocab_size, "dtype": "uint16",
            **{f"{split}_tokens": size // 2 for split, size in sizes.items()},
            "source": {"name": "prepared without a meta.json", "sha256": None, "bytes": None},
            "files": {f"{split}.bin": {"bytes": size, "sha256": None} for split, size in sizes.items()}}


class _PlainUnpickler(pickle.Unpickler):
    """Reads dicts, strings and numbers only: anything that names code is refused before it is looked up."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it names {module}.{name}; a meta.pkl holds dicts, strings and numbers only")


def check_dataset(folder, block_size=None):
    """Return the meta of a dataset that is fit for training with sequences of `block_size` tokens.

    Raises DatasetError with all problems, one line each. Of each split up to MAX_CHECKED_TOKENS ids are read, evenly
    spread over it.
    """
    folder = Path(folder)
    meta = read_meta(folder)
    problems = [problem for split in SPLITS for problem in _problems(folder, split, meta, block_size or 1)]
    if problems:
        raise DatasetError("\n".join(problems))
    return meta


def _problems(folder, split, meta, block_size):
    path, tokens, vocab_size = folder / f"{split}.bin", meta[f"{split}_tokens"], meta["vocab_size"]
    name, fix = _display_path(path), _how_to_fix(folder)
    if not path.exists():
        return [f"{name} is missing; {fix}"]
    size, expected = path.stat().st_size, tokens * DTYPES[meta["dtype"]].itemsize
    if size != expected:
        return [f"{name} has {size} bytes, but {tokens} tokens of {meta['dtype']} take {expected}; {fix}"]
    problems = []
    if tokens <= block_size:  # a sequence and the token after it are needed
        shorter = f"train with --block_size={tokens - 1}, or " if tokens > 1 else ""
        problems.append(f"{name} has {tokens} tokens, but block_size {block_size} needs {block_size + 1}; "
                        f"{shorter}prepare a longer text")
    largest = _largest_id(open_tokens(Dataset("", 1, folder, meta), split)) if tokens else 0
    if tokens and largest >= vocab_size:
        problems.append(f"{name} holds the token id {largest}, outside its vocabulary of {vocab_size}; {fix}")
    return problems


def _largest_id(ids):
    """The largest of up to MAX_CHECKED_TOKENS ids, among them the first and the last."""
    slices = -(-min(len(ids), MAX_CHECKED_TOKENS) // SLICE)
    starts = np.linspace(0, max(len(ids) - SLICE, 0), slices).astype(np.int64)  # in short files they touch
    return max(int(ids[start:start + SLICE].max()) for start in starts)


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
    """End a preparation script on an error that is not the program's, with one message on stderr: exit code 2, or 130
    for Ctrl-C, with the message `interrupted`. Prints cannot end it: its result is files."""
    protect_output()
    try:
        yield
        return
    except KeyboardInterrupt:
        message, code = interrupted, 130
    except UserError as error:
        message, code = error, 2
    except OSError as error:
        message, code = f"{error.filename}: {error.strerror}" if error.filename else error.strerror or error, 2
    print(message, file=sys.stderr)
    sys.exit(code)
