"""Read JSON, one value per line or an array of values, in constant memory."""

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO, NoReturn

from runtime.output import printable

BLOCK_BYTES = 2**20
DECODER = json.JSONDecoder()
SPACES = re.compile(r"[ \t\r\n]*")
BEGINS_ARRAY = re.compile(rb"[ \t]*\[")
NAMES_OF_ROLE = {"role", "from"}  # a message has one of these fields, a conversation has none

MOST_SHOWN = 60  # characters of a name


class WrongJSON(ValueError):
    """A text that isn't JSON, or whose meaning isn't clear. Its message says why."""


class SeveralArrays(ValueError):
    """A file that holds more than one JSON array, such as one per line."""


def json_value(record: bytes, shape: str) -> Any:
    """Return the value of a JSON text.

    shape: what a file may hold, for the user. Raises WrongJSON.
    """
    try:
        return UNIQUE_DECODER.decode(str(record.removeprefix(codecs.BOM_UTF8), "utf-8"))
    except UnicodeDecodeError:
        raise WrongJSON("invalid UTF-8: save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        if b"\0" in record:
            raise WrongJSON("a NUL byte, as in UTF-16: save the file as UTF-8") from None
        raise WrongJSON(f"invalid JSON ({error.msg}): write {shape}") from None
    except RecursionError:
        raise WrongJSON("it is nested too deeply: correct it") from None
    except WrongJSON:
        raise
    except ValueError:
        raise WrongJSON("a number of more than 4,300 digits: write it as text") from None


def unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the fields of an object. Raises WrongJSON if one of them is there twice.

    Python's json would keep the last one without a word.
    """
    values = dict(pairs)
    if len(values) == len(pairs):
        return values
    names = [name for name, _ in pairs]
    repeated = next(name for name in names if names.count(name) > 1)
    # Half a character can't be printed
    whole = repeated[:MOST_SHOWN].encode(errors="backslashreplace").decode()
    raise WrongJSON(f"the field '{printable(whole)}' twice in an object: keep one of the two")


UNIQUE_DECODER = json.JSONDecoder(object_pairs_hook=unique_fields)


def json_records(file: BinaryIO, max_bytes: int) -> Iterator[tuple[str, bytes]]:
    """Yield (place, record) of each line, or of each element of an array.

    A place is "line 3" or "element 3". A line that is a list of messages is one record. max_bytes:
    the most that an element may have. Of a longer line, a little more than that is returned. Raises
    ValueError if an array is damaged, and SeveralArrays.
    """
    number = 0
    is_first = True
    while True:
        line = file.readline(BLOCK_BYTES)
        if not line:
            return
        number += 1
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        # The first line that isn't empty says what the file is
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


def after_spaces(text: str, at: int) -> int:
    """Return the index of the first character from `at` that isn't white space."""
    spaces = SPACES.match(text, at)
    assert spaces is not None  # it matches an empty text, too
    return spaces.end()


def is_array_of_conversations(line: bytes) -> bool:
    """Return whether the file that begins with this line, or a part of it, is one array.

    Otherwise each line is a record. It may be a list of messages, whose first one is complete.
    """
    begin = BEGINS_ARRAY.match(line)
    if not begin:
        return False
    # Its first element is a message, or a conversation
    text = line[begin.end() :].decode(errors="replace")
    try:
        first, _ = DECODER.raw_decode(text, after_spaces(text, 0))
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
        following = self.skip_to_next()
        if following == "[":
            raise SeveralArrays("another JSON array follows")
        if following:
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
            self.at = after_spaces(self.text, self.at)
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
        """Return the text of the next bytes. Raises ValueError."""
        try:
            return self.decoder.decode(content, final=not content)
        except UnicodeDecodeError:
            self.fail("invalid UTF-8")

    def fail(self, problem: str) -> NoReturn:
        """Raise ValueError with the element that is read."""
        raise ValueError(f"element {self.number:,} of the JSON array: {problem}")
