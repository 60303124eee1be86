"""Documents out of files: text, JSON lines and Parquet, packed with gzip or zstd or not, in folders or from a pipe.

A file is read once, in order and in constant memory, as records: a line of JSON lines, a row of Parquet, or a piece of
a text, which ends at <|endoftext|> or, in long documents, at some line's end. The records come in batches of about a
megabyte whose borders depend on the file alone, so that work can go on after any of them.
"""

import contextlib
import gzip
import io
import json
import os
import re
import sys
import zlib
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from runtime.data.dataset import DatasetError

BATCH = 2**20  # bytes of records handed over at once, or a little more
LONGEST = 2**26  # bytes of a line of JSON lines; what is longer is no such file, and would fill the memory
MARK = re.compile(rb"<\|endoftext\|>(\r?\n)?")  # between the documents of a text file; with it, the line's end
MARGIN = len(b"<|endoftext|>\r\n")
LAST_MARK = re.compile(r"<\|endoftext\|>(\r?\n)?\Z")
BREAKS = (re.compile(rb"(?<!\r)\r?\n(?=\S)"), re.compile(rb" (?=\S)"))  # where a long text may be cut, best first
KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}  # all else is text
PLACES = {"text": "byte", "jsonl": "line", "parquet": "row"}  # what counts the records in messages


class Source(NamedTuple):
    """A file of documents. `batches()` yields (records, number of the first, bytes of the file read so far); the number
    is the first's place in the file, as PLACES says: from 0 for bytes, from 1 for lines and rows."""

    name: str
    kind: str  # text, jsonl or parquet
    bytes: int  # its size on disk; 0 for a pipe, whose end nobody knows
    changed: int  # when, in ns since 1970
    batches: Callable
    split: str | None = None  # where all of its documents go; None: by their hash


def sources(paths, kind=None, field="text", cut=None):
    """The files among `paths` and in the folders among them, sorted, as Sources; "-" is standard input.

    kind: what all of them hold; None: by the file's name. cut: bytes of a text from which on it is cut into several
    documents; None: 4,096 where there is but one text, which could not be split otherwise, and else a mebibyte.
    Raises DatasetError with one line a problem.
    """
    files, problems = [], []
    for path in paths:
        if path == "-" or os.path.isfile(path):
            files.append(path)
        elif os.path.isdir(path):
            inside = sorted(walk(path))
            problems += [] if inside else [f"{path} has no files in it"]
            files += inside
        else:
            problems.append(f"{path}: there is no such file or folder")
    kinds = [kind or kind_of(file) for file in files]
    if "-" in files and (files.count("-") > 1 or kinds[files.index("-")] == "parquet"):
        problems.append("standard input is read once, as text or as JSON lines: save Parquet as a file")
    if problems:
        raise DatasetError("\n".join(problems))
    cut = cut or (4096 if kinds == ["text"] else 2**20)
    found = []
    for file, k in zip(files, kinds):
        status = os.stat(file) if file != "-" else None
        size, changed = (status.st_size, status.st_mtime_ns) if status else (0, 0)
        found.append(Source(file, k, size, changed, partial(read, file, k, field, cut)))
    return found


def walk(folder):
    """The files in a folder and in those below it, but for hidden ones."""
    for path, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (os.path.join(path, name) for name in names if not name.startswith("."))


def kind_of(name):
    stem, suffix = os.path.splitext(name.lower())
    return KINDS.get(os.path.splitext(stem)[1] if suffix in (".gz", ".zst") else suffix, "text")


def read(name, kind, field, cut):
    """The batches of one file, as Source says; a damaged one is a DatasetError."""
    packing = os.path.splitext(name.lower())[1]
    damage = (gzip.BadGzipFile, EOFError, zlib.error)
    if packing == ".zst":
        from zstandard import ZstdError
        damage += (ZstdError,)
    if kind == "parquet":
        from pyarrow import ArrowException
        damage += (ArrowException, OSError)
    try:
        if kind == "parquet":
            yield from rows(name, field)
            return
        with open(name, "rb") if name != "-" else contextlib.nullcontext(sys.stdin.buffer) as raw:
            file = {".gz": gzip.open, ".zst": unzstd}.get(packing, lambda plain: plain)(raw)
            first, packed = 0 if kind == "text" else 1, 0
            for batch in batched(pieces(file, cut) if kind == "text" else lines(file, name)):
                size = sum(map(len, batch))
                packed = raw.tell() if name != "-" else packed + size
                yield batch, first, packed
                first += size if kind == "text" else len(batch)
    except damage as error:
        raise DatasetError(f"{name} is damaged, or not what its name says ({error})") from None


def batched(records):
    batch, size = [], 0
    for record in records:
        batch.append(record)
        size += len(record)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def lines(file, name):
    number = 0
    while line := file.readline(LONGEST + 1):
        number += 1
        if len(line) > LONGEST:
            raise DatasetError(f"{name}, line {number}: is longer than {LONGEST:,} bytes, so this is not JSON lines, "
                               "with a document in each line; --format=text takes it for text")
        yield line


def pieces(file, cut):
    """The pieces of a text file, which together are the file."""
    buffer, at, ended = b"", 0, False
    while True:
        while not ended and len(buffer) - at < 2 * cut + MARGIN:
            more = file.read(BATCH + 2 * cut)
            buffer, at, ended = buffer[at:] + more, 0, not more
        if at == len(buffer):
            return
        end = end_of_piece(buffer, at, cut)
        yield buffer[at:end]
        at = end


def end_of_piece(buffer, at, cut):
    """Where the piece that begins at `at` ends: after a mark, or cut at `cut` to 2 * `cut` bytes.

    It is cut before the white space that a word begins with, where GPT-2's BPE splits any text: the tokens of the
    pieces are those of the whole.
    """
    furthest = at + 2 * cut
    mark = MARK.search(buffer, at, furthest + MARGIN)
    if mark and mark.start() < furthest:
        return mark.end()
    if furthest >= len(buffer):
        return len(buffer)
    for pattern in BREAKS:
        if found := pattern.search(buffer, at + cut, furthest):
            return found.start()
    while buffer[furthest] & 0xC0 == 0x80:  # inside of a character of UTF-8
        furthest -= 1
    return furthest


def rows(name, field):
    """read() for Parquet."""
    import pyarrow
    from pyarrow.parquet import ParquetFile

    file = ParquetFile(name, buffer_size=BATCH, pre_buffer=False)  # else whole row groups lie in memory
    if field not in file.schema_arrow.names:
        raise DatasetError(f"{name} has no column {field!r}; it has {', '.join(file.schema_arrow.names)}: name the "
                           "right one with --field=NAME")
    kind = file.schema_arrow.field(field).type
    if not any(test(kind) for test in (pyarrow.types.is_string, pyarrow.types.is_large_string,
                                       pyarrow.types.is_string_view)):
        raise DatasetError(f"{name}: the column {field!r} is of {kind}, not of text: name the right one with "
                           "--field=NAME")
    size, first = os.path.getsize(name), 1
    texts = ((text or "").encode()
             for table in file.iter_batches(batch_size=64, columns=[field], use_threads=False)
             for text in table.column(0).to_pylist())
    for batch in batched(texts):
        yield batch, first, size * (first + len(batch) - 1) // max(1, file.metadata.num_rows)
        first += len(batch)


class Stream(io.RawIOBase):
    """What an iterator of bytes objects yields, as a file to read."""

    def __init__(self, chunks):
        self.chunks, self.left = chunks, memoryview(b"")

    def readable(self):
        return True

    def readinto(self, room):
        while not self.left:
            try:
                self.left = memoryview(next(self.chunks))
            except StopIteration:
                return 0
        n = min(len(room), len(self.left))
        room[:n], self.left = self.left[:n], self.left[n:]
        return n


def unzstd(packed):
    """The file that is packed in another. zstandard's own reader takes one that is cut off for whole."""
    import zstandard

    def chunks():
        frame = None
        while data := packed.read(2**16):
            while data:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                yield frame.decompress(data)
                frame, data = (None, frame.unused_data) if frame.eof else (frame, b"")
        if frame:
            raise EOFError("it ends in the middle")

    return io.BufferedReader(Stream(chunks()), BATCH)


def text_of(record, kind, field):
    """The text of a record, "" where it has none; ValueError where it can't be read, to be read after its place."""
    try:
        if kind == "jsonl":
            return text_of_json(json.loads(record), field) if record.strip() else ""
        text = str(record, "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 (byte {error.object[error.start]:#x}, {error.start:,} further on)") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON ({error.msg})") from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if kind == "text":
        text = LAST_MARK.sub("", text).removeprefix("\ufeff")  # the mark that some editors put at the start
        text = text.replace("\r\n", "\n").replace("\r", "\n") if not text.isspace() else ""
    return text


def text_of_json(found, field):
    if not isinstance(found, dict):
        raise ValueError(f"is JSON, but no {{{field!r}: ...}}")
    if field not in found:
        raise ValueError(f"has no {field!r}, but {', '.join(map(repr, found))}: name the right one with --field=NAME")
    if not isinstance(found[field], str | None):
        raise ValueError(f"has no text in {field!r}, but {json.dumps(found[field])[:30]}")
    return found[field] or ""


def ends(record, kind):
    """Whether its document ends with it, as far as it can tell: a text's last piece can't."""
    return kind != "text" or bool(MARK.search(record, max(0, len(record) - MARGIN)))
