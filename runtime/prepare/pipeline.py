"""Turn documents into a dataset: read and store them, tokenize them in parallel with the datasets library, write them.

Documents keep their order, so the bytes don't depend on the number of workers. Exact duplicates are dropped. The hash
of a document's text decides whether it is for training or for validation.
"""

import contextlib
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
from runtime.data.dataset import SPLITS, write_dataset
from runtime.data.tokenizer import CODE_POINTS, end_of_text, numpy_encoder
from runtime.files import UserError, lock_folder
from runtime.prepare import inputs

ROW_BYTES = 2**20  # text per row, at least
ROWS_IN_MEMORY = 16  # rows that each process collects before it writes them


def prepare(folder, files, tokenizer, vocab_size, options, workers, overwrite=False, skip_unreadable=False):
    """Write a dataset of `files` to `folder` and return its meta.json. tokenizer, vocab_size: from tokenizer_meta().
    options: what else the bytes depend on. Raises UserError."""
    if not overwrite and (folder / "train.bin").exists():
        raise UserError(f"{folder} holds a dataset: choose another --name, or replace it with --overwrite")
    is_char, is_chat = tokenizer["kind"] == "char", options["format"] == "chat"
    dtype = "<u2" if vocab_size <= 2**16 else "<u4"
    end = ord(END_OF_ANSWER if is_chat else "\n") if is_char else end_of_text(tokenizer)
    to_ids = numpy_encoder(tokenizer)
    if is_chat and to_ids("User:\nUser:\n").tolist() != 2 * to_ids("User:\n").tolist():
        raise UserError("this tokenizer adds a space before a text, or joins lines: choose another for conversations")
    encoder = functools.partial(encode_chat if is_chat else encode, to_ids, end, dtype)
    reader = Reader(files, options, skip_unreadable)
    with work_folder(folder) as work:
        rows = tokenize(work, reader, encoder, workers)
        train, val = (column(rows, "ids", dtype, split) for split in SPLITS)
        if is_char:  # the tokens are code points so far
            used = np.zeros(CODE_POINTS, bool)
            for points in column(rows, "ids", dtype):
                used[points] = True
            ids = np.cumsum(used, dtype=np.uint32) - 1
            train, val = map(ids.__getitem__, train), map(ids.__getitem__, val)
            tokenizer = {"kind": "char", "chars": "".join(map(chr, np.flatnonzero(used)))}
            if is_chat:
                tokenizer["end_of_text"] = int(ids[end])
            vocab_size = len(tokenizer["chars"])
        source = {"name": " ".join(options["paths"]), "sha256": reader.digest.hexdigest(), "bytes": reader.bytes}
        details = {}
        if is_chat:
            masks = {f"{split}_mask.bin": column(rows, "mask", np.uint8, split) for split in SPLITS}
            details = {"template": TEMPLATE, "masks": masks}
        return write_dataset(folder, train, val, tokenizer, vocab_size, source, documents=reader.counts,
                             options=options, **details)


@contextlib.contextmanager
def work_folder(folder):
    """Yield a folder in `folder`/.partial for this process alone. It is removed at the end, or else by the next run."""
    work = folder / ".partial"
    with lock_folder(work, "--name"):
        try:
            shutil.rmtree(work / "rows", ignore_errors=True)
            yield work / "rows"
        finally:
            shutil.rmtree(work, ignore_errors=True)
            with contextlib.suppress(OSError):  # it holds a dataset
                folder.rmdir()


class Reader:
    """Reads all files once, drops duplicates and chooses each document's split. Afterwards, `counts` holds the numbers
    of documents, `bytes` the unpacked input's size, and `digest` its hash."""

    def __init__(self, files, options, skip_unreadable):
        self.files, self.options, self.skip_unreadable = files, options, skip_unreadable
        self.counts = dict.fromkeys((*SPLITS, "duplicates", "empty", "unreadable"), 0)
        self.hashes, self.digest, self.bytes = set(), hashlib.sha256(), 0

    def rows(self):
        """Yield rows of about 1 MB: a split and its next texts. An empty text ends a document. Raises UserError."""
        texts, sizes = {split: [] for split in SPLITS}, dict.fromkeys(SPLITS, 0)
        for file in self.files:
            for split, text in self.texts(file):
                texts[split].append(text)
                sizes[split] += len(text)
                if sizes[split] >= ROW_BYTES:
                    yield {"split": split, "texts": texts[split]}
                    texts[split], sizes[split] = [], 0
        yield from ({"split": split, "texts": [*texts[split], b""]} for split in SPLITS)
        train, val = self.counts["train"], self.counts["val"]
        if not (train and val):
            raise UserError(f"{train} documents are for training and {val} for validation, and each split needs one: "
                            "check that the files have text, cut a long text into more documents with "
                            f"--max_document_bytes={max(64, self.bytes // 50)}, or change --val_fraction")

    def texts(self, file):
        """Yield (split, text) of each record that is kept, and (split, b"") between documents. A long text is cut into
        records. Two in a row that are kept in the same split are one document."""
        kind, field = self.options["format"] or inputs.kind_of(file), self.options["field"]
        begin, unfinished = self.bytes, None  # unfinished: where a document's last record went, if it isn't complete
        for number, record in enumerate(inputs.read_records(file, kind, field, self.options["max_document_bytes"]), 1):
            place = f"{file}, {f'byte {self.bytes - begin:,}' if kind == 'text' else f'line {number:,}'}"
            counted, text, ends = self.classify(record, kind, place)
            self.counts[counted] += 1
            if counted in SPLITS:
                if counted != unfinished and self.counts[counted] > 1:
                    yield counted, b""
                yield counted, text
            unfinished = None if ends else counted
            self.digest.update(record)
            self.bytes += len(record)

    def classify(self, record, kind, place):
        """Return (what `counts` counts a record as, its text, whether its document ends with it)."""
        if len(record) > inputs.MAX_RECORD_BYTES:  # perhaps only the beginning of a line
            raise UserError(f"{place} is longer than {inputs.MAX_RECORD_BYTES:,} bytes: split it into documents")
        try:
            text, ends = inputs.text_of(record, kind, self.options["field"])
        except ValueError as error:
            if not self.skip_unreadable:
                raise UserError(f"{place}: {error}; to skip such documents, add --skip_unreadable") from None
            return "unreadable", b"", True
        if not text:
            return "empty", text, ends
        number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
        if number in self.hashes:
            return "duplicates", text, ends
        self.hashes.add(number)
        return "val" if number < int(self.options["val_fraction"] * 2**64) else "train", text, ends


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
    parents = [os.getpid()]  # of forks that are workers; empty once there are none
    try:
        rows = datasets.Dataset.from_generator(
            reader.rows, datasets.Features({"split": string, "texts": datasets.List(binary)}), work,
            fingerprint="texts", writer_batch_size=ROWS_IN_MEMORY)
        os.register_at_fork(after_in_child=lambda: parents and follow_parent(parents.pop()))  # it can't be undone
        return rows.map(encode, num_proc=workers, remove_columns="texts", writer_batch_size=ROWS_IN_MEMORY,
                        features=datasets.Features({"split": string, "ids": binary, "mask": binary}),
                        cache_file_name=str(work / "ids.arrow"), new_fingerprint="ids", desc="tokenizing")
    except (datasets.exceptions.DatasetGenerationError, multiprocess.TimeoutError) as error:
        raise error.__context__ from None  # the reader's error, or Ctrl-C
    except RuntimeError as error:
        if "abruptly died" not in str(error):
            raise
        raise UserError("a worker process was killed, perhaps because memory ran out; nothing was changed: try again "
                        f"with --workers={max(1, workers // 2)}") from None
    finally:
        parents.clear()


def follow_parent(parent):
    """Ignore Ctrl-C in a worker process, which its parent handles, and exit when the parent has gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch():
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def encode(encoder, end, dtype, row):
    """Return the token ids of a row's texts, as bytes. `end` follows each document."""
    end = np.array([end], "<u4")
    ids = [encoder(text.decode()) if text else end for text in row["texts"]]
    return {"ids": np.concatenate(ids or [[]]).astype(dtype).tobytes(), "mask": b""}


def encode_chat(encoder, end, dtype, row):
    """Return the token ids of a row's conversations and their mask, as bytes."""
    ids, mask = [], []
    for text in filter(None, row["texts"]):
        more_ids, more_mask = encode_conversation(json.loads(text), encoder, end)
        ids += more_ids
        mask += more_mask
    return {"ids": np.array(ids, dtype).tobytes(), "mask": bytes(mask)}


def column(rows, name, dtype, only=None):
    """Yield the arrays in a column of the rows. only: a split; None: both."""
    return (np.frombuffer(row, dtype) for split, row in zip(rows["split"], rows[name]) if only in (None, split))
