"""Read JSON, one value per line or an array of values, in constant memory."""

import codecs
import json
import re
from collections.abc import Iterator
from typing import BinaryIO

BLOCK_BYTES = 2**20
DECODER = json.JSONDecoder()
SPACES = re.compile(r"[ \t\r\n]*")
BEGINS_ARRAY = re.compile(rb"[ \t]*\[")
NAMES_OF_ROLE = {"role", "from"}  # a message has one of these fields, a conversation has none


def json_records(file: BinaryIO, max_bytes: int) -> Iterator[tuple[str, bytes]]:
    """Yield (place, record) of each line, or of each element of an array.

    A place is "line 3" or "element 3". A line that is a list of messages is one record. max_bytes:
    the most that an element may have. Of a longer line, a little more than that is returned. Raises
    ValueError if an array is damaged.
    """
    number = 0
    is_first = True
    while line := file.readline(BLOCK_BYTES):
        number += 1
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if is_first and line.strip():
            is_first = False
            if is_array_of_conversations(line):
                for place, element in enumerate(Elements(line, file, max_bytes), 1):
                    yield f"element {place:,}", element
                return
        yield f"line {number:,}", line + rest_of_line(line, file, max_bytes)


def rest_of_line(line: bytes, file: BinaryIO, max_bytes: int) -> bytes:
    """Return what follows a part of a line, or enough of it that both have more than max_bytes."""
    pieces = []
    last = line
    left = max_bytes - len(line)
    while last and not last.endswith(b"\n") and left >= 0:
        last = file.readline(BLOCK_BYTES)
        pieces.append(last)
        left -= len(last)
    return b"".join(pieces)


def is_array_of_conversations(line: bytes) -> bool:
    """Return whether the file that begins with this line, or a part of it, is one array.

    Otherwise each line is a record. It may be a list of messages, whose first one is complete.
    """
    begin = BEGINS_ARRAY.match(line)
    if not begin:
        return False
    text = line[begin.end() :].decode(errors="replace")
    try:
        first, _ = DECODER.raw_decode(text, SPACES.match(text).end())
    except (ValueError, RecursionError):
        return True
    return not (isinstance(first, dict) and NAMES_OF_ROLE & first.keys())


class Elements:
    """The elements of a JSON array as they stand in the file, as UTF-8."""

    def __init__(self, begin: bytes, file: BinaryIO, max_bytes: int):
        self.file = file
        self.max_bytes = max_bytes
        self.decoder = codecs.getincrementaldecoder("utf-8")()
        self.number = 1  # of the element that is read
        self.text = self.decode(begin)
        self.at = self.text.index("[") + 1

    def __iter__(self) -> Iterator[bytes]:
        if self.skip_to_next() == "]":
            self.at += 1
        else:
            while True:
                yield self.element()
                after = self.skip_to_next()
                if after not in (",", "]"):
                    self.fail("',' is missing after it")
                self.at += 1
                self.number += 1
                if after == "]":
                    break
                self.skip_to_next()
        if self.skip_to_next():
            self.fail("more follows after the array")

    def element(self) -> bytes:
        """Return the element that begins here, and go behind it."""
        more_bytes = BLOCK_BYTES
        while True:
            try:
                _, end = DECODER.raw_decode(self.text, self.at)
                if end < len(self.text) or not self.read(more_bytes):
                    break
                continue  # what seemed to be a number may be its first digits
            except RecursionError:
                self.fail("it is nested too deeply")
            except ValueError as error:  # perhaps because its end isn't read yet
                problem = getattr(error, "msg", str(error))
            if len(self.text) - self.at > self.max_bytes or not self.read(more_bytes):
                self.fail(problem)
            more_bytes *= 2  # so that a long element isn't parsed often
        element = self.text[self.at : end].encode()
        self.at = end
        return element

    def skip_to_next(self) -> str:
        """Skip white space, and return the next character, or "" at the end of the file."""
        while True:
            self.at = SPACES.match(self.text, self.at).end()
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.read(BLOCK_BYTES):
                return ""

    def read(self, n_bytes: int) -> bool:
        """Read on, forget what was read before, and return whether there was more."""
        content = self.file.read(n_bytes)
        self.text = self.text[self.at :] + self.decode(content)
        self.at = 0
        return bool(content)

    def decode(self, content: bytes) -> str:
        try:
            return self.decoder.decode(content, final=not content)
        except UnicodeDecodeError:
            self.fail("invalid UTF-8")

    def fail(self, problem: str) -> None:
        raise ValueError(f"element {self.number:,} of the JSON array: {problem}")
