"""Turn documents into a dataset: read and store them, tokenize them in parallel with the datasets library, write them.

Documents keep their order, so the bytes don't depend on the number of workers. Exact duplicates are dropped. The hash
of a document's text decides whether it is for training or for validation.
"""

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import shutil
import signal
import sys
import threading
import time

import numpy as np

from runtime.data.chat import END_OF_ANSWER, TEMPLATE, encode_conversation
from runtime.data.dataset import BEGINS, COUNTS, SPLITS, write_dataset
from runtime.data.tokenizer import CODE_POINTS, end_of_text, numpy_encoder
from runtime.files import UserError
from runtime.prepare import inputs

ROW_BYTES = 2**20  # text per row, at least
ROWS_IN_MEMORY = 16  # rows that each process collects before it writes them
MASK_SHIFT = 30  # of a conversation's token, the bits above its id are its byte of the mask


def prepare(folder, sources, tokenizer, vocab_size, options, workers, overwrite=False, skip_unreadable=False):
    """Write a dataset of `sources` to `folder` and return its meta.json. tokenizer, vocab_size: from tokenizer_meta().
    options: what else the bytes depend on. Raises UserError."""
    if not overwrite and ((folder / "meta.json").exists() or (folder / "train.bin").exists()):
        raise UserError(f"{folder} holds a dataset: choose another --name, or replace it with --overwrite")
    is_char, is_chat = tokenizer["kind"] == "char", options["format"] == "chat"
    dtype = "<u2" if vocab_size <= 2**16 and not is_chat else "<u4"
    separator = ord(END_OF_ANSWER if is_chat else "\n") if is_char else end_of_text(tokenizer)
    reader = Reader(sources, options, skip_unreadable)
    with work_folder(folder) as work:
        encoder = functools.partial(encode_chat if is_chat else encode, numpy_encoder(tokenizer), separator, dtype)
        rows, ids = tokenize(work, reader, encoder, workers), None
        if is_char:  # the tokens are code points so far
            used = np.zeros(CODE_POINTS, bool)
            for row in rows["ids"]:
                used[np.frombuffer(row, dtype) % 2**MASK_SHIFT] = True
            ids = np.cumsum(used, dtype=np.uint32) - 1
            tokenizer = {"kind": "char", "chars": "".join(map(chr, np.flatnonzero(used)))}
            if is_chat:
                tokenizer["end_of_text"] = int(ids[separator])
            vocab_size = len(tokenizer["chars"])
        train, val = (ids_of(rows, split, dtype, ids) for split in SPLITS)
        source = {"name": " ".join(options["paths"]), "sha256": reader.digest.hexdigest(), "bytes": reader.bytes}
        details = {"masks": {split: masks_of(rows, split) for split in SPLITS}, "template": TEMPLATE} if is_chat else {}
        return write_dataset(folder, train, val, tokenizer, vocab_size, source, documents=reader.counts,
                             options=options, **details)


@contextlib.contextmanager
def work_folder(folder):
    """Yield a folder in `folder`/.partial for this process alone. It is removed at the end, or else by the next run."""
    work = folder / ".partial"
    work.mkdir(parents=True, exist_ok=True)
    with open(work / ".lock", "w") as lock:
        try:  # not flock(): workers would inherit it, and they outlive a killed parent by up to a second
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise UserError(f"another process is preparing {folder}: wait, or choose another --name") from None
        try:
            shutil.rmtree(work / "rows", ignore_errors=True)
            yield work / "rows"
        finally:
            shutil.rmtree(work, ignore_errors=True)
            with contextlib.suppress(OSError):  # it holds a dataset
                folder.rmdir()


class Reader:
    """Reads all sources once, drops duplicates and chooses each document's split. Afterwards, `counts` holds the
    numbers of documents, `bytes` the input's size, and `digest` the input's hash."""

    def __init__(self, sources, options, skip_unreadable):
        self.sources, self.options, self.skip_unreadable = sources, options, skip_unreadable
        self.counts = dict.fromkeys((*SPLITS, "duplicates", "empty", "unreadable"), 0)
        self.hashes, self.digest, self.bytes = set(), hashlib.sha256(), 0

    def rows(self):
        """Yield rows of about a megabyte: a split and its next texts. An empty text marks the end of a document."""
        texts, sizes = {split: [] for split in SPLITS}, dict.fromkeys(SPLITS, 0)
        for source in self.sources:
            for split, text in self.texts(source):
                texts[split].append(text)
                sizes[split] += len(text)
                if sizes[split] >= ROW_BYTES:
                    yield {"split": split, "texts": texts[split]}
                    texts[split], sizes[split] = [], 0
        yield from ({"split": split, "texts": texts[split]} for split in SPLITS)

    def texts(self, source):
        """Yield (split, text) of each record that is kept, and (split, b"") after each document. A long text is cut
        into records. Between two of them there is no end if both are kept and in the same split."""
        place, size, unfinished = 0 if source.kind == "text" else 1, 0, None
        for record in inputs.read_records(source, self.options["field"], self.options["max_document_bytes"]):
            kind, text, ends = self.classify(record, source, place)
            self.counts[kind] += 1
            if unfinished and kind != unfinished:
                yield unfinished, b""
            if kind in SPLITS:
                yield kind, text
                if ends:
                    yield kind, b""
            unfinished = kind if kind in SPLITS and not ends else None
            self.digest.update(record)
            size += len(record)
            place += len(record) if source.kind == "text" else 1
        if unfinished:
            yield unfinished, b""
        self.bytes += source.bytes or size

    def classify(self, record, source, place):
        """Return (what `counts` counts a record as, its text, whether its document ends with it)."""
        try:
            text, ends = inputs.text_of(record, source.kind, self.options["field"])
        except ValueError as error:
            if not self.skip_unreadable:
                raise UserError(f"{source.name}, {inputs.UNIT[source.kind]} {place:,}: {error}; to skip such "
                                "documents, add --skip_unreadable") from None
            return "unreadable", b"", True
        if not text:
            return "empty", text, ends
        number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
        if number in self.hashes:
            return "duplicates", text, ends
        self.hashes.add(number)
        return "val" if number < int(self.options["val_fraction"] * 2**64) else "train", text, ends

    def check(self):
        """Raise UserError unless there are documents in both splits."""
        train, val = self.counts["train"], self.counts["val"]
        if not train + val:
            raise UserError("the input has no text: check the files, and --field for JSON lines or Parquet")
        if not (train and val):
            raise UserError(f"{train} documents are for training and {val} for validation, and each split needs "
                            "one: change --val_fraction, or cut texts into more with --max_document_bytes=BYTES")


def tokenize(work, reader, encode, workers):
    """Return the rows of `reader`, each encoded, as a datasets.Dataset in the folder `work`."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}  # read when the libraries are imported
    if not sys.stderr.isatty():  # report progress once a minute
        for name in ("TQDM_DELAY", "TQDM_MININTERVAL", "TQDM_MAXINTERVAL"):
            os.environ.setdefault(name, "60")
    import datasets
    import multiprocess

    datasets.logging.set_verbosity_error()
    string, binary = datasets.Value("string"), datasets.Value("large_binary")
    try:
        rows = datasets.Dataset.from_generator(
            reader.rows, datasets.Features({"split": string, "texts": datasets.List(binary)}), work,
            fingerprint="texts", writer_batch_size=ROWS_IN_MEMORY)
        reader.check()
        os.register_at_fork(after_in_child=functools.partial(follow_parent, os.getpid()))
        return rows.map(encode, num_proc=workers, remove_columns="texts", writer_batch_size=ROWS_IN_MEMORY,
                        features=datasets.Features({"split": string, "ids": binary}),
                        cache_file_name=str(work / "ids.arrow"), new_fingerprint="ids", desc="tokenizing")
    except (datasets.exceptions.DatasetGenerationError, multiprocess.TimeoutError) as error:
        raise error.__context__ from None  # the reader's error, or Ctrl-C
    except RuntimeError as error:
        if "abruptly died" not in str(error):
            raise
        raise UserError("a worker process was killed, perhaps because memory ran out; nothing was changed: try again "
                        f"with --workers={max(1, workers // 2)}") from None


def follow_parent(parent):
    """Ignore Ctrl-C in a worker process, which its parent handles, and exit when the parent has gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch():
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def encode(encoder, separator, dtype, row):
    """Return the token ids of a row's texts, as bytes. The separator follows each document."""
    separator = np.array([separator], "<u4")
    ids = [encoder(text.decode()) if text else separator for text in row["texts"]]
    return {"ids": np.concatenate(ids or [[]]).astype(dtype).tobytes()}


def encode_chat(encoder, end, dtype, row):
    """Return the token ids of a row's conversations, with the mask in their upper bits, as bytes."""
    packed = [np.zeros(0, dtype)]
    for text in filter(None, row["texts"]):
        ids, counts = (np.array(part, dtype) for part in encode_conversation(json.loads(text), encoder, end))
        mask = counts * COUNTS
        mask[0] |= BEGINS
        packed.append(ids | mask << MASK_SHIFT)
    return {"ids": np.concatenate(packed).tobytes()}


def packed_ids(rows, split, dtype):
    return (np.frombuffer(packed, dtype) for row_split, packed in zip(rows["split"], rows["ids"]) if row_split == split)


def ids_of(rows, split, dtype, ids=None):
    """Yield the token ids of a split, one array per row. ids: the id of each code point."""
    for tokens in packed_ids(rows, split, dtype):
        tokens = tokens % 2**MASK_SHIFT if dtype == "<u4" else tokens
        yield tokens if ids is None else ids[tokens]


def masks_of(rows, split):
    """Yield the mask of a split of conversations, one array per row."""
    return ((packed >> MASK_SHIFT).astype(np.uint8) for packed in packed_ids(rows, split, "<u4"))


def summary(meta):
    """Return what the screen shows of a prepared dataset."""
    documents = meta["documents"]
    lines = [f"{split}: {meta[f'{split}_tokens']:,} tokens in {documents[split]:,} documents" for split in SPLITS]
    lines.append(f"vocabulary: {meta['vocab_size']:,} ({meta['tokenizer']['kind']}), {meta['dtype']}")
    if skipped := [f"{documents[name]:,} {name}" for name in ("duplicates", "empty", "unreadable") if documents[name]]:
        lines.append(f"skipped: {', '.join(skipped)}")
    return "\n".join(lines)
