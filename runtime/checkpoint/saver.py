"""Save tags in the background: copy the state to host memory, from where a thread writes it."""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from runtime.checkpoint.buffers import different_buffers
from runtime.checkpoint.errors import first_line
from runtime.checkpoint.manifest import MANIFEST_FORMAT, check_state, topology
from runtime.checkpoint.model_source import shown_names
from runtime.checkpoint.save_errors import cause_of
from runtime.checkpoint.staging import (
    ALIGNMENT,
    Files,
    Staging,
    aligned_nbytes,
    decoded_on_disk,
    staged_nbytes,
    without_attributes,
)
from runtime.checkpoint.tag_writer import TagWriter
from runtime.checkpoint.tags import TagStore
from runtime.cluster.ranks import (
    all_gather_objects,
    broadcast_from_rank0,
    exit_with_problems,
    print0,
)
from runtime.errors import UserError
from runtime.files import format_bytes, free_bytes, remove_dir


def tag_bytes(params: Any, dtype: str, stage: int) -> int:
    """Estimate a tag's bytes. params: a ParamCount.

    It has the weights in the model's precision (at stage 3 the frozen ones alone), the float32
    master weights, and Adam's two moments or Muon's one. GPT-2 XL at stage 2 in bfloat16: 21.8 GB.
    """
    itemsize = 4 if dtype == "float32" else 2
    weights = params.stored
    if stage == 3:
        weights -= params.trainable
    return weights * itemsize + params.trainable * 12 - params.muon * 4


class Saver:
    """Saves an engine's tags, one at a time. All ranks call its methods together.

    keep_last: the newest iter_* tags that stay; 0: nothing is saved. tag_bytes: a tag's estimated
    size, which each save corrects. background: train while a tag is written. on_saved:
    RunLog.saved, which rank 0 calls after each save. failed: why a save has failed, or None.
    """

    def __init__(
        self,
        engine: Any,
        store: TagStore,
        keep_last: int,
        tag_bytes: int,
        background: bool,
        on_saved: Callable[[int, str, int, float, float], Any],
    ):
        self.engine = engine
        self.store = store
        self.keep_last = keep_last
        self.tag_bytes = tag_bytes
        self.background = background
        self.noted_buffers = False
        self.on_saved = on_saved
        self.failed: str | None = None
        self.thread: threading.Thread | None = None  # of the current save or allocation
        self.staging = Staging(engine.device)

        # The threads have a group of their own: NCCL's calls must come in training's order
        group = dist.new_group(backend="gloo")
        self.writer = TagWriter(store, keep_last, group, engine.copy_recovery_script)

        # Copies from GPUs go to pinned memory
        on_gpu = engine.device.type == "cuda" and not engine.offloads_optimizer
        if background and keep_last and not store.read_only and on_gpu:
            self.preallocate()

    def preallocate(self) -> None:
        """Allocate the staging buffer during the first steps, because pinning it takes seconds.

        Estimate this rank's share of a tag a little high: the optimizer has no state yet.
        """
        # Rank 0 has the model's file besides its part of the optimizer's state
        sizes = [aligned_nbytes(p) for p in self.engine.module.parameters()]
        in_model_file = 0  # which rank 0 writes
        if self.engine.stage == 2:
            in_model_file = sum(sizes)
        size = int(1.02 * (self.tag_bytes - in_model_file) / dist.get_world_size())
        size += 3 * ALIGNMENT * len(sizes)
        if dist.get_rank() == 0:
            size += in_model_file
        self._start(self.staging.allocate, size)

    def save(self, tag: str, aliases: list[str], state: dict) -> None:
        """Start to save out_dir/tag and link its aliases (best, final) to it.

        Wait for the previous save, and for this one if it can't be written in the background.
        wait_or_exit() reports failures.
        """
        if not self.keep_last:
            return

        # One save at a time: they share the staging buffer. This wait blocks training, too
        blocked_since = time.monotonic()
        self._join()
        if self.failed:  # the one before, on all ranks
            return
        print0(f"saving checkpoint to {self.store.path(tag)}")
        start = time.monotonic()
        self.failed = broadcast_from_rank0(self._prepare_folder(tag, state))
        if self.failed:
            return
        if dist.get_rank() == 0:
            remove_dir(self.store.path(tag, ".saving"), ignore_errors=True)  # another attempt's

        # Ranks may have other buffers, such as running statistics: said once
        if not self.noted_buffers:
            names = different_buffers(self.engine.module)
            self.noted_buffers = bool(names)
            if names:
                print0(
                    f"note: the ranks have different buffers ({shown_names(names)}): checkpoints "
                    "hold those of rank 0, which all ranks get at a resume"
                )

        # What the tag holds: the engine's own tensors, which the next step changes
        manifest = {
            "format": MANIFEST_FORMAT,
            "tag": tag,
            "iter_num": state["iter_num"],
            **topology(self.engine),
            "state": state,
        }
        files = self.engine.checkpoint_files(self.store.out_dir, f"{tag}.saving")

        # Write a copy while training goes on, or else the tensors themselves while it waits
        copies = self._copy_to_staging(files) if self.background else None
        on_disk = decoded_on_disk(files) if copies is None else 0
        self._make_room(on_disk)
        if copies is None:
            plain = without_attributes(files)
            waited_s = start - blocked_since
            self._start(self._write_and_commit, plain, manifest, aliases, start, waited_s, True)
            self._join()
        else:
            blocked_s = time.monotonic() - blocked_since
            self._start(self._write_and_commit, copies, manifest, aliases, start, blocked_s, False)

    def wait_or_exit(self) -> None:
        """Wait for the current save. If a save has failed, report it and end this process."""
        self._join()
        if self.failed:
            problems = [
                f"{self.failed}; earlier checkpoints are intact",
                "a checkpoint could not be saved: fix that, or make room, and start again with "
                "--init_from=auto",
            ]
            exit_with_problems(problems)

    def _prepare_folder(self, tag: str, state: dict) -> str | None:
        """Have rank 0 look that out_dir is there and locked, and that a manifest holds the state.

        Return why `tag` can't be saved, or None.
        """
        if dist.get_rank() != 0:
            return None
        try:
            check_state(state)
            self.store.hold_folder()
        except (OSError, UserError) as error:
            return f"{self.store.path(tag)} could not be saved ({first_line(error)})"
        return None

    def _make_room(self, on_disk: int) -> None:
        """Have rank 0 delete as many old tags as a save needs room, before a rank writes.

        on_disk: the bytes that this rank takes while it writes its files, besides them.
        """
        needed = self.tag_bytes + sum(all_gather_objects(on_disk))
        if dist.get_rank() == 0:
            with contextlib.suppress(OSError):  # writing reports it
                while free_bytes(self.store.out_dir) < needed:
                    if not self.store.delete_oldest():
                        break
        broadcast_from_rank0(None)

    def _copy_to_staging(self, files: Files) -> Files | None:
        """Return the files with their tensors in the staging buffer, so that training can continue.

        Return None if host memory is short.
        """
        # What preallocate() has estimated may be too little. allocate() needs a thread of its own
        size = staged_nbytes(files)
        self._start(self.staging.allocate, size)
        self._join()
        if len(self.staging.buffer) < size:
            print0(
                f"too little host memory to save in the background ({format_bytes(size)} per "
                "rank): training waits"
            )
            return None

        # Training goes on when the copies are complete, not when they are launched
        copies = self.staging.copy(files)
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize()  # until the copies are done
        return copies

    def _write_and_commit(
        self,
        files: Files,
        manifest: dict,
        aliases: list[str],
        start: float,
        blocked_s: float,
        training_waits: bool,
    ) -> None:
        """Run on the thread: commit a tag, or set .failed.

        start: when the save began. blocked_s: how long training has waited. training_waits: it also
        waits from start to the end of the save.
        """
        # Whatever happens, the thread ends with a sentence and not with a traceback
        tag = manifest["tag"]
        try:
            problem = self.writer.write(files, manifest, aliases)
        except BaseException as error:  # a failed collective, which then fails on all ranks
            problem = f"rank {dist.get_rank()}: {cause_of(error)}"
        if problem:
            self.failed = f"{self.store.path(tag)} could not be saved ({problem})"

        # Rank 0 alone reports it and cleans up
        if dist.get_rank() != 0:
            return
        if problem:
            remove_dir(self.store.path(tag, ".saving"), ignore_errors=True)
            return

        # Tell the log, and the next save how large a tag is
        seconds = time.monotonic() - start
        if training_waits:
            blocked_s += seconds
        self.tag_bytes = sum(entry["bytes"] for entry in manifest["files"].values())
        self.on_saved(manifest["iter_num"], tag, self.tag_bytes, seconds, blocked_s)

    def _start(self, target: Callable[..., None], *args: Any) -> None:
        """Start the thread."""
        self.thread = threading.Thread(target=target, args=args, daemon=True)
        self.thread.start()

    def _join(self) -> None:
        """Wait for the thread."""
        if self.thread:
            self.thread.join()
            self.thread = None
