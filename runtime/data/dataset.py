"""A dataset's folder: train.bin and val.bin (raw token ids), meta.json, and meta.pkl for nanoGPT's readers.

meta.json (format 1):
    tokenizer   {"kind": "gpt2"}, {"kind": "char", "chars": all characters in id order}, or
                {"kind": "hf", "sha256", "end_of_text"} of the tokenizer.json in the same folder
    vocab_size, dtype ("uint16" or "uint32", little-endian), train_tokens, val_tokens
    source      {"name", "sha256", "bytes"} of the text
    files       {"train.bin": {"bytes", "sha256"}, "val.bin": {"bytes", "sha256"}}
    template    only for conversations: the Jinja template that made text of them (runtime/data/chat_template.jinja)
Conversations also have train_mask.bin and val_mask.bin, with a byte per token: COUNTS if its prediction counts in the
loss, and BEGINS if a conversation begins with it.
data/prepare.py adds its options and the numbers of documents (docs/data.md)."""

import contextlib
import json
import math
import os
import pickle
import shlex
from collections import namedtuple
from fractions import Fraction
from pathlib import Path

import numpy as np

from runtime.data.meta import parse_meta, parse_meta_of_nanogpt
from runtime.data.same_ids import have_same_ids
from runtime.data.token_files import type_problem
from runtime.data.tokenizer import end_of_text, tokenizer_content
from runtime.errors import UserError
from runtime.files import OWN_DATASETS, ROOT, TEMP_NAME, write_temp
from runtime.untrusted import check_regular, read_regular

SPLITS = ("train", "val")
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
# In the order in which they get their names. No reader accepts a dataset without train.bin.
FILES = ("tokenizer.json", "meta.pkl", "val_mask.bin", "train_mask.bin", "val.bin", "meta.json", "train.bin")
COUNTS, BEGINS = 1, 2  # bits of a mask
SLICE = 2**22  # tokens handled at once
CHECKED_SLICES = 64  # per split, evenly spread: all of Shakespeare, 3% of OpenWebText
MAX_MIXTURE_PERIOD = 100_000  # sequences after which a mixture's pattern repeats
# One of a run's datasets. share: of a mixture's sequences, relative to the other shares; meta: the content of meta.json
Dataset = namedtuple("Dataset", ("name", "share", "folder", "meta"))


def write_dataset(folder, train_ids, val_ids, tokenizer_meta, vocab_size, source, masks=None, **details):
    """Write a dataset to `folder`, created if missing, and return its meta.json as a dict.

    The ids of a split are an array, a list, or an iterator over arrays or lists. masks: {file: iterator over arrays of
    bytes}, only for conversations. details: more entries of meta.json. All files are first written under temporary
    names, and train.bin is removed first and renamed last. So a killed process leaves the old dataset, the new one, or
    one without train.bin, which check_dataset() rejects. Raises UserError for an id outside the vocabulary."""
    (folder := Path(folder)).mkdir(parents=True, exist_ok=True)
    for name in filter(TEMP_NAME.fullmatch, os.listdir(folder)):  # of a process that was killed
        os.remove(folder / name)
    dtype, parts = "uint16" if vocab_size <= 2**16 else "uint32", {}
    with contextlib.ExitStack() as cleanup:
        def write(name, chunks):
            parts[name], size, sha256 = write_temp(folder / name, chunks)
            cleanup.callback(parts[name].unlink, missing_ok=True)
            return {"bytes": size, "sha256": sha256}

        contents = {"train.bin": _packed(train_ids, DTYPES[dtype], vocab_size),
                    "val.bin": _packed(val_ids, DTYPES[dtype], vocab_size), **(masks or {})}
        files = {name: write(name, chunks) for name, chunks in contents.items()}
        tokens = {f"{split}_tokens": files[f"{split}.bin"]["bytes"] // DTYPES[dtype].itemsize for split in SPLITS}
        if tokenizer_meta["kind"] == "hf":
            write("tokenizer.json", [tokenizer_content(tokenizer_meta)])
        described = {key: value for key, value in tokenizer_meta.items() if key not in ("file", "content")}
        meta = {"format": 1, "tokenizer": described,
                "vocab_size": vocab_size, "dtype": dtype, **tokens, "source": source, "files": files, **details}
        pickled = {"vocab_size": vocab_size, "described_by": "meta.json"}
        if chars := tokenizer_meta.get("chars"):  # as nanoGPT's scripts write it
            pickled |= {"itos": dict(enumerate(chars)), "stoi": {char: i for i, char in enumerate(chars)}}
        write("meta.pkl", [pickle.dumps(pickled)])
        write("meta.json", [(json.dumps(meta, indent=1) + "\n").encode()])
        for name in reversed(FILES[1:]):
            (folder / name).unlink(missing_ok=True)
        for name in filter(parts.get, FILES):
            os.replace(parts[name], folder / name)
    return meta


def slices(ids):
    """Return an iterator over slices of at most SLICE elements of an array or list."""
    return (ids[i:i + SLICE] for i in range(0, len(ids), SLICE))


def _packed(ids, dtype, vocab_size):
    for piece in ids if hasattr(ids, "__next__") else slices(ids):
        piece = np.asarray(piece)
        if piece.size and not 0 <= piece.min() <= piece.max() < vocab_size:
            raise UserError(f"token ids {piece.min()} to {piece.max()} don't fit a vocabulary of {vocab_size}")
        yield piece.astype(dtype).tobytes()


def dataset_dir(dataset):
    """Return the folder of a dataset, which is a path or the name of a folder below data/."""
    return dataset if os.sep in dataset else str(ROOT / "data" / dataset)


def is_own_dataset(folder):
    """Return whether a folder is one of OWN_DATASETS."""
    folder = Path(folder).absolute()
    return folder.parent == ROOT / "data" and folder.name in OWN_DATASETS


def new_dataset_dir(name, overwrite):
    """Return the folder in which a dataset is to be written. Raises UserError if it holds one, unless `overwrite`."""
    folder = Path(dataset_dir(name))
    if name.strip("/") in ("", ".", ".."):
        raise UserError(f"--name={name} is no name: choose one, such as --name=mine")
    if is_own_dataset(folder):
        raise UserError(f"{folder} is for the dataset that its prepare.py makes: choose another --name")
    if not overwrite and (folder / "train.bin").exists():
        raise UserError(f"{folder} holds a dataset: choose another --name, or replace it with --overwrite")
    return folder


def mixture_shares(weights):
    """Return the shares of a mixture {name: weight} as whole numbers, {name: share}. Of as many sequences as the shares
    add up to, each dataset gets exactly its share. Raises UserError."""
    if not isinstance(weights, dict) or not weights or not all(
            isinstance(name, str) and isinstance(w, int | float) and 0 < w < math.inf for name, w in weights.items()):
        raise UserError(f"dataset={weights} is not a mixture: write {{'name': 0.3, 'other': 0.7}}, all above 0")
    total = sum(map(Fraction, weights.values()))
    exact = {name: (Fraction(w) / total).limit_denominator(MAX_MIXTURE_PERIOD) for name, w in weights.items()}
    period = math.lcm(*(w.denominator for w in exact.values()))
    shares = {name: int(w * period) for name, w in exact.items()}
    if max(sum(shares.values()), total / Fraction(min(weights.values()))) > MAX_MIXTURE_PERIOD:
        raise UserError(f"dataset={weights} repeats after over {MAX_MIXTURE_PERIOD:,} sequences: round the weights")
    return shares


def open_datasets(dataset, block_size):
    """Check datasets and return (Datasets, their common tokenizer and vocab_size, and their total tokens as a dict).
    dataset: a folder below data/, a path, or {either: weight}. Raises UserError or ValueError."""
    is_name = isinstance(dataset, str) and not dataset.startswith("{")
    shares = {dataset: 1} if is_name else mixture_shares(dataset)
    datasets, problems = [], []
    for path, share in shares.items():
        name, folder = os.path.basename(os.path.normpath(path)), dataset_dir(path)
        try:
            datasets.append(Dataset(name, share, folder, check_dataset(folder, block_size)))
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("\n".join(problems))
    first = datasets[0]
    for other in datasets:
        if not same_tokenizer(other.meta, first.meta):
            raise UserError(f"{first.name} and {other.name} have different tokenizers: prepare both with the same")
    if len({data.name for data in datasets}) < len(datasets):
        raise UserError(f"dataset={dataset} has two datasets of the same name: rename one of their folders")
    totals = {key: sum(data.meta[key] for data in datasets) for key in ("train_tokens", "val_tokens")}
    template = next((data.meta["template"] for data in datasets if "template" in data.meta), None)
    parts = [{"share": data.share, **{key: data.meta.get(key) for key in (*totals, "files")}} for data in datasets]
    return datasets, {"tokenizer": first.meta["tokenizer"], "vocab_size": first.meta["vocab_size"],
                      "template": template, **totals, "datasets": parts}


def open_tokens(dataset, split):
    """Return the token ids of "train" or "val" as a memory-mapped array. Raises UserError."""
    return open_array(Path(dataset.folder, f"{split}.bin"), DTYPES[dataset.meta["dtype"]])


def open_mask(dataset, split):
    """Return the mask of "train" or "val" as a memory-mapped array. Raises UserError."""
    return open_array(Path(dataset.folder, f"{split}_mask.bin"), np.dtype("u1"))


def open_array(path, dtype):
    check_regular(path)
    return np.memmap(path, dtype, mode="r")


def same_data(a, b):
    """Return whether two lists of "datasets" are the same, wherever they lie. nanoGPT's have no hashes."""
    return [data | {"files": 0} for data in a] == [data | {"files": 0} for data in b] and all(
        x["files"] == y["files"] for x, y in zip(a, b) if x["files"] and y["files"])


def same_tokenizer(a, b):
    """Return whether two metas have as many tokens and the same ids and end of text, wherever their files are."""
    if a["vocab_size"] != b["vocab_size"] or end_of_text(a["tokenizer"]) != end_of_text(b["tokenizer"]):
        return False
    with contextlib.suppress(UserError):  # a tokenizer.json is gone, or has changed
        return {**a["tokenizer"], "file": 0} == {**b["tokenizer"], "file": 0} or have_same_ids(
            a["tokenizer"], b["tokenizer"])
    return False


def read_meta(folder):
    """Return the meta.json of a dataset, or an equivalent for a dataset prepared by nanoGPT's own scripts. Those write
    uint16, and a meta.pkl only for characters; without one, the tokens are GPT-2's. Raises UserError."""
    folder = Path(folder)
    path = folder / "meta.json"
    try:
        if path.exists():
            meta = parse_meta(read_regular(path))
        else:
            path = folder / "meta.pkl"
            meta = _meta_of_nanogpt(folder)
    except UserError:
        raise
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(f"{os.path.relpath(error.filename)} does not exist: {_how_to_fix(folder)}") from None
    except Exception as error:  # a corrupt pickle raises nearly anything
        reason = f"{type(error).__name__}: {error}"
        fix = _how_to_fix(folder)
        raise UserError(f"{os.path.relpath(path)} can't be used ({reason}): {fix}") from None
    if meta["tokenizer"]["kind"] == "hf":  # a checkpoint's manifest keeps this path
        file = (folder / "tokenizer.json").absolute()
        meta["tokenizer"]["file"] = str(file.relative_to(ROOT) if file.is_relative_to(ROOT) else file)
    return meta


def nanogpt_vocabulary(folder):
    """Return the tokenizer and vocab_size of nanoGPT's meta.pkl in a folder, or None if there is none. Raises
    UserError."""
    path = Path(folder, "meta.pkl")
    if not path.exists():
        return None
    try:
        meta = parse_meta_of_nanogpt(read_regular(path), {f"{split}_tokens": 1 for split in SPLITS})
    except Exception as error:  # a corrupt pickle raises nearly anything
        raise UserError(f"{path} can't be used ({type(error).__name__}: {error}): restore or remove it") from None
    if meta is None:
        raise UserError(f"{path} is of a dataset with a meta.json: restore that, or prepare the dataset again")
    return meta["tokenizer"], meta["vocab_size"]


def _meta_of_nanogpt(folder):
    pickled = None
    path = folder / "meta.pkl"
    if path.exists():
        pickled = read_regular(path)
    tokens = {}
    for split in SPLITS:
        size = check_regular(folder / f"{split}.bin")
        tokens[f"{split}_tokens"] = size // DTYPES["uint16"].itemsize
    meta = parse_meta_of_nanogpt(pickled, tokens)
    if meta is None:  # the meta.pkl is ours, and the data perhaps of conversations or in uint32
        raise FileNotFoundError(None, None, str(folder / "meta.json"))
    return meta


def check_dataset(folder, block_size=1):
    """Return the meta of a dataset that can be trained on with sequences of `block_size` tokens. Raises UserError with
    all problems, one line each. Of a large file, evenly spread slices are read."""
    folder, meta = Path(folder), read_meta(folder)
    if not (folder / "meta.json").exists():
        is_known = (folder / "meta.pkl").exists()
        found = [type_problem(folder / f"{split}.bin", meta["vocab_size"], is_known) for split in SPLITS]
        if any(found):
            raise UserError(next(filter(None, found)))
    if problems := [problem for split in SPLITS for problem in _problems(folder, split, meta, block_size)]:
        raise UserError("\n".join(problems))
    return meta


def _problems(folder, split, meta, block_size):
    """Return what is wrong with the files of a split, as a list of sentences."""
    name = os.path.relpath(folder / f"{split}.bin")
    tokens = meta[f"{split}_tokens"]
    fix = _how_to_fix(folder)
    sizes = {f"{split}.bin": tokens * DTYPES[meta["dtype"]].itemsize}
    if "template" in meta:
        sizes[f"{split}_mask.bin"] = tokens
        fix = f"{fix} --format=chat"
    for file, expected in sizes.items():
        path = os.path.relpath(folder / file)
        if not os.path.exists(path):
            return [f"{path} does not exist: {fix}"]
        size = check_regular(path)
        if size != expected:
            return [f"{path} has {size} bytes, but its {tokens} tokens take {expected}: {fix}"]

    problems = []
    if tokens <= block_size and "template" not in meta:  # the last token of a sequence predicts the one after it
        largest_block = min(meta["train_tokens"], meta["val_tokens"]) - 1
        problems.append(f"{name} has {tokens} tokens, but block_size={block_size} needs {block_size + 1}: train with "
                        f"--block_size={largest_block}, or prepare a longer text")
    ids = open_tokens(Dataset("", 1, folder, meta), split)
    starts = range(0, tokens, max(SLICE, tokens // CHECKED_SLICES))
    largest = max(ids[start:start + SLICE].max() for start in starts)
    if largest >= meta["vocab_size"]:
        problems.append(f"{name} holds token {largest}, which is outside its vocabulary of {meta['vocab_size']}: {fix}")
    return problems


def _how_to_fix(folder):
    """Return the command that makes the dataset of a folder. It never runs code of that folder."""
    own = shlex.quote(os.path.relpath(folder / "prepare.py"))
    any_text = shlex.quote(os.path.relpath(ROOT / "data" / "prepare.py"))
    hub = shlex.quote(os.path.relpath(ROOT / "data" / "prepare_hub.py"))
    if is_own_dataset(folder):
        return f"run python {own}"
    files = {path.name for path in folder.glob("[!.]*")}
    is_prepared = files & {"train.bin", "val.bin", "meta.json", "prepare.py"}
    if folder.is_file() or (files and not is_prepared):  # texts
        return f"run python {any_text} {shlex.quote(str(folder))} --name=mine, and train with --dataset=mine"
    is_below_data = folder.parent == ROOT / "data"
    name = folder.name if is_below_data else os.path.abspath(folder)
    replace = " --overwrite" if (folder / "train.bin").exists() else ""
    if name == "openwebtext":
        return f"run python {hub}{replace}"
    return f"run python {any_text} PATH --name={shlex.quote(name)}{replace}"
