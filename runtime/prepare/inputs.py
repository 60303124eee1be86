"""Read documents from text, JSON lines, CSV, TSV and Parquet.

They are plain or compressed, in files, folders or a pipe.

The readers of the datasets library don't fit. Its JSON reader turns "2024-05-01" into a timestamp
and a missing field into None, and its zstd reader accepts a truncated file.
"""

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from runtime.data.tokenizer import check_spaces
from runtime.errors import UserError
from runtime.prepare.delimited import DELIMITERS, line_texts, table_texts
from runtime.prepare.json_records import SeveralArrays, json_records, json_value
from runtime.prepare.tables import column_texts, json_rows, without_descriptions
from runtime.untrusted import check_regular

BUFFER_BYTES = 2**20
MAX_RECORD_BYTES = 50_000_000  # tokenizing a record takes up to 60 times its size in memory
MAX_UNPACKED_BYTES = 100_000_000  # of a small file
MAX_SCANNED_BYTES = 4_000_000
MAX_RATIO = 100  # of the bytes of a file to those on the disk, if it unpacks to more
# Separates the documents of a text file, with or without a newline
EOT = re.compile(rb"<\|endoftext\|>(\r?\n)?")
EOT_BYTES = len(b"<|endoftext|>\r\n")
TRAILING_EOT = re.compile(r"<\|endoftext\|>(\r?\n)?\Z")
# A byte that isn't white space, and not the first one of Unicode's. Two more bytes must be there to
# tell
UNICODE_SPACES = (
    rb"\xc2[\x85\xa0]|\xe1\x9a\x80|\xe2\x80[\x80-\x8a\xa8\xa9\xaf]|\xe2\x81\x9f|\xe3\x80\x80"
)
WORD = rb"(?=\S..)(?!" + UNICODE_SPACES + rb")"
# Where a long text is cut: at a line end if possible, else at a space
CUT_POINTS = [re.compile(space + WORD, re.DOTALL) for space in (rb"(?<!\r)\r?\n", b" ")]
COMPRESSED = re.compile(r"\.(gz|zst|bz2|lz4)$")
BEGINS_OBJECT = re.compile(rb'(\xef\xbb\xbf)?[\s\[]*\{\s*"[^"\n]*"\s*:')
# What files of these names hold. Everything else is text
KINDS = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet",
    ".arrow": "arrow", ".csv": "csv", ".tsv": "tsv", ".bin": "shard", ".npy": "shard"}


def find_files(paths: list[str]) -> list[str]:
    """Return the files in `paths` and in the folders among them, sorted; "-" is standard input.

    Raises UserError.
    """
    # A pipe can be read once
    files = []
    for path in paths:
        is_new_pipe = path == "-" and sys.stdin is not None and path not in files
        if os.path.isdir(path):
            files += without_descriptions(sorted(files_below(os.path.normpath(path))))
        elif os.path.isfile(path) or is_new_pipe:
            files.append(path)
        else:
            raise UserError(f"{path} is not a file or folder: check the path, or use one - for "
                            "standard input")
    if not files:
        raise UserError(f"{' '.join(paths)} has no files in it: choose another folder")
    return files


def files_below(root: str) -> Iterator[str]:
    """Yield the files in a folder and its subfolders, without hidden ones.

    A folder to which several links lead is read once. Raises UserError for a link that leads out of
    the folder, and for a pipe or a device.
    """
    # By real paths, so that links in a circle end
    real_root = os.path.realpath(root)
    seen = set()
    waiting = [(root, real_root)]  # folders and their real paths
    while waiting:
        folder, real_folder = waiting.pop()
        if real_folder in seen:
            continue
        seen.add(real_folder)
        subfolders = []
        for name in sorted(os.listdir(folder)):
            # Hidden files are of programs, such as .lock and .git
            if name.startswith("."):
                continue
            path = os.path.join(folder, name)
            real = os.path.join(real_folder, name)
            if os.path.islink(path):
                real = target_inside(path, real_root)
            if os.path.isdir(path):
                subfolders.append((path, real))
            elif os.path.exists(path):  # a link may lead nowhere
                check_regular(path)
                yield path

        # The last one is taken next, so folders come in the order of their names
        waiting += reversed(subfolders)


def target_inside(path: str, real_root: str) -> str:
    """Return the real path of a link. Raises UserError if it leads out of a folder.

    Whoever made the link may not be allowed to read its target.
    """
    # Through all links on the way
    target = os.path.realpath(path)
    if not Path(target).is_relative_to(real_root):
        raise UserError(
            f"{path} is a link that leads out of its folder, to {target}: name {target} itself on "
            "the command line, and remove the link"
        )
    return target


def kind_of(name: str) -> str:
    """Return what a file of this name holds: text, jsonl, parquet, arrow, csv, tsv or shard."""
    # The extension below that of the compression: .jsonl of .jsonl.gz
    extension = Path(COMPRESSED.sub("", name)).suffix
    return KINDS.get(extension.lower(), "text")


def read_records(name: str, kind: str, field: str, max_document_bytes: int) -> Iterator[bytes]:
    """Yield the records of a file as bytes: lines, the texts of a column, or the pieces of a text.

    kind: what it holds, as kind_of() says, or "lines". field: the column. A text is cut after each
    <|endoftext|>, and where it gets longer than max_document_bytes. Raises UserError if the file is
    corrupt.
    """
    # Each kind has a reader of its own, and all raise the same errors
    with sentences(name):
        if kind in ("parquet", "arrow"):
            yield from column_texts(name, field)
            return
        with open_unpacked(name) as file:
            if kind == "jsonl":
                yield from json_lines(file)
            elif kind in DELIMITERS:
                yield from table_texts(name, file, kind, field, MAX_RECORD_BYTES)
            elif kind == "lines":
                yield from line_texts(file, EOT, MAX_RECORD_BYTES)
            else:
                yield from text_chunks(file, max_document_bytes)


def json_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file. Of a longer one than a record may be, a byte more is returned."""
    while True:
        # One byte more shows that the record is too long
        line = file.readline(MAX_RECORD_BYTES + 1)
        if not line:
            return
        yield line


def read_conversations(name: str) -> Iterator[tuple[str, bytes]]:
    """Yield (place, conversation in JSON) of a file, such as ("line 3", b"{...}").

    Whatever the conversation is like. Raises UserError if the file is corrupt.
    """
    with sentences(name):
        # A table's rows, or the records of JSON
        if kind_of(name) in ("parquet", "arrow"):
            for number, row in enumerate(json_rows(name), 1):
                yield f"row {number:,}", row
            return
        with open_unpacked(name) as file:
            try:
                yield from json_records(file, MAX_RECORD_BYTES)
            except SeveralArrays:
                raise UserError(
                    f"{name} has several JSON arrays, such as one per line: write one conversation "
                    "per line, as jq -c '.[]' FILE > FILE.jsonl does") from None


def check_pipe_is_text() -> None:
    """Raise UserError if standard input begins as JSON does. It has no file name."""
    # peek() leaves the bytes in the buffer
    stdin: Any = sys.stdin.buffer
    if BEGINS_OBJECT.match(stdin.peek()):
        raise UserError("standard input begins with JSON, and would be read as text: add "
                        "--format=jsonl or --format=chat, or --format=text if it is text")


def open_unpacked(name: str) -> BinaryIO:
    """Return a file, or standard input, as a buffered reader of its unpacked content."""
    # A small compressed file may unpack to a huge one, so it is unpacked once before
    if name == "-":
        return sys.stdin.buffer
    if COMPRESSED.search(name) and os.path.getsize(name) <= MAX_SCANNED_BYTES:
        scan(name)
    return io.BufferedReader(UnpackedFile(name), BUFFER_BYTES)


@contextlib.contextmanager
def sentences(name: str) -> Iterator[None]:
    """Turn what readers raise for a damaged file into a UserError."""
    try:
        yield
    except (UserError, ModuleNotFoundError):  # a package that is missing is no damage
        raise
    except Exception as error:  # of pyarrow, which raises many kinds
        if isinstance(error, OSError) and error.errno:  # the file system's error
            raise
        reason = " ".join(str(error).split())
        raise UserError(
            f"{name} is corrupt, or not what its name says ({reason}): replace it") from None


def scan(name: str) -> None:
    """Unpack a small file once, to see early whether it is a bomb.

    As blank lines, 100 MB take minutes to read.
    """
    with UnpackedFile(name) as file:
        while file.read(BUFFER_BYTES):
            pass


class UnpackedFile(io.RawIOBase):
    """The content of a file, unpacked if its name ends in .gz, .zst, .bz2 or .lz4.

    Raises UserError if it unpacks to so much that it was made to fill a disk: real text has a ratio
    of 3 to 20.
    """

    def __init__(self, name: str) -> None:
        import pyarrow

        self.name = name
        self.packed_bytes = os.path.getsize(name)
        self.unpacked_bytes = 0
        # It chooses the compression by the name, reads all frames, and rejects a truncated one
        self.stream = pyarrow.input_stream(name)

    def readable(self) -> bool:
        """Return whether it can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer, and return the number of bytes."""
        # Counted while it is read, because no header has to say the truth
        n_bytes = self.stream.readinto(buffer)
        self.unpacked_bytes += n_bytes
        most = max(MAX_UNPACKED_BYTES, MAX_RATIO * self.packed_bytes)
        if self.unpacked_bytes > most:
            raise UserError(
                f"{self.name} has {self.packed_bytes:,} bytes and unpacks to more than {most:,}: "
                "if you trust it, unpack it yourself, and give the unpacked file"
            )
        return n_bytes

    def close(self) -> None:
        """Close the file."""
        self.stream.close()
        super().close()


def text_chunks(file: BinaryIO, max_document_bytes: int) -> Iterator[bytes]:
    """Yield the pieces of a text file, which together are the file, in constant memory."""
    # A piece ends at twice the length at the latest
    longest = 2 * max_document_bytes
    buffer = b""
    at = 0  # where the next piece begins
    ended = False
    while True:
        # The longest piece and a separator after it must be there
        while not ended and len(buffer) - at < longest + EOT_BYTES:
            more = file.read(BUFFER_BYTES + longest)
            buffer = buffer[at:] + more
            at = 0
            ended = not more
        if at == len(buffer):
            return
        end = chunk_end(buffer, at, max_document_bytes)
        yield buffer[at:end]
        at = end


def chunk_end(buffer: bytes, at: int, max_document_bytes: int) -> int:
    """Return where the piece of a text that begins at `at` ends.

    It ends after <|endoftext|>, or after one to two `max_document_bytes`. A cut comes before the
    last white space in front of a word, if there is any. GPT-2's BPE splits every text there, so
    the tokens of the pieces are the tokens of the whole text.
    """
    # A separator ends the piece, and so does the end of the text
    furthest = at + 2 * max_document_bytes
    eot = EOT.search(buffer, at, furthest + EOT_BYTES)
    if eot and eot.start() < furthest:
        return eot.end()
    if furthest >= len(buffer):
        return len(buffer)
    # Otherwise it is cut at white space, or else anywhere between two characters
    for pattern in CUT_POINTS:
        cut = pattern.search(buffer, at + max_document_bytes, furthest)
        if cut:
            return cut.start()
    while is_inside(buffer, furthest):
        furthest -= 1
    return furthest


def is_inside(buffer: bytes, at: int) -> bool:
    """Return whether a place is inside of a character of UTF-8, or of a Windows line end."""
    # In UTF-8, all bytes of a character but the first begin with the bits 10
    continues = buffer[at] & 0xC0 == 0x80
    return continues or buffer[at - 1 : at + 1] == b"\r\n"


def text_of(record: bytes, kind: str, field: str) -> tuple[bytes, bool]:
    """Return (the text of a record in UTF-8, whether its document ends with it).

    White space alone is b"". Raises ValueError or UserError.
    """
    # Of all but plain text, a record is a document
    ends = True
    if kind in ("parquet", "arrow") or kind in DELIMITERS:
        text = str(record, "utf-8")
    elif kind == "jsonl":
        text = ""
        if record.strip():
            text = text_of_json(record, field)
    else:
        if b"\0" in record:
            raise ValueError("a NUL byte, as in an archive or in UTF-16: unpack it, or save it as "
                             "UTF-8")
        # Some editors begin a file with a byte order mark
        text = str(record, "utf-8").removeprefix("\ufeff")
        text, n_ends = TRAILING_EOT.subn("", text)
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        if kind == "lines":
            text = text.removesuffix("\n")
        else:
            ends = bool(n_ends)

    # White space alone counts as an empty document
    if not text or text.isspace():
        return b"", ends
    return check_spaces(text).encode(), ends


def text_of_json(line: bytes, field: str) -> str:
    """Return the text in a field of a line of JSON. Raises ValueError."""
    # An array has a message of its own, which names the command that helps
    if line.lstrip().startswith(b"["):
        raise ValueError("a JSON array: write one object per line, as jq -c '.[]' FILE > "
                         "FILE.jsonl does")
    value = json_value(line, "one object per line")
    if not isinstance(value, dict):
        raise ValueError("no JSON object: write one per line")
    # null is a text that isn't there
    texts = {name: text for name, text in value.items() if isinstance(text, str | None)}
    if field not in texts:
        names = ", ".join(texts) or "none"
        raise ValueError(f"no text field {field!r} (text fields: {names}): choose one with "
                         "--field=NAME, or read conversations with --format=chat")
    return texts[field] or ""
