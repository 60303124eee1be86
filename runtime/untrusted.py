"""Open the files of others: of an out_dir, a dataset, a tokenizer or weights that somebody else
may have written.

Every reader of such files goes through this module. It refuses what hangs (a pipe, a device), what
fills the memory (a file of an implausible size), and what leads elsewhere (a link). docs/trust.md
says what is trusted, and what isn't.

Errors of the system, such as a missing file, stay OSErrors. What is refused is an UnsafeFileError.
"""

import errno
import functools
import json
import os
import stat
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.errors import UserError

if TYPE_CHECKING:
    from pydantic import ConfigDict

MAX_JSON_BYTES = 64_000_000
MAX_JSON_DEPTH = 50
MAX_DIGITS = 40  # of a whole number: float() fails above 308
# for classes that describe a file: True is no number, and "1" neither
STRICT: "ConfigDict" = {"strict": True}


class UnsafeFileError(UserError):
    """A file that is not read: no regular file, too large, a link, or not what is expected."""


def open_regular(
    path: str | os.PathLike, max_bytes: int | None = None, follow_links: bool = True
) -> BufferedReader:
    """Open a regular file for reading.

    max_bytes: the largest size that is plausible, or None. follow_links: whether the file may be a
    symbolic link, as in the cache of the Hugging Face Hub. Files that this project writes are never
    links. Raises UnsafeFileError and OSError.
    """
    # A pipe must not make us wait, and a link must not lead elsewhere
    flags = os.O_RDONLY | os.O_CLOEXEC
    flags |= os.O_NONBLOCK  # without it, opening a pipe waits until somebody writes to it
    if not follow_links:
        if os.path.islink(path):
            raise UnsafeFileError(
                f"{path} is a link, which is not followed here: replace it with a copy of its "
                "target"
            )
        flags |= os.O_NOFOLLOW

    # What was opened is what is checked: its name may belong to another file by now
    descriptor = os.open(path, flags)
    try:
        check_status(path, os.fstat(descriptor), max_bytes)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def check_regular(
    path: str | os.PathLike, max_bytes: int | None = None, follow_links: bool = True
) -> int:
    """Return the size of a file in bytes. Raises as open_regular() does.

    Call it before a reader that takes a path: torch.load with a memory map, safetensors, NumPy.
    """
    with open_regular(path, max_bytes, follow_links) as file:
        return os.fstat(file.fileno()).st_size


def check_status(
    path: str | os.PathLike, status: os.stat_result, max_bytes: int | None = None
) -> None:
    """Raise an error unless this is the status of a regular file of at most max_bytes.

    IsADirectoryError for a folder, otherwise UnsafeFileError.
    """
    # As open() does
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    # What hangs, and what fills the memory
    if not stat.S_ISREG(status.st_mode):
        raise UnsafeFileError(f"{path} is a pipe or a device, not a file: replace it with a file")
    if max_bytes is not None and status.st_size > max_bytes:
        raise UnsafeFileError(
            f"{path} has {status.st_size:,} bytes, and at most {max_bytes:,} are plausible: "
            "replace it with the right file"
        )


def read_regular(
    path: str | os.PathLike, max_bytes: int = MAX_JSON_BYTES, follow_links: bool = True
) -> bytes:
    """Return the content of a file. Raises as open_regular() does."""
    with open_regular(path, max_bytes, follow_links) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:  # it has grown since its size was read
        raise UnsafeFileError(
            f"{path} has more than {max_bytes:,} bytes: replace it with the right file"
        )
    return content


def read_json(
    path: str | os.PathLike,
    kind: Any = dict,
    max_bytes: int = MAX_JSON_BYTES,
    follow_links: bool = True,
) -> Any:
    """Return the value of a JSON file.

    kind: what the value must be: a type, or a TypedDict with the types and ranges of its keys. Keys
    that a TypedDict doesn't name are kept. Raises UnsafeFileError, which names the key that is
    wrong, and OSError.
    """
    # Each key is checked here, so that no reader has to
    content = read_regular(path, max_bytes, follow_links)
    try:
        value = parse_json(content)
        check_type(value, kind)
    except ValueError as error:
        raise UnsafeFileError(
            f"{path} can't be used ({error}): replace it with the right file"
        ) from None
    return value


def parse_json(text: str | bytes, fields_of: Callable[[list], dict] | None = None) -> Any:
    """Return the value of a JSON text.

    fields_of: makes a dict of the fields of an object, [(name, value)]. Raises ValueError if the
    text isn't JSON, is nested more than MAX_JSON_DEPTH deep, or holds a whole number of more than
    MAX_DIGITS digits.
    """
    # json recurses, and ends with an error of Python's at some depth
    too_deep = f"it is nested more than {MAX_JSON_DEPTH} deep"
    try:
        value = json.loads(text, parse_int=parse_whole_number, object_pairs_hook=fields_of)
    except RecursionError:
        raise ValueError(too_deep) from None

    # Count the levels: what json accepts may still be too deep for those who use the value
    level = [value]
    for _ in range(MAX_JSON_DEPTH + 1):
        containers = [item for item in level if isinstance(item, dict | list)]
        if not containers:
            return value
        level = []
        for item in containers:
            if isinstance(item, dict):
                level.extend(item.values())
            else:
                level.extend(item)
    raise ValueError(too_deep)


def parse_whole_number(digits: str) -> int:
    # A larger number would overflow later, where it is made a float
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"it holds a number of {len(digits)} digits")
    return int(digits)


def check_type(value: Any, kind: Any) -> None:
    """Raise ValueError, which names the first wrong key, unless a value is of this kind.

    kind: as for read_json().
    """
    from pydantic import ValidationError  # not before: --help must work without any package

    try:
        type_adapter(kind).validate_python(value)
    except ValidationError as error:
        # Name the first wrong key, and show the beginning of its value
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "its content"
        shown = repr(first["input"])
        if len(shown) > 40:
            shown = shown[:37] + "..."
        raise ValueError(f"{where} is {shown}: {first['msg']}") from None


@functools.cache
def type_adapter(kind: Any) -> Any:
    """Return pydantic's TypeAdapter of a kind, strict unless the kind has its own configuration."""
    from pydantic import TypeAdapter

    if hasattr(kind, "__pydantic_config__"):
        return TypeAdapter(kind)
    return TypeAdapter(kind, config=STRICT)


def open_no_follow(path: str | os.PathLike, flags: int) -> int:
    """Open a file for writing, in a folder where others may have put a link. Return its descriptor.

    flags: those of os.open(), without O_TRUNC. Raises UnsafeFileError for a link and for anything
    else that isn't a regular file, and OSError.
    """
    # O_NOFOLLOW refuses a link as well, but its error doesn't name one
    if os.path.islink(path):
        raise UnsafeFileError(f"{path} is a link, and writing would change its target: remove it")

    # A pipe must not make us wait until somebody reads from it
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    try:
        check_status(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def is_private_dir(path: str | os.PathLike) -> bool:
    """Return whether only this user and root can change what is in a folder.

    The folder is no link, belongs to this user, and others can't write to it. Nor can they replace
    it: that depends on the owner and the mode of its parent.
    """
    # The folder itself
    try:
        own = os.lstat(path)
        parent = os.stat(Path(path).absolute().parent)
    except OSError:
        return False
    user = os.geteuid()
    if not stat.S_ISDIR(own.st_mode) or own.st_uid != user or own.st_mode & 0o022:
        return False

    # Its parent: others may rename what is in it if they can write there, unless its sticky bit is
    # set, as /tmp has it
    others_can_rename = parent.st_mode & 0o022 and not parent.st_mode & stat.S_ISVTX
    return parent.st_uid in (0, user) and not others_can_rename
