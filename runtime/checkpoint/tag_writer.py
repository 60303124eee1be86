"""Write a tag's files, and commit it when those of all ranks are on the disk.

A tag is written to iter_5.saving/. Then rank 0 writes the manifest, renames the folder to iter_5/,
and deletes older tags. Readers only see complete tags, whenever a run is killed.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from runtime.checkpoint.manifest import sign_manifest
from runtime.checkpoint.save_errors import cause_of, first_os_error, is_full, lacks_room
from runtime.checkpoint.staging import Files, decoded
from runtime.checkpoint.tags import TagStore
from runtime.cluster.ranks import all_gather_objects, broadcast_from_rank0, print0
from runtime.files import create_new, file_digest, replace_dir, write_atomic

POLL_S = 0.5  # between two questions whether all ranks have written

Digests = dict[str, dict]  # {file: {"bytes", "sha256"}}


class TagWriter:
    """Writes tags, one at a time. A thread of each rank calls it, with all other ranks.

    keep_last: the newest iter_* tags that stay. group: the threads' own. copy_recovery_script:
    writes DeepSpeed's scripts into a folder.
    """

    def __init__(
        self,
        store: TagStore,
        keep_last: int,
        group: dist.ProcessGroup | None,
        copy_recovery_script: Callable[[str], None],
    ):
        self.store = store
        self.keep_last = keep_last
        self.group = group
        self.copy_recovery_script = copy_recovery_script

    def write(self, files: Files, manifest: dict, aliases: Iterable[str]) -> str | None:
        """Write, flush and hash this rank's files, and commit the tag if no rank has failed.

        If the disk is full, delete an old tag and try again. Return the failure or None, as on all
        ranks.
        """
        again = True
        while again:
            failure, again = self.attempt(files, manifest, aliases)
        return failure

    def attempt(
        self, files: Files, manifest: dict, aliases: Iterable[str]
    ) -> tuple[str | None, bool]:
        """Try to write a tag. Return (the failure or None, whether another attempt may work).

        Whatever fails, each rank reaches all collectives.
        """
        # Under a name that no reader takes for a tag
        work = self.store.path(manifest["tag"], ".saving")
        written, failures = self.write_on_all_ranks(work, files)
        failure = failures[0] if failures else None

        # Rank 0 commits, or finds room for another attempt
        again = False
        if dist.get_rank() == 0:
            try:
                if not failure:
                    self.commit(work, manifest, aliases, written)
            except Exception as error:
                failure = cause_of(error)
            if failure and (lacks_room(failure) or is_full(self.store.out_dir)):
                failure = "the disk is full"
                again = self.store.delete_oldest()

        # All ranks have to know whether to write again
        failure, again = broadcast_from_rank0((failure, again), self.group)
        return failure, again

    def write_on_all_ranks(self, work: str, files: Files) -> tuple[list[Digests], list[str]]:
        """Write this rank's files into the folder `work`, and wait until all ranks have.

        Return (the digests of each rank's files, the failures, with their ranks).
        """
        # Writing and hashing are on a thread of their own, so that this one can talk to the others
        own_digests: Digests = {}
        own_failures: list[str] = []
        writer = threading.Thread(
            target=write_files, args=(work, files, own_digests, own_failures), daemon=True
        )
        writer.start()

        # A rank that is still writing takes part, so that the group's timeout finds those that hang
        all_done = torch.zeros(())
        while not all_done:
            writer.join(POLL_S)
            all_done.fill_(not writer.is_alive())
            dist.all_reduce(all_done, dist.ReduceOp.MIN, group=self.group)

        # What each rank has to tell
        digests = []
        failures = []
        of_ranks = all_gather_objects([own_digests, own_failures], self.group)
        for rank, (digests_of_rank, failures_of_rank) in enumerate(of_ranks):
            digests.append(digests_of_rank)
            failures += [f"rank {rank}: {failure}" for failure in failures_of_rank]
        return digests, failures

    def commit(
        self, work: str, manifest: dict, aliases: Iterable[str], written: list[Digests]
    ) -> None:
        """Write the manifest, rename the folder, update `latest` and the aliases, then prune.

        written: of each rank's files. Rank 0 alone.
        """
        # From the rename on, the tag is there
        tag = manifest["tag"]
        manifest["files"] = {}
        for digests in written:
            manifest["files"].update(sorted(digests.items()))
        write_atomic(os.path.join(work, "manifest.json"), sign_manifest(manifest))
        replace_dir(work, self.store.path(tag))

        # If the rest fails, clean() does it when a run resumes from the tag
        try:
            write_atomic(self.store.path("latest"), tag)
            for name in aliases:
                self.store.alias(tag, name)
            self.store.prune(self.keep_last)
        except Exception as error:
            if is_full(self.store.out_dir):
                raise  # attempt() makes room, or the run ends
            names = ", ".join(["latest", *aliases])
            print0(
                f"{tag} is saved, but updating {names} or deleting older checkpoints failed: "
                f"{error}"
            )

        # A full disk must not end the save, and DeepSpeed's package has the scripts, too
        with contextlib.suppress(OSError):
            self.copy_recovery_script(self.store.out_dir)


def write_files(folder: str, files: Files, written: Digests, failures: list[str]) -> None:
    """Write, flush and hash files.

    Add each one's digest to `written`, or the error to `failures`.
    """
    try:
        # It may be there: another rank's, or left by an attempt that found no room. The folders
        # above it are not made: an out_dir that was moved would be made without its lock
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder)
        for path, content in files:
            with contextlib.suppress(FileNotFoundError):
                os.remove(path)  # left by an attempt that found no room, or a link of others
            write_file(path, content)
            written[os.path.basename(path)] = file_digest(path, flush=True)
    except Exception as error:
        failures.append(cause_of(error))


def write_file(path: str, content: dict) -> None:
    """Write one file with torch.save. Raises OSError, with the path."""
    try:
        with create_new(path) as file:
            torch.save(decoded(content, os.path.dirname(path)), file)
    except Exception as error:
        cause = first_os_error(error)
        if cause is None or cause.errno is None:
            raise
        raise OSError(cause.errno, os.strerror(cause.errno), path) from error
