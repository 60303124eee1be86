"""Say why a save failed: what the system said, and what helps."""

import errno
import os

from runtime.checkpoint.errors import first_line
from runtime.files import write_temp

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)  # on the disk, or in the quota
# What helps if a save fails with these errors; write() itself makes room on a full disk
SAVE_FIXES = {
    errno.EFBIG: "raise the limit on the size of files (ulimit -f), or choose an out_dir on a file "
    "system that has none, unlike FAT",
    errno.EIO: "the disk or its connection fails: see dmesg, and choose an out_dir on another disk",
    errno.EROFS: "the disk became read-only, most often after an error: see dmesg",
    errno.ENOENT: "out_dir was moved or removed during the save",
    errno.ESTALE: "the network file system has lost the folder: mount it again",
}


def first_os_error(error: BaseException | None) -> OSError | None:
    """Return the error of the system that others have followed.

    When a write fails, torch.save raises a RuntimeError of its own about its position in the file.
    """
    first = None
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            first = error
        error = error.__cause__ or error.__context__
    return first


def cause_of(error: BaseException) -> str:
    """Return one line on why a save failed: what the system said, and what helps."""
    if not isinstance(error, OSError) or error.errno is None:
        return first_line(error)
    text = error.strerror or first_line(error)
    if error.filename:
        text = f"{error.filename}: {text}"
    fix = SAVE_FIXES.get(error.errno)
    if fix:
        text = f"{text}; {fix}"
    return text


def is_full(folder: str) -> bool:
    """Return whether the disk or the quota of a folder has no room for another MB.

    torch.save's error doesn't say.
    """
    try:
        temp, _, _ = write_temp(os.path.join(folder, "probe"), [bytes(10**6)])
        os.remove(temp)
    except OSError as error:
        return error.errno in NO_ROOM
    return False


def lacks_room(failure: str) -> bool:
    """Return whether a save failed because the system found no room for a file, as cause_of() says.

    Afterwards the disk may have room again: a file without a name is gone.
    """
    return any(failure.endswith(os.strerror(number)) for number in NO_ROOM)
