"""Turn documents into a dataset: read, tokenize in several threads, store the tokens, write it.

Documents keep their order, so the bytes don't depend on the number of workers. Exact duplicates are
dropped. A file is for training or for validation, or the hash of each document's text decides.
"""

import collections
import hashlib
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

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
KEYS = tuple(itertools.product(SPLITS, ("ids", "mask")))  # what is stored while rows are encoded

Row = list[tuple[str, bytes]]  # [(split, its next text)]; an empty text ends a document


def prepare(
    folder: Path,
    files: list[tuple[str, str | None]],
    tokenizer: dict[str, Any],
    vocab_size: int,
    options: dict[str, Any],
    workers: int,
    skip_unreadable: bool = False,
) -> dict[str, Any]:
    """Write a dataset of `files` to `folder` and return its meta.json. Raises UserError.

    files: [(path, "train", "val", or None if the hash of each document decides)]. tokenizer,
    vocab_size: from tokenizer_meta(). options: what else the bytes depend on.
    """
    # How a document becomes ids
    is_chat = options["format"] == "chat"
    dtype = "<u2" if vocab_size <= 2**16 else "<u4"
    end = end_of_documents(tokenizer, is_chat)
    to_ids = numpy_encoder(tokenizer)
    if is_chat:
        coverage.check_headers(tokenizer)

    # Read and tokenize everything into temporary files
    reader = Reader(files, options, skip_unreadable)
    with new_files_in(folder, "--name"):
        stored = tokenize(folder, reader.rows(), workers, to_ids, end, dtype, is_chat)
        if tokenizer["kind"] == "hf":
            coverage.report(coverage.measure(tokenizer, reader.sample.texts()))
        # Only now all characters are known
        tokens: list[Any] = [stored[split, "ids"].view(dtype) for split in SPLITS]
        if tokenizer["kind"] == "char":
            tokenizer, tokens = number_characters(tokens, end, is_chat)
            vocab_size = len(tokenizer["chars"])

        # What meta.json says besides
        source = {
            "name": " ".join(options["paths"]),
            "sha256": reader.digest.hexdigest(),
            "bytes": reader.bytes,
        }
        masks: dict[str, Any] = {}
        details: dict[str, Any] = {"documents": reader.counts, "options": options}
        if reader.chats is not None:
            masks = {f"{split}_mask.bin": [stored[split, "mask"]] for split in SPLITS}
            details["template"] = TEMPLATE
            details["unused_fields"] = dict(reader.chats.unused)
            details["problems"] = reader.chats.report()
        train_ids, val_ids = tokens
        return write_dataset(
            folder, train_ids, val_ids, tokenizer, vocab_size, source, masks, **details)


def end_of_documents(tokenizer: dict[str, Any], is_chat: bool) -> int | None:
    """Return the id that follows each document, or each answer of a conversation.

    For characters, it is a code point.
    """
    if tokenizer["kind"] != "char":
        return end_of_text(tokenizer)
    if is_chat:
        return ord(END_OF_ANSWER)
    return ord("\n")


def number_characters(
    tokens: list[np.ndarray], end: int | None, is_chat: bool
) -> tuple[dict[str, Any], list[Iterable[np.ndarray]]]:
    """Return the "tokenizer" of the characters that are there, and the tokens as its ids.

    tokens: the code points of each split. end: the code point that ends an answer.
    """
    # Ids are in the order of the code points
    used = np.zeros(CODE_POINTS, bool)
    for points in itertools.chain(*map(slices, tokens)):
        used[points] = True
    ids = np.cumsum(used, dtype=np.uint32) - 1  # of each code point, if it is used
    chars = "".join(map(chr, np.flatnonzero(used)))
    tokenizer: dict[str, Any] = {"kind": "char", "chars": chars}
    if is_chat:
        tokenizer["end_of_text"] = int(ids[end])
    # Slice by slice, as they are written
    numbered: list[Iterable[np.ndarray]] = []
    for points in tokens:
        numbered.append(map(ids.__getitem__, slices(points)))
    return tokenizer, numbered


class Reader:
    """Reads all files once, drops duplicates and chooses each document's split.

    Afterwards, `counts` holds the numbers of documents, `bytes` the unpacked input's size, `digest`
    its hash, and `sample` some documents.
    """

    def __init__(
        self, files: list[tuple[str, str | None]], options: dict[str, Any], skip_unreadable: bool
    ) -> None:
        is_chat = options["format"] == "chat"
        self.files = files
        self.options = options
        self.skip_unreadable = skip_unreadable

        # How the documents were used, for meta.json
        self.counts = dict.fromkeys((*SPLITS, "duplicates", "empty", "unreadable"), 0)
        self.hashes: set[int] = set()  # of all documents
        self.digest = hashlib.sha256()
        self.bytes = 0
        self.sample = coverage.Sample(is_chat)
        self.chats: Conversations | None = None
        if is_chat:
            self.chats = Conversations(options["ignore_fields"])

    def is_refused(self) -> bool:
        """Return whether conversations can't be used, so that there will be no dataset."""
        return self.chats is not None and bool(self.chats.problems) and not self.skip_unreadable

    def rows(self) -> Iterator[Row]:
        """Yield rows of about 1 MB. Raises UserError."""
        read = self.texts
        if self.chats is not None:
            read = self.conversations
        # A row is what a thread tokenizes at once
        row = []
        size = 0
        for split, text in itertools.chain.from_iterable(itertools.starmap(read, self.files)):
            row.append((split, text))
            size += len(text)
            if size >= ROW_BYTES:
                yield row
                row = []
                size = 0

        # All files were read to count what can't be used
        if self.chats is not None and self.is_refused():
            report = "\n".join(self.chats.report())
            raise UserError(f"{report}; or skip such conversations with --skip_unreadable")
        # The last document of each split ends, too
        row += [(split, b"") for split in SPLITS]
        yield row
        is_cut = "text" in {self.kind(file) for file, _ in self.files}
        check_both_splits(self.counts, self.bytes, self.options["val_fraction"], is_cut)

    def kind(self, file: str) -> str:
        """Return what a file holds: --format, or what its name says."""
        return self.options["format"] or inputs.kind_of(file)

    def texts(self, file: str, split: str | None) -> Iterator[tuple[str, bytes]]:
        """Yield (split, text) of each record that is kept, and (split, b"") between documents.

        A long text is cut into records. Two in a row that are kept in the same split are one
        document. split: the file's, or None.
        """
        kind = self.kind(file)
        begin = self.bytes
        unfinished = None  # where a document's last record went, if it isn't complete
        records = inputs.read_records(
            file, kind, self.options["field"], self.options["max_document_bytes"])
        for number, record in enumerate(records, 1):
            at = self.bytes - begin
            counted, text, ends = self.classify(record, file, kind, number, at, split)
            self.counts[counted] += 1
            # The document before ends here, unless this record is its next piece
            if counted in SPLITS:
                if counted != unfinished and self.counts[counted] > 1:
                    yield counted, b""
                yield counted, text
            unfinished = None if ends else counted
            self.digest.update(record)
            self.bytes += len(record)

    def conversations(self, file: str, split: str | None) -> Iterator[tuple[str, bytes]]:
        """Yield (split, its messages as JSON) of each conversation that is kept.

        After one that can't be used, the others are only read, to count such ones. split: the
        file's, or None.
        """
        assert self.chats is not None  # with format=chat
        for place, record in inputs.read_conversations(file):
            # The hash is of all that was read, used or not
            place = f"{file}, {place}"
            check_length(record, place)
            self.digest.update(record)
            self.bytes += len(record)
            if not record.strip():
                self.counts["empty"] += 1
                continue
            counted = "unreadable"
            text = self.chats.read(record, place)
            if text:
                counted = self.choose(text, split)
            self.counts[counted] += 1
            if counted in SPLITS and not self.is_refused():
                yield counted, text

    def classify(
        self, record: bytes, file: str, kind: str, number: int, at: int, split: str | None
    ) -> tuple[str, bytes, bool]:
        """Return (what `counts` counts a record as, its text, whether its document ends with it).

        number, at: as for place_of(). split: that of its file, or None. Raises UserError.
        """
        if len(record) > inputs.MAX_RECORD_BYTES:
            check_length(record, place_of(file, kind, number, at))
        try:
            text, ends = inputs.text_of(record, kind, self.options["field"])
        except (ValueError, UserError) as error:
            if self.skip_unreadable:
                return "unreadable", b"", True
            reason = str(error)
            if kind == "text" and isinstance(error, UnicodeDecodeError):
                at += error.start  # one offset, not two to add up
                reason = f"byte 0x{record[error.start]:02x} isn't UTF-8 ({error.reason})"
            place = place_of(file, kind, number, at)
            raise UserError(f"{place}: {reason}; correct it, or skip such documents with "
                            "--skip_unreadable") from None
        if not text:
            return "empty", text, ends
        return self.choose(text, split), text, ends

    def choose(self, text: bytes, split: str | None) -> str:
        """Return the split of a text, or "duplicates" if there was the same before.

        split: that of its file, or None if the hash decides.
        """
        # Eight bytes of a hash stand for the text, also to choose its split
        digest = hashlib.blake2b(text, digest_size=8).digest()
        number = int.from_bytes(digest, "little")
        if number in self.hashes:
            return "duplicates"
        self.hashes.add(number)
        self.sample.add(number, text)
        # A file's own split comes before that of the hash
        if split is not None:
            return split
        if number < int(self.options["val_fraction"] * 2**64):
            return "val"
        return "train"


def place_of(file: str, kind: str, number: int, at: int) -> str:
    """Return where a record of a file is, for the user.

    number: which record it is, from 1 on. at: its first byte.
    """
    # A text has no rows, so its place is a byte
    if kind == "text":
        return f"{file}, byte {at:,}"
    if kind in inputs.DELIMITERS or kind in ("parquet", "arrow"):
        return f"{file}, row {number:,}"  # of a table, below the header
    return f"{file}, line {number:,}"


def check_length(record: bytes, place: str) -> None:
    """Raise UserError if a record is too long, and perhaps only the beginning of a line."""
    if len(record) > inputs.MAX_RECORD_BYTES:
        raise UserError(f"{place} is longer than {inputs.MAX_RECORD_BYTES:,} bytes: split it into "
                        "documents")


def tokenize(
    folder: Path,
    rows: Iterable[Row],
    workers: int,
    to_ids: Callable[[str], np.ndarray],
    end: int | None,
    dtype: str,
    is_chat: bool = False,
) -> dict[tuple[str, str], np.memmap]:
    """Return the token ids of each split and their masks, {(split, "ids" or "mask"): bytes}.

    They are in files without names in `folder`, which disappear with the process. to_ids, end,
    dtype, is_chat: see encode().
    """
    # On the disk of the dataset, which must have room for it anyway
    files = {key: tempfile.TemporaryFile(dir=folder) for key in KEYS}

    def write(future: Future) -> None:
        for key, content in future.result().items():
            with name_in_error(folder):
                files[key].write(content)

    # Seconds between two reports of the progress
    pace = 60.0
    if sys.stderr.isatty():
        pace = 0.1
    bar = tqdm(rows, "tokenizing", unit=" MB", delay=pace, mininterval=pace, maxinterval=60)
    pending: collections.deque[Future] = collections.deque()  # rows that are encoded, in order
    # The tokenizers don't hold Python's lock, so threads are enough
    with ThreadPoolExecutor(workers) as pool:
        for row in bar:
            pending.append(pool.submit(encode, row, to_ids, end, dtype, is_chat))
            # Write the oldest row, so that not all rows are in memory
            if len(pending) > 2 * workers:
                write(pending.popleft())
        for future in pending:
            write(future)
    with name_in_error(folder):  # memmap writes what is still in the files' buffers
        return {key: np.memmap(file, np.uint8, "r") for key, file in files.items() if file.tell()}


def encode(
    row: Row,
    to_ids: Callable[[str], np.ndarray],
    end: int | None,
    dtype: str,
    is_chat: bool = False,
) -> dict[tuple[str, str], bytearray]:
    """Return the ids of a row's texts and their masks, {(split, "ids" or "mask"): bytes}.

    to_ids: returns the ids of a text. end: the id that follows each document, or each answer of a
    conversation. dtype: of the ids. is_chat: whether each text is a conversation, as JSON.
    """
    encoded = {key: bytearray() for key in KEYS}
    for split, text in row:
        mask: Sequence[int] = []
        ids: Sequence[int | None] | np.ndarray = []
        if is_chat and text:
            assert end is not None  # or the tokenizer was refused
            ids, mask = encode_conversation(json.loads(text), to_ids, end)
        elif text:
            ids = to_ids(text.decode())
        elif not is_chat:  # a document ends
            ids = [end]

        # Bytes, as they are written to the files
        encoded[split, "ids"] += np.array(ids, dtype).tobytes()
        encoded[split, "mask"] += bytes(mask)
    return encoded
