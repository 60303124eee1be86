"""Hash files, write them atomically, and measure disk space."""

import contextlib
import datetime
import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, TextIO

from runtime.errors import UserError
from runtime.untrusted import is_private_dir, open_no_follow, open_regular

ROOT = Path(__file__).resolve().parents[1]  # the project's folder
# The folders below data/ whose prepare.py is the project's own. Another folder's may be anybody's:
# it is never run, and no message tells the user to run it
OWN_DATASETS = ("shakespeare", "shakespeare_char")
TEMP_NAME = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")  # .NAME.RANDOM.tmp, which write_temp() writes


def file_digest(path: str | os.PathLike, flush: bool = False) -> dict:
    """Return {"bytes", "sha256"} of a file. Raises UnsafeFileError and OSError.

    flush: first flush its content to the disk.
    """
    if flush:
        fsync(path)

    # Two numbers of one open file, which somebody may replace meanwhile
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        return {"bytes": size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def write_temp(path: str | os.PathLike, chunks: Iterable[bytes]) -> tuple[Path, int, str]:
    """Write bytes to a temporary file next to `path`, and flush it to the disk.

    Return (temporary file, number of bytes, sha256), for os.replace(temporary file, path). Any
    exception, also Ctrl-C, removes the file. An OSError names `path`.
    """
    # In the same folder, so that it can be renamed. Nobody can guess its name and put a link there
    path = Path(path)
    temp = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    digest = hashlib.sha256()
    try:
        # Closing the file writes, too
        with name_in_error(path), create_new(temp) as file:
            for chunk in chunks:
                file.write(chunk)
                digest.update(chunk)
        fsync(temp)
    except BaseException:
        temp.unlink(missing_ok=True)
        raise
    return temp, os.path.getsize(temp), digest.hexdigest()


@contextlib.contextmanager
def name_in_error(path: str | os.PathLike) -> Iterator[None]:
    """Return a context in which an OSError without a file's name gets this one.

    That of a write has none.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def create_new(path: str | os.PathLike) -> BinaryIO:
    """Open a new file for writing. Raises FileExistsError if there is one, or a link."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "wb")


def write_atomic(path: str | os.PathLike, content: str | bytes) -> None:
    """Replace a small file with a text or bytes.

    A reader sees all of the old content or all of the new.
    """
    if isinstance(content, str):
        content = content.encode()
    temp, _, _ = write_temp(path, [content])

    # The rename is atomic, and the folder keeps it after a power failure
    os.replace(temp, path)
    fsync(os.path.dirname(os.path.abspath(path)))


def fsync(path: str | os.PathLike) -> None:
    """Flush a file's content or a folder's entries to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:  # some network file systems can't flush a folder
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def remove_dir(path: str | os.PathLike, ignore_errors: bool = False) -> None:
    """Remove a folder, or what has its name instead: a link, a file or a pipe. Raises OSError."""
    if os.path.lexists(path) and (os.path.islink(path) or not os.path.isdir(path)):
        os.remove(path)  # shutil.rmtree would wait for a pipe
        return
    # A folder, and all that is in it
    try:
        shutil.rmtree(path, ignore_errors)
    except RecursionError:  # somebody else has made 1,000 folders in each other
        if not ignore_errors:
            raise OSError(errno.ELOOP, "its folders are nested too deep", str(path)) from None


def remove_links(folder: str | os.PathLike) -> None:
    """Remove the symbolic links in a folder, before somebody else's code writes files there."""
    for entry in os.scandir(os.fspath(folder)):
        if entry.is_symlink():
            os.remove(entry.path)


def replace_dir(new: str | os.PathLike, path: str | os.PathLike) -> None:
    """Rename the finished folder `new` to `path`.

    Then remove the folder that had this name before.
    """
    # Under another name first: whenever a kill comes, one of the two is complete
    old = f"{path}.old"
    if os.path.exists(path):  # else a kill may have left only the old one
        remove_dir(old, ignore_errors=True)
        os.rename(path, old)
    os.rename(new, path)
    fsync(os.path.dirname(os.path.abspath(path)))
    remove_dir(old, ignore_errors=True)


def lock_folder(folder: str | os.PathLike, option: str) -> TextIO:
    """Create a folder and lock it against other processes.

    Return the lock's file, which has to stay open. Raises UserError, which names the command line's
    `option` for the folder.
    """
    refuse_broken_link(folder, option)

    # The file is not truncated, and no link: the folder may be one in which others write
    try:
        os.makedirs(folder, exist_ok=True)
        descriptor = open_no_follow(os.path.join(folder, ".lock"), os.O_WRONLY | os.O_CREAT)
        lock = os.fdopen(descriptor, "w")  # closed with the process
    except OSError as error:
        raise UserError(
            f"cannot write {error.filename} ({error.strerror}): choose another {option}=DIR"
        ) from None

    # Not flock(): workers inherit it, and outlive a kill
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(
            f"another run is writing to {folder}: wait for it, or choose another {option}=DIR"
        ) from None
    except OSError:
        # The file system has no locks, and training matters more than this protection
        pass
    return lock


@contextlib.contextmanager
def new_files_in(folder: str | os.PathLike, option: str) -> Iterator[None]:
    """Create a folder and lock it while files are written there: see lock_folder().

    After an exception, also Ctrl-C, the lock's file and the folders that were made here are
    removed, as far as they are empty. An OSError about a file in the folder becomes a UserError.
    """
    # What this makes, and so may remove again
    folder = Path(folder)
    lock_file = folder / ".lock"
    is_new_lock = not os.path.lexists(lock_file)
    new_folders = [place for place in (folder, *folder.parents) if not os.path.lexists(place)]
    with lock_folder(folder, option):
        try:
            yield
        except BaseException as error:
            # Leave what was there before, and what somebody else has put there meanwhile
            with contextlib.suppress(OSError):
                if is_new_lock:
                    lock_file.unlink()
                for place in new_folders:
                    place.rmdir()

            # Name the folder, and what helps
            if isinstance(error, OSError) and is_in(folder, error.filename):
                fix = f"choose another {option}=DIR"
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    fix = f"make room there, or {fix}"
                raise UserError(
                    f"cannot write {error.filename} ({error.strerror}): {fix}"
                ) from None
            raise


def is_in(folder: Path, path: object) -> bool:
    """Return whether `path`, the filename of an OSError, is a folder or below it."""
    return isinstance(path, str) and Path(path).absolute().is_relative_to(folder.absolute())


def refuse_broken_link(path: str | os.PathLike, option: str) -> None:
    """Raise UserError if a path, or a folder above it, is a link to what doesn't exist.

    Most often its target is on a disk that isn't mounted. option: the command line's, for `path`.
    """
    # A link above the path breaks it just as well
    path = Path(path).absolute()
    for place in (path, *path.parents):
        if os.path.islink(place) and not os.path.exists(place):
            raise UserError(
                f"{place} is a link to {os.readlink(place)}, which does not exist: create that "
                f"folder or mount its disk, or choose another {option}=DIR"
            )


def is_lock_of(lock: TextIO, folder: str | os.PathLike) -> bool:
    """Return whether a folder still holds the file that lock_folder() has returned."""
    try:
        # Of the link itself: another one's target may be anything
        held = os.stat(os.path.join(folder, ".lock"), follow_symlinks=False)
    except OSError:
        return False
    return os.path.samestat(held, os.fstat(lock.fileno()))


def private_temp_dir() -> Path:
    """Create, if it is missing, a temporary folder that only this user can open, and return it.

    Raises UserError if another user has taken its name.
    """
    # One folder for each user, so that no other user's is in the way
    folder = Path(tempfile.gettempdir(), f"gpt2-deepspeed-{os.geteuid()}")
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    # It may have been there: made by this user's other runs, or by somebody else
    if not is_private_dir(folder) or folder.stat().st_mode & 0o077:
        raise UserError(
            f"{folder} is not a folder that only you can open: remove it, or set TMPDIR to a "
            "folder of your own"
        )
    return folder


def use_private_compile_cache() -> None:
    """Have torch.compile keep its code in a folder in which only this user can write.

    Its default, /tmp/torchinductor_USER, may have been made by another user, whose code would then
    run. Call this before anything is compiled. Raises UserError.
    """
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:  # else it is this user's own choice
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(private_temp_dir() / "torchinductor")


def format_bytes(size: float) -> str:
    """Return a size in GB or MB, which are 10^9 and 10^6 bytes."""
    if size >= 1e9:
        return f"{size / 1e9:.2f} GB"
    return f"{size / 1e6:.2f} MB"


def format_time(seconds: float) -> str:
    """Return a time such as 1:32, 5:01:32 or 2 days, 5:01:32."""
    whole = min(round(seconds), 10**13)  # timedelta's limit is not far above
    text = str(datetime.timedelta(seconds=whole))  # 0:01:32
    return text.removeprefix("0:").removeprefix("0")


def nearest_existing_dir(path: str | os.PathLike) -> Path:
    """Return `path`, or its nearest parent folder that exists."""
    path = Path(path).absolute()
    while not os.path.exists(path):  # Path.exists() may raise
        path = path.parent
    return path


def free_bytes(path: str | os.PathLike) -> int:
    """Return the free bytes of the disk of `path`, which need not exist."""
    return shutil.disk_usage(nearest_existing_dir(path)).free
