"""Documents into a data set: read by this process, tokenized by workers, and written by this process in the order in
which they were read; so the bytes are the same for any number of workers.

Exact duplicates are dropped. A document is for validation if its hash is small, and so in each run.
"""

import hashlib
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from runtime import documents, halfdone
from runtime.data.dataset import DTYPES, SLICE, SPLITS, DatasetError, dtype_for, meta_files, move_in
from runtime.data.tokenizer import CODE_POINTS, array_encoder, end_of_text
from runtime.files import write_temp
from runtime.overlap import overlap
from runtime.workers import in_order, pool_of

COMMIT_S = 5  # seconds between two marks from which work can go on
FEW = 20_000  # tokens of validation whose mean loss says little
RUN = {"char": 128}  # tokens in the runs of validation that are looked for in training; else 32


def prepare(folder, sources, tokenizer, vocab_size, asked, workers, overwrite=False, skip_unreadable=False, drop=True,
            known_counts=None):
    """Make a data set of `sources` in `folder`, or go on with it, and return its meta.json; None if it is there.

    tokenizer, vocab_size: as meta_of() gives them. asked: all that the bytes depend on, with "paths", "val_share" and
    "shard_tokens". drop: leave out duplicates and empty documents. known_counts: the tokens that each split must have.
    Raises DatasetError.
    """
    begun = halfdone.begin(folder, asked, overwrite)
    if not begun:
        return None
    partial, state = begun
    if not state["parts"]:
        dtype = DTYPES[dtype_for(vocab_size)]
        shard_bytes = asked["shard_tokens"] * dtype.itemsize
        halfdone.cut_back(partial, state, shard_bytes)
        with pool_of(workers, set_up, tokenizer, asked.get("field"), dtype) as pool:
            tokenize(pool, partial, state, sources, separator_of(tokenizer, dtype), asked["val_share"], shard_bytes,
                     Seen(partial) if drop else None, skip_unreadable)
            look_at_splits(partial, state)
            counts = {split: state["bytes"][split] // dtype.itemsize for split in SPLITS}
            assert not known_counts or counts == known_counts, f"{counts} tokens, where {known_counts} are right"
            found = overlap(pool, partial, dtype, RUN.get(tokenizer["kind"], 32))
        finish(partial, state, tokenizer, vocab_size, asked, found)
    move_in(folder, {name: partial / part for name, part in state["parts"].items()})
    halfdone.give_up(partial)
    return halfdone.read_json(folder / "meta.json")


def separator_of(tokenizer, dtype):
    """What stands after each document: end-of-text, or among characters a newline."""
    return np.array([ord("\n") if tokenizer["kind"] == "char" else end_of_text(tokenizer)], dtype)


# ---- In the workers

WORKER = {}  # what set_up() has set up


def set_up(tokenizer, field, dtype):
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    WORKER.update(encode=array_encoder(tokenizer), field=field, dtype=dtype, chars=tokenizer["kind"] == "char")


class Encoded(NamedTuple):
    """The records of a batch: arrays of their hashes, of how many tokens they have, and of whether a document ends with
    them; the tokens of all; {record: why it can't be read}; the characters, where they are the tokens."""

    hashes: np.ndarray
    sizes: np.ndarray
    ends: np.ndarray
    ids: np.ndarray
    unreadable: dict
    chars: str


def encode(records, kind, first):
    """A worker's task. first: the place of the first record, as documents.PLACES counts."""
    hashes, ids, unreadable, place = np.zeros(len(records), "<u8"), [], {}, first
    for i, record in enumerate(records):
        text = ""
        try:
            text = documents.text_of(record, kind, WORKER["field"])
            hashes[i] = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
        except UnicodeEncodeError:
            text, unreadable[i] = "", f"{documents.PLACES[kind]} {place:,} has half of a surrogate pair in its text"
        except ValueError as error:
            unreadable[i] = f"{documents.PLACES[kind]} {place:,} {error}"
        ids.append(WORKER["encode"](text))
        place += len(record) if kind == "text" else 1
    tokens = np.concatenate(ids).astype(WORKER["dtype"])
    chars = "".join(map(chr, np.flatnonzero(np.bincount(tokens)))) if WORKER["chars"] else ""
    return Encoded(hashes, np.array([len(piece) for piece in ids]),
                   np.array([documents.ends(record, kind) for record in records]), tokens, unreadable, chars)


# ---- In this process


class Batch(NamedTuple):
    source: documents.Source
    last: bool  # nothing but the end of the file
    read: int  # bytes of the file up to here
    digest: str  # of what they hold


def reading(sources, first, skip, before):
    """(Batch, the task that encodes it) from a place on: so many files, and so many batches of the next, which held
    what has the digest `before`. DatasetError where they don't."""
    for source in sources[first:]:
        digest, number, read = hashlib.sha256(), 0, 0
        for records, place, read in source.batches():
            digest.update(b"".join(records))
            number += 1
            if number > skip:
                yield Batch(source, False, read, digest.hexdigest()), (encode, records, source.kind, place)
            elif number == skip and digest.hexdigest() != before:
                number = 0
                break
        if number < skip:
            raise DatasetError(f"{source.name} is not what it was when the work began: begin anew with --overwrite")
        yield Batch(source, True, read, digest.hexdigest()), None
        skip = 0


def tokenize(pool, partial, state, sources, separator, val_share, shard_bytes, seen, skip_unreadable):
    """Read, tokenize and write what is left of the sources."""
    done, committed = state["read_before"], time.monotonic()
    todo = reading(sources, state["source"], state["batches"], state["digest"])
    with progress(sum(source.bytes for source in sources), state["read"]) as bar:
        for batch, encoded in in_order(pool, todo):
            if batch.last:
                added = {split: [separator] for split in state["open"]}
                digest = hashlib.sha256((state["sha256"] + batch.digest).encode()) if state["source"] else None
                done += batch.read
                state.update(open={}, source=state["source"] + 1, sha256=digest.hexdigest() if digest else batch.digest,
                             batches=0, digest=None, read_before=done)
            elif encoded.unreadable and not skip_unreadable:
                halfdone.commit(partial, state)
                raise DatasetError(f"{batch.source.name}, {next(iter(encoded.unreadable.values()))}; --skip_unreadable "
                                   "leaves such documents out")
            else:
                added = sort_out(state, seen, encoded, batch.source.split, int(val_share * 2**64), separator)
                state.update(batches=state["batches"] + 1, digest=batch.digest, read=done + batch.read)
            for name, pieces in added.items():
                halfdone.append(partial, state, name, np.concatenate(pieces), shard_bytes)
            bar.update(state["read"] - bar.n)
            if time.monotonic() - committed > COMMIT_S:
                halfdone.commit(partial, state)
                committed = time.monotonic()
    halfdone.commit(partial, state)


def progress(total, done):
    """A bar with the time left, where that is a terminal; else a line a minute."""
    terminal = sys.stdout.isatty()
    form = "{n_fmt}/{total_fmt}, {rate_fmt}, {remaining} left" if total else "{n_fmt}, {rate_fmt}"
    form = f"{{percentage:3.0f}}% |{{bar}}| {form}" if terminal and total else form + "\n" * (not terminal)
    return tqdm(total=total or None, initial=done, unit="B", unit_scale=True, file=sys.stdout, dynamic_ncols=True,
                leave=not terminal, mininterval=0.1 if terminal else 60, delay=0 if terminal else 60, bar_format=form)


def sort_out(state, seen, encoded, split, val_below, separator):
    """What the records of a batch add to each file, {name: arrays}; counted in the state."""
    tokens, hashes = {name: [] for name in SPLITS}, []
    fresh = seen.add(encoded.hashes, encoded.sizes) if seen else [True] * len(encoded.sizes)
    columns = encoded.hashes, encoded.sizes, np.cumsum(encoded.sizes), encoded.ends
    for i, (hashed, size, border, ends) in enumerate(zip(*(column.tolist() for column in columns))):
        record = state["records"]
        state["records"] += 1
        if i in encoded.unreadable:
            state["unreadable"] += 1
        elif seen and not size:
            state["empty"] += 1
        elif not fresh[i]:
            state["duplicates"] += 1
        else:
            to = split or ("val" if hashed < val_below else "train")
            if state["open"].pop(to, record) != record:  # the document before went on elsewhere, or not at all
                tokens[to].append(separator)
            tokens[to].append(encoded.ids[border - size : border])
            if ends:
                tokens[to].append(separator)
            else:
                state["open"][to] = record + 1
            state["documents"][to] += 1
            hashes.append(hashed)
    state["least"] = min([state["least"], *hashes])
    if not set(encoded.chars) <= set(state["chars"]):
        state["chars"] = "".join(sorted({*state["chars"], *encoded.chars}))
    return {name: pieces for name, pieces in {**tokens, "hashes": [np.array(hashes, "<u8")]}.items() if pieces}


class Seen:
    """The hashes of the documents so far: 8 bytes each, but for the newest, which are in a set."""

    def __init__(self, partial):
        files = [np.fromfile(path, "<u8") for path in halfdone.grown(partial, "hashes")]
        self.old, self.new = np.sort(np.concatenate([np.array([2**64 - 1], "<u8"), *files])), set()

    def add(self, hashes, sizes):
        """Which of them are met for the first time, a list; those without tokens don't count."""
        known, fresh = self.old[np.searchsorted(self.old, hashes)] == hashes, []
        for value, size, is_known in zip(hashes.tolist(), sizes.tolist(), known.tolist()):
            fresh.append(size > 0 and not is_known and value not in self.new)
            if fresh[-1]:
                self.new.add(value)
        if len(self.new) > max(2**18, len(self.old) // 8):
            self.old = np.sort(np.concatenate([self.old, np.fromiter(self.new, "<u8")]))
            self.new.clear()
        return fresh


def look_at_splits(partial, state):
    """DatasetError, and nothing left behind, unless there is something in both splits."""
    train, val = (state["documents"][split] for split in SPLITS)
    if train and val:
        return
    if train + val == 0:
        problem = "there is no text"
    elif train + val == 1:
        problem = "it is one document, and two splits need more; --cut=BYTES cuts a text into several"
    elif val == 0:
        enough = state["least"] / 2**64 + 0.0005  # rounded up
        problem = f"none of its {train} documents fell to validation; --val_share={enough:.3f} is enough for one"
    else:
        problem = f"all of its {val} documents fell to validation; a smaller --val_share leaves some to train on"
    halfdone.give_up(partial)
    raise DatasetError(f"{partial.parent} can't be made: {problem}")


def finish(partial, state, tokenizer, vocab_size, asked, found):
    """Write what the data set has beside its tokens, hash all, and put down in the state that it is whole."""
    parts, files, table, dtype = {}, {}, None, DTYPES[dtype_for(vocab_size)]

    def add(name, chunks):
        part, size, sha256 = write_temp(partial / name, chunks)
        parts[name], files[name] = part.name, {"bytes": size, "sha256": sha256}

    if tokenizer["kind"] == "char":  # so far they are code points; now they get their ids, in order
        chars = sorted({*state["chars"], "\n"})
        tokenizer, vocab_size = {"kind": "char", "chars": "".join(chars)}, len(chars)
        table = np.zeros(CODE_POINTS, DTYPES[dtype_for(vocab_size)])
        table[[ord(char) for char in chars]] = np.arange(vocab_size)
    meta = {"format": 1, "tokenizer": tokenizer, "vocab_size": vocab_size, "dtype": dtype_for(vocab_size)}
    for split in SPLITS:
        paths = halfdone.grown(partial, split)
        meta[f"{split}_tokens"] = state["bytes"][split] // dtype.itemsize
        for number, path in enumerate(paths):
            name = f"{split}.bin" if len(paths) == 1 else f"{split}_{number:05d}.bin"
            if table is None:
                with open(path, "rb") as file:
                    sha256 = hashlib.file_digest(file, "sha256").hexdigest()
                parts[name], files[name] = path.name, {"bytes": path.stat().st_size, "sha256": sha256}
            else:
                size = path.stat().st_size
                add(name, (table[np.fromfile(path, dtype, SLICE, offset=offset)].tobytes()
                           for offset in range(0, size, SLICE * dtype.itemsize)))
    if tokenizer["kind"] == "hf":
        add("tokenizer.json", [Path(tokenizer["file"]).read_bytes()])
        meta["tokenizer"] = {key: tokenizer[key] for key in ("kind", "sha256", "end_of_text")}
    left_out = {name: state[name] for name in ("duplicates", "empty", "unreadable")}
    meta |= {"source": {"name": " ".join(asked["paths"]), "sha256": state["sha256"], "bytes": state["read"]},
             "files": dict(files), "documents": state["documents"] | left_out, "overlap": found, "asked": asked}
    for name, content in meta_files(meta).items():
        add(name, [content])
    state["parts"] = parts
    halfdone.commit(partial, state)


def summary(meta):
    """What a data set has come to, for the screen."""
    documents, (n, looked_for, found) = meta["documents"], meta["overlap"].values()
    lines = [f"{split}: {meta[f'{split}_tokens']:,} tokens in {documents[split]:,} documents" for split in SPLITS]
    lines.append(f"vocabulary: {meta['vocab_size']:,} ({meta['tokenizer']['kind']}), {meta['dtype']}")
    left_out = [f"{documents[name]:,} {name}" for name in ("duplicates", "empty", "unreadable") if documents[name]]
    lines += [f"left out: {', '.join(left_out)}"] * bool(left_out)
    if looked_for:
        lines.append(f"overlap: {found:,} of {looked_for:,} runs of {n} tokens of validation are in training too "
                     f"({found / looked_for:.1%})")
    if meta["val_tokens"] < FEW:
        lines.append("note: these are few tokens to validate with; a larger --val_share takes more")
    return "\n".join(lines)
