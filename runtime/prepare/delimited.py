"""Read the texts of one column of a CSV or TSV file, with Python's csv module, or a document per
line.

A quote that isn't closed would swallow the rows after it. So each row must have as many fields as
the header, and quotes must be as RFC 4180 says: around a whole field, and twice inside of one.
"""

import csv
import io
import re
from collections.abc import Iterator
from typing import BinaryIO, TextIO

from runtime.errors import UserError
from runtime.output import counted

DELIMITERS = {"csv": ",", "tsv": "\t"}
MAX_SHOWN = 200  # characters of the names of columns


def table_texts(
    name: str, file: BinaryIO, kind: str, field: str, max_bytes: int
) -> Iterator[bytes]:
    """Yield the texts of a column as bytes, which are perhaps not UTF-8.

    name: for messages. kind: "csv" or "tsv". field: the column's name in the first row. max_bytes:
    of a field. Line ends inside of a field become newlines. Raises UserError.
    """
    csv.field_size_limit(max_bytes)
    # Bytes that aren't UTF-8 go through this as they are
    text = io.TextIOWrapper(file, encoding="utf-8", errors="surrogateescape", newline="")
    rows = csv.reader(bounded_lines(name, text, max_bytes), delimiter=DELIMITERS[kind], strict=True)
    begin = 1  # the line at which a row begins
    try:
        header = next(rows, [])
        if header:
            header[0] = header[0].removeprefix("\ufeff")  # some editors' byte order mark
        place = column_of(name, header, field)
        begin = rows.line_num + 1
        for row in rows:
            if row and len(row) != len(header):
                raise csv.Error(f"the row has {counted(len(row), 'field')}, and the header "
                                f"{len(header):,}")
            if row:  # not an empty line
                content = row[place].replace("\r\n", "\n").replace("\r", "\n")
                yield content.encode("utf-8", "surrogateescape")
            begin = rows.line_num + 1
    except csv.Error as error:
        reason = str(error).replace("\t", r"\t")
        delimiter = "a comma"
        if kind == "tsv":
            delimiter = "a tab"
        raise UserError(
            f'{name}, line {begin:,}: {reason}: put quotes, "...", around a field with '
            f'{delimiter}, a line end or a quote in it, and write the quote twice, ""'
        ) from None


def bounded_lines(name: str, text: TextIO, longest: int) -> Iterator[str]:
    """Yield the lines of a text stream.

    Raises UserError for one of more than `longest` characters.
    """
    while True:
        line = text.readline(longest + 1)
        if not line:
            return
        if len(line) > longest:
            raise UserError(f"{name} has a line of more than {longest:,} characters: split it into "
                            "rows")
        yield line


def column_of(name: str, header: list[str], field: str) -> int:
    """Return the place of a column in a row. Raises UserError."""
    if header.count(field) == 1:
        return header.index(field)
    columns = ", ".join(header[:MAX_SHOWN])
    if len(columns) > MAX_SHOWN:
        columns = f"{columns[:MAX_SHOWN]}..."
    if "\0" in columns:
        raise UserError(f"{name} has NUL bytes, as in UTF-16: save it as UTF-8")
    if field in header:
        raise UserError(f"{name} has several columns {field!r}: rename all but one")
    raise UserError(
        f"{name} has no column {field!r} in its first row ({columns or 'empty'}): choose one with "
        "--field=NAME, add a row with the names, or read each line as a document with "
        "--format=lines"
    )


def line_texts(file: BinaryIO, end: re.Pattern[bytes], max_bytes: int) -> Iterator[bytes]:
    """Yield the lines of a text file as bytes, cut after each match of `end` in them.

    A line ends as in Python's text files: with a newline, a carriage return, or both. end:
    separates documents. Of a line of more than max_bytes, a little more than that is returned,
    which the caller refuses.
    """
    # Latin-1 has a character for each byte, so it changes none. newline="" keeps all line ends
    text = io.TextIOWrapper(file, encoding="latin-1", newline="")
    while True:
        line = text.readline(max_bytes + 1).encode("latin-1")
        if not line:
            return
        at = 0
        for match in end.finditer(line):
            yield line[at : match.end()]
            at = match.end()
        if at < len(line):
            yield line[at:]
