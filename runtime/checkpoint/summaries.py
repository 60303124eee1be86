"""Remember what the order of tags, and the choice of the best one, need of their manifests."""

import os
from typing import NamedTuple

from runtime.checkpoint.manifest import read_manifest


class Summary(NamedTuple):
    """What is remembered of a manifest that has been read and checked."""

    iter_num: int
    improved: bool  # the tag was the best one when it was saved
    best_val_loss: float | None  # None before the first evaluation


# {path of a manifest: (version_of() it, Summary)}, of all stores of this process
SUMMARIES: dict[str, tuple[tuple[int, ...] | None, Summary]] = {}


def summary_of(path: str) -> Summary:
    """Return the Summary of the manifest in a file. Raises CheckpointError.

    It is read again only if the file has changed. With thousands of tags, reading all of them at
    each save would take longer than training.
    """
    path = os.path.abspath(path)
    version = version_of(path)
    if version is not None and path in SUMMARIES:
        known_version, summary = SUMMARIES[path]
        if known_version == version:
            return summary

    manifest = read_manifest(path)
    state = manifest["state"]
    summary = Summary(manifest["iter_num"], state["improved"], state["best_val_loss"])
    SUMMARIES[path] = version, summary
    return summary


def version_of(path: str) -> tuple[int, ...] | None:
    """Return what changes when a file is replaced or written to.

    Returns None if it can't be looked at.
    """
    try:
        status = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
