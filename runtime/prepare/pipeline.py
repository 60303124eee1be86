"""Turn documents into a dataset: read them, tokenize them in several threads, store the tokens, write the dataset.

Documents keep their order, so the bytes don't depend on the number of workers. Exact duplicates are dropped. A file is
for training or for validation, or the hash of each document's text decides."""

import collections
import hashlib
import itertools
import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from tqdm import tqdm

from runtime.data.chat import END_OF_ANSWER, TEMPLATE, encode_conversation
from runtime.data.dataset import SPLITS, slices, write_dataset
from runtime.data.tokenizer import CODE_POINTS, end_of_text, numpy_encoder
from runtime.errors import UserError
from runtime.files import name_in_error, new_files_in
from runtime.prepare import coverage, inputs
from runtime.prepare.conversations import Conversations
from runtime.prepare.splits import check_both_splits

ROW_BYTES = 2**20  # text per row, at least


def prepare(folder, files, tokenizer, vocab_size, options, workers, skip_unreadable=False):
    """Write a dataset of `files` to `folder` and return its meta.json. files: [(path, "train", "val", or None if the
    hash of each document decides)]. tokenizer, vocab_size: from tokenizer_meta(). options: what else the bytes depend
    on. Raises UserError."""
    is_char, is_chat = tokenizer["kind"] == "char", options["format"] == "chat"
    dtype = "<u2" if vocab_size <= 2**16 else "<u4"
    end = ord(END_OF_ANSWER if is_chat else "\n") if is_char else end_of_text(tokenizer)
    to_ids = numpy_encoder(tokenizer)
    if is_chat:
        coverage.check_headers(tokenizer)
    reader = Reader(files, options, skip_unreadable)
    with new_files_in(folder, "--name"):
        stored = tokenize(folder, reader.rows(), workers, to_ids, end, dtype, is_chat)
        if tokenizer["kind"] == "hf":
            coverage.report(coverage.measure(tokenizer, reader.sample.texts()))
        tokens = [stored[split, "ids"].view(dtype) for split in SPLITS]
        if is_char:  # the tokens are code points so far
            used = np.zeros(CODE_POINTS, bool)
            for points in itertools.chain(*map(slices, tokens)):
                used[points] = True
            ids = np.cumsum(used, dtype=np.uint32) - 1
            tokens = [map(ids.__getitem__, slices(points)) for points in tokens]
            tokenizer = {"kind": "char", "chars": "".join(map(chr, np.flatnonzero(used)))}
            if is_chat:
                tokenizer["end_of_text"] = int(ids[end])
            vocab_size = len(tokenizer["chars"])
        source = {"name": " ".join(options["paths"]), "sha256": reader.digest.hexdigest(), "bytes": reader.bytes}
        masks = {f"{split}_mask.bin": [stored[split, "mask"]] for split in SPLITS if is_chat}
        more = {}
        if is_chat:
            more = {"template": TEMPLATE, "unused_fields": dict(reader.chats.unused),
                    "problems": reader.chats.report()}
        return write_dataset(folder, *tokens, tokenizer, vocab_size, source, masks, documents=reader.counts,
                             options=options, **more)


class Reader:
    """Reads all files once, drops duplicates and chooses each document's split. Afterwards, `counts` holds the numbers
    of documents, `bytes` the unpacked input's size, `digest` its hash, and `sample` some documents."""

    def __init__(self, files, options, skip_unreadable):
        self.files, self.options, self.skip_unreadable = files, options, skip_unreadable
        self.counts = dict.fromkeys((*SPLITS, "duplicates", "empty", "unreadable"), 0)
        self.hashes, self.digest, self.bytes = set(), hashlib.sha256(), 0
        self.sample = coverage.Sample(is_chat=options["format"] == "chat")
        self.chats = Conversations(options["ignore_fields"]) if options["format"] == "chat" else None

    def is_refused(self):
        """Return whether there are conversations that can't be used, so that there will be no dataset."""
        return self.chats is not None and bool(self.chats.problems) and not self.skip_unreadable

    def rows(self):
        """Yield rows of about 1 MB, [(split, its next text)]. An empty text ends a document. Raises UserError."""
        row, size = [], 0
        read = self.texts if self.chats is None else self.conversations
        for split, text in itertools.chain.from_iterable(itertools.starmap(read, self.files)):
            row.append((split, text))
            size += len(text)
            if size >= ROW_BYTES:
                yield row
                row, size = [], 0
        if self.is_refused():
            raise UserError("\n".join(self.chats.report()) + "; or skip such conversations with --skip_unreadable")
        yield [*row, *((split, b"") for split in SPLITS)]
        is_cut = "text" in {self.kind(file) for file, _ in self.files}
        check_both_splits(self.counts, self.bytes, self.options["val_fraction"], is_cut)

    def kind(self, file):
        """Return what a file holds: --format, or what its name says."""
        return self.options["format"] or inputs.kind_of(file)

    def texts(self, file, split):
        """Yield (split, text) of each record that is kept, and (split, b"") between documents. A long text is cut into
        records. Two in a row that are kept in the same split are one document. split: the file's, or None."""
        kind, field = self.kind(file), self.options["field"]
        begin, unfinished = self.bytes, None  # unfinished: where a document's last record went, if it isn't complete
        for number, record in enumerate(inputs.read_records(file, kind, field, self.options["max_document_bytes"]), 1):
            counted, text, ends = self.classify(record, file, kind, number, self.bytes - begin, split)
            self.counts[counted] += 1
            if counted in SPLITS:
                if counted != unfinished and self.counts[counted] > 1:
                    yield counted, b""
                yield counted, text
            unfinished = None if ends else counted
            self.digest.update(record)
            self.bytes += len(record)

    def conversations(self, file, split):
        """Yield (split, its messages as JSON) of each conversation that is kept. After one that can't be used, the
        others are only read, to count such ones. split: the file's, or None."""
        for place, record in inputs.read_conversations(file):
            place = f"{file}, {place}"
            check_length(record, place)
            self.digest.update(record)
            self.bytes += len(record)
            if not record.strip():
                self.counts["empty"] += 1
                continue
            text = self.chats.read(record, place)
            counted = self.choose(text, split) if text else "unreadable"
            self.counts[counted] += 1
            if counted in SPLITS and not self.is_refused():
                yield counted, text

    def classify(self, record, file, kind, number, at, split):
        """Return (what `counts` counts a record as, its text, whether its document ends with it). number, at: as for
        place_of(). split: that of its file, or None. Raises UserError."""
        if len(record) > inputs.MAX_RECORD_BYTES:
            check_length(record, place_of(file, kind, number, at))
        try:
            text, ends = inputs.text_of(record, kind, self.options["field"])
        except (ValueError, UserError) as error:
            if self.skip_unreadable:
                return "unreadable", b"", True
            if kind == "text" and isinstance(error, UnicodeDecodeError):  # one offset, not two to add up
                at += error.start
                error = f"byte 0x{record[error.start]:02x} isn't UTF-8 ({error.reason})"
            raise UserError(f"{place_of(file, kind, number, at)}: {error}; correct it, or skip such documents with "
                            "--skip_unreadable") from None
        return self.choose(text, split) if text else "empty", text, ends

    def choose(self, text, split):
        """Return the split of a text, or "duplicates" if there was the same before. split: that of its file, or None
        if the hash decides."""
        number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
        if number in self.hashes:
            return "duplicates"
        self.hashes.add(number)
        self.sample.add(number, text)
        if split is not None:
            return split
        return "val" if number < int(self.options["val_fraction"] * 2**64) else "train"


def place_of(file, kind, number, at):
    """Return where a record of a file is. number: which record it is, from 1 on. at: its first byte."""
    if kind == "text":
        return f"{file}, byte {at:,}"
    unit = "row" if kind in inputs.DELIMITERS else "line"  # below the header
    return f"{file}, {unit} {number:,}"


def check_length(record, place):
    """Raise UserError if a record is too long, and perhaps only the beginning of a line."""
    if len(record) > inputs.MAX_RECORD_BYTES:
        raise UserError(f"{place} is longer than {inputs.MAX_RECORD_BYTES:,} bytes: split it into documents")


def tokenize(folder, rows, workers, *encoding):
    """Return the token ids of each split and their masks, {(split, "ids" or "mask"): bytes}. They are in files without
    names in `folder`, which disappear with the process. encoding: what encode() takes besides a row."""
    files = {(split, kind): tempfile.TemporaryFile(dir=folder) for split in SPLITS for kind in ("ids", "mask")}

    def write(future):
        for key, content in future.result().items():
            with name_in_error(folder):
                files[key].write(content)

    pace, pending = 0.1 if sys.stderr.isatty() else 60, collections.deque()  # pace: seconds between progress reports
    with ThreadPoolExecutor(workers) as pool:  # the tokenizers don't hold Python's lock
        for row in tqdm(rows, "tokenizing", unit=" MB", delay=pace, mininterval=pace, maxinterval=60):
            pending.append(pool.submit(encode, row, *encoding))
            if len(pending) > 2 * workers:  # not all rows are in memory
                write(pending.popleft())
        for future in pending:
            write(future)
    with name_in_error(folder):  # memmap writes what is still in the files' buffers
        return {key: np.memmap(file, np.uint8, "r") for key, file in files.items() if file.tell()}


def encode(row, to_ids, end, dtype, is_chat=False):
    """Return {(split, "ids" or "mask"): bytes} of a row. `end` follows each document, or each answer of a chat."""
    encoded = {(split, kind): bytearray() for split in SPLITS for kind in ("ids", "mask")}
    for split, text in row:
        if is_chat:
            ids, mask = encode_conversation(json.loads(text), to_ids, end) if text else ([], b"")
        else:
            ids, mask = to_ids(text.decode()) if text else [end], b""
        encoded[split, "ids"] += np.array(ids, dtype).tobytes()
        encoded[split, "mask"] += bytes(mask)
    return encoded
