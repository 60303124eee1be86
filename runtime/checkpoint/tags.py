"""Find, check and remove tags: the checkpoints of a run, each a folder in its out_dir.

    out_dir/iter_5/         DeepSpeed's own files, and manifest.json, which is written last
    out_dir/best/, final/   hard links to the files of an iter_* tag
    out_dir/latest          the newest tag's name, for DeepSpeed's tools"""

import contextlib
import importlib.metadata
import math
import os
import re
import shutil
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from runtime.checkpoint.manifest import (
    MANIFEST_FORMAT,
    ChangedManifestError,
    check_manifest,
    read_signed,
)
from runtime.cluster.ranks import RANK, all_exit_on, print0
from runtime.cores import usable_cores
from runtime.errors import UserError
from runtime.files import (
    TEMP_NAME,
    file_digest,
    fsync,
    is_lock_of,
    lock_folder,
    remove_dir,
    replace_dir,
    write_atomic,
)
from runtime.torch_files import check_stored
from runtime.untrusted import UnsafeFileError, check_regular, open_regular
from runtime.weights import SAFE_GLOBALS

TAG_NAME = re.compile(r"iter_\d+|best|final")
MAX_REPORTED = 10  # tags without a manifest
LEFTOVER = re.compile(rf"({TAG_NAME.pattern})\.(saving|old)")  # of a save that was killed
Tag = namedtuple("Tag", ("name", "manifest"))  # manifest: the content of manifest.json
SUMMARIES: dict = {}  # {path of a manifest: (version_of() it, Summary)}, of all stores of this process
OTHER_TAG = "choose another checkpoint, or train anew with another --init_from and --overwrite=True"


class Summary(NamedTuple):
    """What is remembered of a manifest that has been read and checked."""

    iter_num: int
    improved: bool  # the tag was the best one when it was saved
    best_val_loss: float | None  # None before the first evaluation


class CheckpointError(UserError):
    """A checkpoint that is missing, corrupt, unsafe or incompatible."""


class UnreadableError(CheckpointError):
    """A checkpoint that may be intact, but that the system can't read. Resuming from an older one would lose work."""

    @classmethod
    def of(cls, error, path):
        """Return the error for an OSError that reading `path` raised."""
        return cls(f"{error.filename or path} cannot be read ({error.strerror or error}): fix that, or choose another "
                   "checkpoint (--resume_tag or --tag)")


class TagStore:
    """The tags of one out_dir. read_only=False locks the folder for this process; all ranks then create the store."""

    def __init__(self, out_dir, read_only=True):
        self.out_dir, self.read_only = str(out_dir), read_only
        self.skipped = {}  # {corrupt tag that newest_intact() met before the one it chose: its problems}
        if not read_only:
            with all_exit_on(UserError):
                self._lock = lock_folder(self.out_dir, "--out_dir") if RANK == 0 else None  # an open file
                self._folder = os.stat(self.out_dir) if RANK == 0 else None

    def path(self, tag, suffix=""):
        return os.path.join(self.out_dir, tag + suffix)

    def list(self):
        """Return the complete and the unreadable tags, oldest first, then best and final. Raises UnreadableError."""
        try:
            names = os.listdir(self.out_dir)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise UnreadableError(f"{self.out_dir} cannot be listed ({error.strerror}): fix that, or choose another "
                                  "--out_dir=DIR") from None
        tags = [name for name in names if TAG_NAME.fullmatch(name) and self.is_complete(name)]
        return sorted(tags, key=lambda tag: (not tag.startswith("iter_"), len(tag), tag))

    def is_complete(self, tag):
        """Return whether a tag has a manifest, which is written last."""
        return exists(self.path(tag, "/manifest.json"))

    def iteration(self, tag):
        """Return a tag's iteration. If its manifest cannot be read, return what its name says, or -1."""
        try:
            return self.summary(tag).iter_num
        except CheckpointError:
            return int(tag[5:]) if tag.startswith("iter_") else -1

    def newest_first(self):
        """Return the complete tags, latest iteration first. iter_5 comes before best and final of iteration 5."""
        return sorted(self.list(), key=lambda tag: (-self.iteration(tag), not tag.startswith("iter_")))

    def newest(self):
        """Return the newest complete tag's name, or None."""
        return next(iter(self.newest_first()), None)

    def newer_than(self, iter_num):
        """Return the tags of later iterations than iter_num, including best and final."""
        return [tag for tag in self.list() if self.iteration(tag) > iter_num]

    def find(self, tag="latest"):
        """Return the Tag of this name. "latest": the newest; None: best, or the newest. Raises CheckpointError."""
        tag = ("best" if self.is_complete("best") else "latest") if tag is None else tag
        name = self.newest() or tag if tag == "latest" else tag
        if os.path.basename(name) != name or not self.is_complete(name):
            if exists(self.path("manifest.json")):
                raise CheckpointError(f"{self.out_dir} is a checkpoint, not a run's folder: give its name as the tag, "
                                      f"and --out_dir={os.path.dirname(os.path.normpath(self.out_dir)) or '.'}")
            names = ", ".join(self.list())
            raise CheckpointError(f"{self.out_dir} has no complete checkpoint '{tag}': choose from {names}" if names
                                  else f"{self.out_dir} has no checkpoint: choose another folder with --out_dir=DIR")
        return Tag(name, self.read_manifest(name))

    def read_manifest(self, tag: str) -> dict:
        """Return a tag's manifest, whose hash and types have been checked. Raises CheckpointError."""
        path = self.path(tag, "/manifest.json")
        try:
            manifest = read_signed(path)
            if manifest.get("format") != MANIFEST_FORMAT:
                raise CheckpointError(
                    f"{path} was written by another version of this program: {OTHER_TAG}"
                )
            check_manifest(manifest)
        except OSError as error:
            raise UnreadableError.of(error, path) from None
        except UnsafeFileError as error:
            raise UnreadableError(f"{error}, or choose another checkpoint") from None
        except ChangedManifestError as error:
            raise CheckpointError(
                f"{path} has changed since it was saved ({error}): {OTHER_TAG}"
            ) from None
        except ValueError as error:
            raise CheckpointError(f"{path} can't be used ({error}): {OTHER_TAG}") from None
        return manifest

    def summary(self, tag: str) -> Summary:
        """Return what the order of tags and the choice of the best one need. Raises CheckpointError.

        A manifest is read again only if its file has changed. With thousands of tags, reading all of
        them at each save would take longer than training.
        """
        path = os.path.abspath(self.path(tag, "/manifest.json"))
        version = version_of(path)
        if version is None or SUMMARIES.get(path, (None, None))[0] != version:
            manifest = self.read_manifest(tag)
            state = manifest["state"]
            summary = Summary(manifest["iter_num"], state["improved"], state["best_val_loss"])
            SUMMARIES[path] = version, summary
        return SUMMARIES[path][1]

    def bytes_besides(self, kept):
        """Return the bytes of all tags and leftovers besides the tags `kept`. Each link counts for its share."""
        with contextlib.suppress(OSError):  # no such folder, or another run deletes a tag
            names = {*self.list(), *filter(LEFTOVER.fullmatch, os.listdir(self.out_dir))}.difference(kept)
            files = [file.stat() for name in names for file in os.scandir(self.path(name))]
            return sum(file.st_size // file.st_nlink for file in files)
        return 0

    # What changes tags: on rank 0 alone

    def hold_folder(self):
        """Make and lock out_dir again if it was moved or removed during the run, and print a note.

        Raises UserError if another folder with checkpoints, or another run, has its place by now.
        """
        if is_lock_of(self._lock, self.out_dir):
            return
        is_other = not exists(self.out_dir) or not os.path.samestat(os.stat(self.out_dir), self._folder)
        if is_other and self.list():
            raise UserError(
                f"{self.out_dir} is another folder than at the start of this run, and holds "
                "checkpoints: move it away"
            )
        self._lock = lock_folder(self.out_dir, "--out_dir")
        self._folder = os.stat(self.out_dir)
        if is_other:
            print0(
                f"{self.out_dir} was moved or removed during the run. It is made again: the earlier "
                "checkpoints and records are where it was moved to"
            )

    def alias(self, tag, name):
        """Link the files of out_dir/tag to out_dir/name, or copy them if the file system has no hard links."""
        source, work = self.path(tag), self.path(name, ".saving")
        remove_dir(work, ignore_errors=True)
        os.makedirs(work)
        try:
            for file in os.listdir(source):
                try:
                    os.link(os.path.join(source, file), os.path.join(work, file))
                except OSError:
                    fsync(shutil.copy2(os.path.join(source, file), work, follow_symlinks=False))
            fsync(work)
            replace_dir(work, self.path(name))
        finally:  # a full disk needs the room
            remove_dir(work, ignore_errors=True)

    def prune(self, keep_last):
        """Delete all iter_* tags but the newest keep_last. best and final stay."""
        self.link_best()  # if that failed when the best tag was saved
        for tag in [tag for tag in self.newest_first() if tag.startswith("iter_")][keep_last:]:
            self.delete(tag)

    def delete_oldest(self):
        """Delete the oldest iter_* tag that is neither newest nor best, and print it. Return whether that worked."""
        with contextlib.suppress(OSError, CheckpointError):
            kept = {self.newest(), self.find_best()[0]}
            for tag in (tag for tag in reversed(self.newest_first()) if tag.startswith("iter_") and tag not in kept):
                self.delete(tag)
                print0(f"no room for the next checkpoint: deleted {self.path(tag)}")
                return True
        return False

    def delete(self, tag):
        """Delete a tag. Rename it first, so that no reader sees half of it and remove_leftovers() finds the rest."""
        remove_dir(self.move_away(tag, ".saving"))

    def move_away(self, tag, suffix=".damaged"):
        """Append a suffix to the name of a tag's folder. Returns the new path."""
        path = self.path(tag, suffix)
        remove_dir(path, ignore_errors=True)
        os.rename(self.path(tag), path)
        return path

    def remove_leftovers(self):
        """Remove what a killed save left. Restore a tag that it was replacing, and rename a tag without a manifest."""
        incomplete = 0
        for name in sorted(os.listdir(self.out_dir)):  # x.old before x.saving
            tag, _, kind = name.partition(".")
            if TEMP_NAME.fullmatch(name):
                os.remove(self.path(name))
            elif not TAG_NAME.fullmatch(tag) or not os.path.isdir(self.path(name)):
                continue  # the user's own
            elif kind == "old" and self.is_complete(name) and not exists(self.path(tag)):
                os.rename(self.path(name), self.path(tag))
            elif kind in ("old", "saving"):
                remove_dir(self.path(name))
            elif kind == "" and not self.is_complete(name):
                incomplete += 1
                if incomplete <= MAX_REPORTED:
                    print0(f"skipping {self.path(name)}: it has no manifest.json; kept as {name}.damaged")
                self.move_away(name)
        if incomplete > MAX_REPORTED:
            print0(f"skipping {incomplete:,} tags without a manifest.json in all")

    def clean(self, tag=None, overwrite=False, aliases=()):
        """Prepare out_dir for a run: remove leftovers, rename corrupt tags, delete newer tags if `overwrite`, and link
        `aliases` to the Tag, which a kill may have prevented. Rank 0 does it and returns best's validation loss."""
        if self.read_only or RANK != 0:
            return None
        self.remove_leftovers()
        for name in self.skipped:
            self.move_away(name)
        for name in self.newer_than(tag.manifest["iter_num"] if tag else -1) if overwrite else ():
            self.delete(name)
        if newest := self.newest():
            write_atomic(self.path("latest"), newest)
        for name in aliases if tag and tag.name.startswith("iter_") else ():
            try:
                self.alias(tag.name, name)
            except OSError as error:  # the tag itself is intact
                print0(f"{name} could not be linked to {tag.name} ({error.strerror}); the run continues without it")
        with contextlib.suppress(OSError):  # prune() tries again
            self.link_best()
        return self.find_best()[1]

    def find_best(self):
        """Return the best tag's name and validation loss, or (None, inf). It is the newest that was the best one."""
        for name in self.newest_first():
            with contextlib.suppress(CheckpointError):
                summary = self.summary(name)
                if summary.improved:
                    return name, summary.best_val_loss
        return None, math.inf

    def link_best(self):
        """Link best to the best tag, unless it is."""
        name, _ = self.find_best()
        if name and self.iteration(name) != self.iteration("best"):
            self.alias(name, "best")


def exists(path):
    """Return whether `path` exists. One that can't be checked, without permission or on a failing disk, counts."""
    try:
        os.stat(path)
    except OSError as error:
        return not isinstance(error, (FileNotFoundError, NotADirectoryError))
    return True


def version_of(path: str) -> tuple[int, ...] | None:
    """Return what changes when a file is replaced or written to, or None if it can't be looked at."""
    try:
        status = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def parse_run_path(path):
    """Return (out_dir, tag) for a tag's folder, or for an out_dir with its best or else newest tag; otherwise None."""
    folder, name = os.path.split(os.path.normpath(path))
    store = TagStore(os.path.normpath(path))
    if TagStore(folder).is_complete(name):
        return folder, name
    tag = "best" if store.is_complete("best") else store.newest()
    return (store.out_dir, tag) if tag else None


def topology(engine):
    """Return what the manifest records of the engine that saved it: ranks, stage, precision, optimizer, versions."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "deepspeed")}
    return {
        "world_size": engine.world_size,
        "stage": engine.stage,
        "dtype": engine.dtype,
        "optimizer": engine.optimizer,
        "versions": versions,
    }


def verify_files(folder, files, rank=0, world_size=1):
    """Return what is wrong with the `files` {name: {"bytes", "sha256"}} of a tag, as sentences. The ranks share the
    hashing. Raises OSError if a file cannot be read."""
    paths = [os.path.join(folder, name) for name in files]
    hashed = [number % world_size == rank for number in range(len(files))]
    with ThreadPoolExecutor(usable_cores()) as pool:  # hashing releases the GIL
        return list(filter(None, pool.map(verify_file, paths, files.values(), hashed)))


def verify_file(file: str, entry: dict, hashed: bool) -> str | None:
    """Return what is wrong with one file of a tag, or None.

    Raises UnreadableError and OSError if it can't be read: it may be intact.
    """
    if not exists(file):
        return f"{file} is missing"
    try:
        size = check_regular(file, follow_links=False)
        if size != entry["bytes"]:
            return f"{file} has {size} bytes, not {entry['bytes']}"
        if hashed and file_digest(file)["sha256"] != entry["sha256"]:
            return f"{file} has changed since it was saved (its sha256 differs)"
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


def first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
