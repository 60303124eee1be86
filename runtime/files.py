"""Files and the disk: hashes, atomic writes, free space. And UserError, which every room raises."""

import errno
import hashlib
import os
import re
import secrets
import shutil
from pathlib import Path

TEMP_SUFFIX = ".tmp"
TEMP_NAME = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")  # of the files that write_temp makes: .NAME.RANDOM.tmp


class UserError(Exception):
    """What the user has to fix. The message is one clear sentence with the fix; a script prints it and exits with 2."""


def file_digest(path, flush=False):
    """Return {"bytes", "sha256"} of a file; with `flush`, its content is on the disk when this returns."""
    if flush:
        fsync(path)
    with open(path, "rb") as file:
        return {"bytes": os.path.getsize(path), "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def write_temp(path, chunks):
    """Write the bytes objects `chunks` to a temporary file in the folder of `path`, and flush it to the disk.

    Returns (temporary, bytes written, sha256); os.replace(temporary, path) gives it its name. On any exception, Ctrl-C
    included, the temporary is removed.
    """
    path = Path(path)
    temp = path.with_name(f".{path.name}.{secrets.token_hex(4)}{TEMP_SUFFIX}")
    size, digest = 0, hashlib.sha256()
    try:
        with open(temp, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
                digest.update(chunk)
                size += len(chunk)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        temp.unlink(missing_ok=True)
        raise
    return temp, size, digest.hexdigest()


def write_atomic(path, content):
    """Replace a small file with the text or bytes `content`: a reader sees the old content or all of the new one."""
    temp, _, _ = write_temp(path, [content.encode() if isinstance(content, str) else content])
    os.replace(temp, path)
    fsync(os.path.dirname(os.path.abspath(path)))


def fsync(path):
    """Flush a file's content, or the names in a folder, to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:  # some network file systems cannot flush a folder
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def replace_dir(new, path):
    """Give the finished folder `new` the name `path`; a folder that has this name is removed afterwards."""
    old = f"{path}.old"
    shutil.rmtree(old, ignore_errors=True)
    if os.path.exists(path):
        os.rename(path, old)
    os.rename(new, path)
    fsync(os.path.dirname(os.path.abspath(path)))
    shutil.rmtree(old, ignore_errors=True)


def format_bytes(size):
    """Bytes as people read them, in decimal units."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"


def nearest_existing_dir(path):
    """Return `path`, or the nearest folder above it that exists."""
    path = os.path.abspath(path)
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path


def free_bytes(path):
    """Free bytes of the disk that holds `path`, which need not exist."""
    return shutil.disk_usage(nearest_existing_dir(path)).free
