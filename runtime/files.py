"""Hash files, write them atomically, and measure disk space."""

import datetime
import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
from pathlib import Path

from runtime.errors import UserError

ROOT = Path(__file__).resolve().parents[1]  # the project's folder
TEMP_NAME = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")  # .NAME.RANDOM.tmp, the files that write_temp() writes


def file_digest(path, flush=False):
    """Return {"bytes", "sha256"} of a file; flush: first flush its content to the disk."""
    if flush:
        fsync(path)
    with open(path, "rb") as file:
        return {"bytes": os.path.getsize(path), "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def write_temp(path, chunks):
    """Write the bytes objects `chunks` to a temporary file next to `path` and flush it to the disk. Return (temporary
    file, bytes, sha256), for os.replace(temporary file, path). Any exception, also Ctrl-C, removes the file."""
    path = Path(path)
    temp, digest = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp"), hashlib.sha256()
    try:
        with open(temp, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
                digest.update(chunk)
        fsync(temp)
    except BaseException:
        temp.unlink(missing_ok=True)
        raise
    return temp, os.path.getsize(temp), digest.hexdigest()


def write_atomic(path, content):
    """Replace a small file with the text or bytes `content`. A reader sees all of the old content or all of the new."""
    temp, _, _ = write_temp(path, [content.encode() if isinstance(content, str) else content])
    os.replace(temp, path)
    fsync(os.path.dirname(os.path.abspath(path)))


def fsync(path):
    """Flush a file's content or a folder's entries to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:  # some network file systems can't flush a folder
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def remove_dir(path, ignore_errors=False):
    """Remove a folder, or a link to one."""
    if os.path.islink(path):
        os.remove(path)
    else:
        shutil.rmtree(path, ignore_errors)


def replace_dir(new, path):
    """Rename the finished folder `new` to `path`, then remove the folder that had this name before."""
    old = f"{path}.old"
    if os.path.exists(path):  # else a kill may have left only the old one
        remove_dir(old, ignore_errors=True)
        os.rename(path, old)
    os.rename(new, path)
    fsync(os.path.dirname(os.path.abspath(path)))
    remove_dir(old, ignore_errors=True)


def lock_folder(folder, option):
    """Create a folder and lock it against other processes. Return the lock's file, which has to stay open. Raises
    UserError, which names the command line's option for the folder."""
    try:
        os.makedirs(folder, exist_ok=True)
        lock = open(os.path.join(folder, ".lock"), "w")  # closed with the process
    except OSError as error:
        raise UserError(f"cannot write {error.filename} ({error.strerror}): choose another {option}=DIR") from None
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not flock(): workers inherit it, and outlive a kill
    except BlockingIOError:
        raise UserError(f"another run is writing to {folder}: wait for it, or choose another {option}=DIR") from None
    except OSError:
        pass  # the file system has no locks, and training matters more than this protection
    return lock


def format_bytes(size):
    """Return a size in GB or MB, which are 10^9 and 10^6 bytes."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"


def format_time(seconds):
    """Return a time such as 1:32, 5:01:32 or 2 days, 5:01:32."""
    return str(datetime.timedelta(seconds=min(round(seconds), 10**13))).removeprefix("0:").removeprefix("0")


def nearest_existing_dir(path):
    """Return `path`, or its nearest parent folder that exists."""
    path = Path(path).absolute()
    return next(folder for folder in (path, *path.parents) if os.path.exists(folder))  # Path.exists() may raise


def free_bytes(path):
    """Return the free bytes of the disk of `path`, which need not exist."""
    return shutil.disk_usage(nearest_existing_dir(path)).free
