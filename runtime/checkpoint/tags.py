"""Find, check and remove tags: the checkpoints of a run, each a folder in its out_dir.

    out_dir/iter_5/         DeepSpeed's own files, and manifest.json, which is written last
    out_dir/best/, final/   hard links to the files of an iter_* tag
    out_dir/latest          the newest tag's name, for DeepSpeed's tools
"""

import contextlib
import math
import os
import re
import shutil
from collections.abc import Iterable
from typing import NamedTuple, TextIO

from runtime.checkpoint.errors import CheckpointError, UnreadableError
from runtime.checkpoint.manifest import read_manifest
from runtime.checkpoint.summaries import Summary, summary_of
from runtime.cluster.ranks import RANK, all_exit_on, print0
from runtime.errors import UserError
from runtime.files import (
    TEMP_NAME,
    fsync,
    is_lock_of,
    lock_folder,
    remove_dir,
    replace_dir,
    write_atomic,
)

TAG_NAME = re.compile(r"iter_\d+|best|final")
LEFTOVER = re.compile(rf"({TAG_NAME.pattern})\.(saving|old)")  # of a save that was killed
MAX_REPORTED = 10  # tags without a manifest

Names = list[str]  # of tags


class Tag(NamedTuple):
    """A tag that has been found."""

    name: str
    manifest: dict  # the content of manifest.json


class TagStore:
    """The tags of one out_dir.

    read_only=False locks the folder for this process; all ranks then create the store.
    """

    def __init__(self, out_dir: str | os.PathLike, read_only: bool = True):
        self.out_dir = str(out_dir)
        self.read_only = read_only
        self._lock: TextIO | None = None  # an open file
        self._folder: os.stat_result | None = None  # os.stat() of the folder that is locked
        if not read_only:
            with all_exit_on(UserError):
                if RANK == 0:
                    self.lock()

    def lock(self) -> None:
        """Make out_dir if it is missing, and lock it for this process. Raises UserError."""
        self._lock = lock_folder(self.out_dir, "--out_dir")
        self._folder = os.stat(self.out_dir)

    def path(self, tag: str, suffix: str = "") -> str:
        """Return the path of a tag, or of what has its name and a suffix."""
        return os.path.join(self.out_dir, tag + suffix)

    # -----------------------------------------------------------------------------------------
    # What reads tags

    def list(self) -> Names:
        """Return the complete and the unreadable tags, oldest first, then best and final.

        Raises UnreadableError.
        """
        # A run that saves for the first time has no folder
        try:
            names = os.listdir(self.out_dir)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise UnreadableError(
                f"{self.out_dir} cannot be listed ({error.strerror}): fix that, or choose another "
                "--out_dir=DIR"
            ) from None

        # Names of other programs in the folder don't count
        tags = [name for name in names if TAG_NAME.fullmatch(name) and self.is_complete(name)]
        return sorted(tags, key=lambda tag: (not is_numbered(tag), len(tag), tag))

    def is_complete(self, tag: str) -> bool:
        """Return whether a tag has a manifest, which is written last."""
        return exists(self.path(tag, "/manifest.json"))

    def iteration(self, tag: str) -> int:
        """Return a tag's iteration.

        If its manifest cannot be read, return what its name says, or -1.
        """
        try:
            return self.summary(tag).iter_num
        except CheckpointError:
            return int(tag.removeprefix("iter_")) if is_numbered(tag) else -1

    def newest_first(self) -> Names:
        """Return the complete tags, latest iteration first.

        iter_5 comes before best and final of iteration 5.
        """
        return sorted(self.list(), key=lambda tag: (-self.iteration(tag), not is_numbered(tag)))

    def newest(self) -> str | None:
        """Return the newest complete tag's name, or None."""
        tags = self.newest_first()
        return tags[0] if tags else None

    def newer_than(self, iter_num: int) -> Names:
        """Return the tags of later iterations than iter_num, including best and final."""
        return [tag for tag in self.list() if self.iteration(tag) > iter_num]

    def find(self, tag: str | None = "latest") -> Tag:
        """Return the Tag of this name.

        tag: "latest" is the newest; None is best, or the newest. Raises CheckpointError.
        """
        # The name that "latest" or None stands for
        if tag is None:
            tag = "best" if self.is_complete("best") else "latest"
        name = tag
        if tag == "latest":
            name = self.newest() or tag

        is_name = os.path.basename(name) == name
        if is_name and self.is_complete(name):
            manifest = read_manifest(self.path(name, "/manifest.json"))
            return Tag(name, manifest)

        # What the user may have meant
        if exists(self.path("manifest.json")):
            parent = os.path.dirname(os.path.normpath(self.out_dir)) or "."
            raise CheckpointError(
                f"{self.out_dir} is a checkpoint, not a run's folder: give its name as the tag, "
                f"and --out_dir={parent}"
            )
        names = ", ".join(self.list())
        if names:
            raise CheckpointError(
                f"{self.out_dir} has no complete checkpoint '{tag}': choose from {names}"
            )
        raise CheckpointError(
            f"{self.out_dir} has no checkpoint: choose another folder with --out_dir=DIR"
        )

    def summary(self, tag: str) -> Summary:
        """Return what is remembered of a tag's manifest. Raises CheckpointError."""
        return summary_of(self.path(tag, "/manifest.json"))

    def find_best(self) -> tuple[str | None, float]:
        """Return the best tag's name and validation loss, or (None, inf).

        It is the newest that was the best one.
        """
        for name in self.newest_first():
            # Damaged manifests are left out: an older tag may still be the best
            with contextlib.suppress(CheckpointError):
                summary = self.summary(name)
                if summary.improved and summary.best_val_loss is not None:
                    return name, summary.best_val_loss
        return None, math.inf

    def bytes_besides(self, kept: Iterable[str]) -> int:
        """Return the bytes of all tags and leftovers besides the tags `kept`.

        Each link counts for its share.
        """
        total = 0
        try:
            leftovers = [name for name in os.listdir(self.out_dir) if LEFTOVER.fullmatch(name)]
            for name in {*self.list(), *leftovers} - set(kept):
                for file in os.scandir(self.path(name)):
                    status = file.stat()
                    total += status.st_size // status.st_nlink
        except OSError:  # no such folder, or another run deletes a tag
            return 0
        return total

    # -----------------------------------------------------------------------------------------
    # What changes tags: on rank 0 alone

    def hold_folder(self) -> None:
        """Make and lock out_dir again if it was moved or removed during the run, and print a note.

        Raises UserError if another folder with checkpoints, or another run, has its place by now.
        """
        assert self._lock is not None and self._folder is not None  # by lock()
        if is_lock_of(self._lock, self.out_dir):
            return
        is_other = True
        if exists(self.out_dir):
            is_other = not os.path.samestat(os.stat(self.out_dir), self._folder)
        if is_other and self.list():
            raise UserError(
                f"{self.out_dir} is another folder than at the start of this run, and holds "
                "checkpoints: move it away"
            )

        # This run's lock is not on what is there now
        try:
            self.lock()
        except UserError as error:  # another run may have made it meanwhile
            if not is_other:
                raise
            raise UserError(
                f"{self.out_dir} was moved or removed during the run, and {error}"
            ) from None
        if is_other:
            print0(
                f"{self.out_dir} was moved or removed during the run. It is made again: the "
                "earlier checkpoints and records are where it was moved to"
            )

    def alias(self, tag: str, name: str) -> None:
        """Link the files of out_dir/tag to out_dir/name.

        Copy them if the file system has no hard links. Raises OSError.
        """
        # As a save does: first under another name, so that no reader sees half of it
        source = self.path(tag)
        work = self.path(name, ".saving")
        remove_dir(work, ignore_errors=True)
        os.makedirs(work)

        # A link takes no space on the disk, and a copy does
        try:
            for file in os.listdir(source):
                try:
                    os.link(os.path.join(source, file), os.path.join(work, file))
                except OSError:
                    copy = shutil.copy2(os.path.join(source, file), work, follow_symlinks=False)
                    fsync(copy)
            fsync(work)
            replace_dir(work, self.path(name))
        finally:
            # A full disk needs the room
            remove_dir(work, ignore_errors=True)

    def link_best(self) -> None:
        """Link best to the best tag, unless it is."""
        name, _ = self.find_best()
        if name and self.iteration(name) != self.iteration("best"):
            self.alias(name, "best")

    def prune(self, keep_last: int) -> None:
        """Delete all iter_* tags but the newest keep_last. best and final stay."""
        self.link_best()  # if that failed when the best tag was saved

        # By iteration, not by name: iter_10 is newer than iter_9
        numbered = [tag for tag in self.newest_first() if is_numbered(tag)]
        for tag in numbered[keep_last:]:
            self.delete(tag)

    def delete_oldest(self) -> bool:
        """Delete the oldest iter_* tag that is neither newest nor best, and print it.

        Return whether that worked.
        """
        with contextlib.suppress(OSError, CheckpointError):
            best, _ = self.find_best()

            # Training needs the newest, and evaluation the best
            kept = {self.newest(), best}
            for tag in reversed(self.newest_first()):
                if is_numbered(tag) and tag not in kept:
                    self.delete(tag)
                    print0(f"no room for the next checkpoint: deleted {self.path(tag)}")
                    return True
        return False

    def delete(self, tag: str) -> None:
        """Delete a tag.

        Rename it first, so that no reader sees half of it and remove_leftovers() finds the rest.
        """
        remove_dir(self.move_away(tag, ".saving"))

    def move_away(self, tag: str, suffix: str = ".damaged") -> str:
        """Append a suffix to the name of a tag's folder. Return the new path."""

        path = self.path(tag, suffix)

        # One of the same name may be left from an earlier time
        remove_dir(path, ignore_errors=True)
        os.rename(self.path(tag), path)
        return path

    def remove_leftovers(self) -> None:
        """Remove what a killed save left.

        Restore a tag that it was replacing, and rename a tag without a manifest.
        """
        incomplete = []
        # In this order, x.old comes before x.saving
        for name in sorted(os.listdir(self.out_dir)):
            tag, _, kind = name.partition(".")
            is_tag = TAG_NAME.fullmatch(tag) and os.path.isdir(self.path(name))
            if TEMP_NAME.fullmatch(name):
                os.remove(self.path(name))
            elif not is_tag:
                continue  # the user's own
            elif kind == "old" and self.is_complete(name) and not exists(self.path(tag)):
                # It was being replaced, and the new one has no name yet
                os.rename(self.path(name), self.path(tag))
            elif kind in ("old", "saving"):
                remove_dir(self.path(name))
            elif kind == "" and not self.is_complete(name):
                incomplete.append(name)
                if len(incomplete) <= MAX_REPORTED:
                    print0(
                        f"skipping {self.path(name)}: it has no manifest.json; kept as "
                        f"{name}.damaged"
                    )
                self.move_away(name)

        # Of many, only the first are named above
        if len(incomplete) > MAX_REPORTED:
            print0(f"skipping {len(incomplete):,} tags without a manifest.json in all")

    def clean(
        self,
        tag: Tag | None,
        corrupt: Iterable[str] = (),
        overwrite: bool = False,
        aliases: Iterable[str] = (),
    ) -> None:
        """Prepare out_dir for a run that begins at `tag`, or anew.

        Remove leftovers, rename the corrupt tags, delete newer tags if `overwrite`, and link
        `aliases` to the tag, which a kill may have prevented. Other ranks than 0 do nothing. Raises
        OSError.
        """
        if self.read_only or RANK != 0:
            return
        # Leave only tags from which the run resumes
        self.remove_leftovers()
        for name in corrupt:
            self.move_away(name)

        # Tags of a later iteration would be found as the newest
        if overwrite:
            begins_at = tag.manifest["iter_num"] if tag else -1
            for name in self.newer_than(begins_at):
                self.delete(name)

        # DeepSpeed's tools read this file, and a kill may have left an older name
        newest = self.newest()
        if newest:
            write_atomic(self.path("latest"), newest)

        # The tag's other names. If one can't be made, the tag itself is intact
        if tag and is_numbered(tag.name):
            for name in aliases:
                try:
                    self.alias(tag.name, name)
                except OSError as error:
                    print0(
                        f"{name} could not be linked to {tag.name} ({error.strerror}); the run "
                        "continues without it"
                    )
        with contextlib.suppress(OSError):  # prune() tries again
            self.link_best()


def is_numbered(tag: str) -> bool:
    """Return whether a tag's name says its iteration."""
    return tag.startswith("iter_")


def exists(path: str) -> bool:
    """Return whether `path` exists.

    One that can't be checked, without permission or on a failing disk, counts.
    """
    try:
        os.stat(path)
    except OSError as error:
        return not isinstance(error, FileNotFoundError | NotADirectoryError)
    return True


def parse_run_path(path: str | os.PathLike) -> tuple[str, str] | None:
    """Return (out_dir, tag) for a tag's folder, or for an out_dir with its best or newest tag.

    Returns None if a path is neither.
    """
    path = os.path.normpath(path)

    # A tag's own folder comes first, whatever its out_dir
    folder, name = os.path.split(path)
    if TagStore(folder).is_complete(name):
        return folder, name

    # Else it may be an out_dir
    store = TagStore(path)
    tag = "best" if store.is_complete("best") else store.newest()
    if tag is None:
        return None
    return path, tag
