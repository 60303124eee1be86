"""Compare the files of a tag with its manifest, and look for what could run code."""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from runtime.checkpoint.errors import UnreadableError, first_line
from runtime.checkpoint.tags import exists
from runtime.cores import usable_cores
from runtime.files import file_digest
from runtime.torch_files import SAFE_GLOBALS, check_stored
from runtime.untrusted import UnsafeFileError, check_regular, open_regular


def verify_files(
    folder: str | os.PathLike, files: Mapping[str, dict], rank: int = 0, world_size: int = 1
) -> list[str]:
    """Return what is wrong with the files of a tag, as sentences. The ranks share the hashing.

    files: {name: {"bytes", "sha256"}}. Raises OSError if a file cannot be read.
    """
    # Each rank looks at all files, and hashes its share of them
    paths = [os.path.join(folder, name) for name in files]
    is_hashed = [number % world_size == rank for number in range(len(files))]
    with ThreadPoolExecutor(usable_cores()) as pool:  # hashing releases the GIL
        problems = list(pool.map(verify_file, paths, files.values(), is_hashed))
    return [problem for problem in problems if problem]


def verify_file(file: str, entry: dict, is_hashed: bool) -> str | None:
    """Return what is wrong with one file of a tag, or None.

    Raises UnreadableError and OSError if it can't be read: it may be intact.
    """
    if not exists(file):
        return f"{file} is missing"
    try:
        size = check_regular(file, follow_links=False)
        if size != entry["bytes"]:
            return f"{file} has {size} bytes, not {entry['bytes']}"
        if is_hashed and file_digest(file)["sha256"] != entry["sha256"]:
            return f"{file} has changed since it was saved (its sha256 differs)"

        # What it names, which could run code
        with open_regular(file, follow_links=False) as content:
            check_stored(content)
        unsafe = set(torch.serialization.get_unsafe_globals_in_checkpoint(file)) - SAFE_GLOBALS
    except UnsafeFileError as error:
        raise UnreadableError(f"{error}, or choose another checkpoint") from None
    except OSError:
        raise
    except Exception as error:  # not torch's zip format, or a truncated pickle
        return f"{file} cannot be checked ({first_line(error)}): not read"
    if unsafe:
        return f"{file} contains {', '.join(sorted(unsafe))}, which could run code: not read"
    return None
