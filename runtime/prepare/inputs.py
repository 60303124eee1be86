"""Documents out of files: text, JSON lines and Parquet, plain or compressed by gzip or zstd, in folders or from a pipe.

The datasets library's own readers don't fit: that of JSON turns "2024-05-01" into a timestamp and a missing field into
None, and that of .zst takes a truncated file for a complete one.
"""

import hashlib
import io
import json
import os
import re
import sys
from pathlib import Path
from typing import NamedTuple

from runtime.data.dataset import DatasetError

BATCH_BYTES = 2**20  # of records in a row, or a little more
MAX_LINE_BYTES = 2**26  # a longer line is not JSON lines, and would fill the memory
EOT = re.compile(rb"<\|endoftext\|>(\r?\n)?")  # between the documents of a text file; with it, the line's end
EOT_BYTES = len(b"<|endoftext|>\r\n")
TRAILING_EOT = re.compile(r"<\|endoftext\|>(\r?\n)?\Z")
CUT_POINTS = (re.compile(rb"(?<!\r)\r?\n(?=\S)"), re.compile(rb" (?=\S)"))  # in a long text, best first
KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}  # all else is text
COMPRESSION = {".gz": "gzip", ".zst": "zstd"}
UNIT = {"text": "byte", "jsonl": "line", "parquet": "row"}  # what counts the records in messages


class Source(NamedTuple):
    name: str
    kind: str  # text, jsonl or parquet
    bytes: int  # its size on disk; 0 for a pipe, whose size nobody knows
    changed: int  # when, in ns since 1970


def find_sources(paths, kind=None):
    """The files among `paths` and in the folders among them, sorted, as Sources; "-" is standard input.

    kind: what all of them hold; None: by the file's name. Raises DatasetError with one line per problem.
    """
    files, problems = [], []
    for path in paths:
        if path == "-" or os.path.isfile(path):
            files.append(path)
        elif os.path.isdir(path):
            found = sorted(str(file) for file in Path(path).rglob("*") if file.is_file()
                           and not any(part.startswith(".") for part in file.relative_to(path).parts))
            problems += [] if found else [f"{path} has no files in it"]
            files += found
        else:
            problems.append(f"{path}: there is no such file or folder")
    if "-" in files and (files.count("-") > 1 or kind == "parquet"):
        problems.append("standard input is read once, as text or as JSON lines: save Parquet as a file")
    if problems:
        raise DatasetError("\n".join(problems))
    sources = []
    for file in files:
        size, changed = (0, 0) if file == "-" else (os.stat(file).st_size, os.stat(file).st_mtime_ns)
        extension = Path(re.sub(r"\.(gz|zst)$", "", file.lower())).suffix
        sources.append(Source(file, kind or KINDS.get(extension, "text"), size, changed))
    return sources


def read_records(sources, field, max_document_bytes):
    """Rows for the datasets library: a batch of records each, and at the end of each file its SHA-256 and its bytes.

    A record is a line of JSON lines, a row of Parquet, or a piece of a text, which ends at <|endoftext|> or is cut.
    "first" is the place of a batch's first record, as UNIT counts: from 0 for bytes, from 1 for lines and rows. The
    batches depend on the file alone. Raises DatasetError where a file is damaged.
    """
    for source in sources:
        digest, size, first, start = hashlib.sha256(), 0, 0 if source.kind == "text" else 1, 0
        row = {"file": source.name, "kind": source.kind, "first": first, "records": [], "sha256": "", "bytes": 0}
        for record in open_records(source, field, max_document_bytes):
            row["records"].append(record)
            digest.update(record)
            size += len(record)
            first += len(record) if source.kind == "text" else 1
            if size - start >= BATCH_BYTES:
                yield row
                row, start = {**row, "first": first, "records": []}, size
        yield {**row, "sha256": digest.hexdigest(), "bytes": source.bytes or size}


def open_records(source, field, max_document_bytes):
    import pyarrow

    try:
        if source.kind == "parquet":
            yield from parquet_rows(source.name, field)
            return
        compression = COMPRESSION.get(Path(source.name.lower()).suffix)
        # pyarrow reads several frames in a row, and refuses a truncated one
        with (sys.stdin.buffer if source.name == "-" else
              io.BufferedReader(pyarrow.input_stream(source.name, compression), BATCH_BYTES)) as file:
            yield from (json_lines(file, source.name) if source.kind == "jsonl" else
                        text_chunks(file, max_document_bytes))
    except (pyarrow.ArrowException, OSError) as error:
        if getattr(error, "errno", None):  # the system's, not the file's
            raise
        raise DatasetError(f"{source.name} is damaged, or not what its name says ({error})") from None


def parquet_rows(name, field):
    from pyarrow import types
    from pyarrow.parquet import ParquetFile

    file = ParquetFile(name, buffer_size=BATCH_BYTES, pre_buffer=False)  # else whole row groups fill the memory
    is_text = (types.is_string, types.is_large_string, types.is_string_view)
    columns = [column.name for column in file.schema_arrow if any(check(column.type) for check in is_text)]
    if field not in columns:
        raise DatasetError(f"{name} has no column {field!r} of text, but {', '.join(columns) or 'none at all'}: name "
                           "the right one with --field=NAME")
    for table in file.iter_batches(batch_size=64, columns=[field], use_threads=False):
        yield from ((text or "").encode() for text in table.column(0).to_pylist())


def json_lines(file, name):
    for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), 1):
        if len(line) > MAX_LINE_BYTES:
            raise DatasetError(f"{name}, line {number}: is longer than {MAX_LINE_BYTES:,} bytes, so this is not JSON "
                               "lines, with a document in each line; --format=text takes it for text")
        yield line


def text_chunks(file, max_document_bytes):
    """The pieces of a text file, which together are the file; in constant memory."""
    buffer, at, ended = b"", 0, False
    while True:
        while not ended and len(buffer) - at < 2 * max_document_bytes + EOT_BYTES:
            more = file.read(BATCH_BYTES + 2 * max_document_bytes)
            buffer, at, ended = buffer[at:] + more, 0, not more
        if at == len(buffer):
            return
        end = chunk_end(buffer, at, max_document_bytes)
        yield buffer[at:end]
        at = end


def chunk_end(buffer, at, max_document_bytes):
    """Where the piece that begins at `at` ends: after <|endoftext|>, or cut at once to twice `max_document_bytes`.

    The cut is before the white space that a word begins with, where GPT-2's BPE splits any text: the tokens of the
    pieces are those of the whole text.
    """
    furthest = at + 2 * max_document_bytes
    eot = EOT.search(buffer, at, furthest + EOT_BYTES)
    if eot and eot.start() < furthest:
        return eot.end()
    if furthest >= len(buffer):
        return len(buffer)
    for pattern in CUT_POINTS:
        if found := pattern.search(buffer, at + max_document_bytes, furthest):
            return found.start()
    while buffer[furthest] & 0xC0 == 0x80:  # inside of a character of UTF-8
        furthest -= 1
    return furthest


def text_of(record, kind, field):
    """(text of a record, "" where it has none; whether its document ends with it). A ValueError says why it cannot be
    read, to be read after its place."""
    try:
        if kind == "jsonl":
            return text_of_json(json.loads(record), field) if record.strip() else "", True
        text = str(record, "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 (byte {error.object[error.start]:#x}, {error.start:,} further on)") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"is not JSON ({getattr(error, 'msg', 'nested too deeply')})") from None
    if kind == "parquet":
        return text, True
    text, ends = TRAILING_EOT.subn("", text.removeprefix("\ufeff"))  # the mark that some editors put at the start
    return text.replace("\r\n", "\n").replace("\r", "\n") if not text.isspace() else "", bool(ends)


def text_of_json(value, field):
    if not isinstance(value, dict):
        raise ValueError(f"is JSON, but not {{{field!r}: ...}}")
    if field not in value:
        raise ValueError(f"has no {field!r}, but {', '.join(map(repr, value))}: name the right one with --field=NAME")
    if not isinstance(value[field], str | None):
        raise ValueError(f"has no text in {field!r}, but {json.dumps(value[field])[:30]}")
    return value[field] or ""
