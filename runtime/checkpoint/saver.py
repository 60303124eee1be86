"""Save tags in the background: copy the state to host memory, from where a thread writes, hashes and commits it.

A tag is written to iter_5.saving/. When the files of all ranks are on the disk, rank 0 writes the manifest, renames the
folder to iter_5/, and then deletes older tags. Readers only see complete tags, whenever a run is killed."""

import contextlib
import copy
import os
import threading
import time

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map

from runtime.checkpoint.errors import first_line
from runtime.checkpoint.manifest import MANIFEST_FORMAT, check_state, sign_manifest, topology
from runtime.checkpoint.save_errors import cause_of, first_os_error, is_full
from runtime.cluster.ranks import all_gather_objects, broadcast_from_rank0, exit_with_problems, local_world_size, print0
from runtime.errors import UserError
from runtime.files import (
    create_new,
    file_digest,
    format_bytes,
    free_bytes,
    remove_dir,
    replace_dir,
    write_atomic,
)
from runtime.hardware import available_memory

POLL_S = 0.5  # between two questions whether all ranks have written
ALIGNMENT = 64  # bytes, of the tensors in the staging buffer


def tag_bytes(params, dtype, stage):
    """Estimate a tag's bytes: the weights (at stage 3 the frozen ones alone), Adam's two moments or Muon's one, and the
    fp32 master weights. params: a ParamCount. GPT-2 XL at stage 2 in bfloat16: 21.8 GB."""
    shared = (params.stored - params.trainable * (stage == 3)) * {"float32": 4}.get(dtype, 2)
    return shared + params.trainable * 12 - params.muon * 4


class Saver:
    """Saves an engine's tags, one at a time. All ranks call its methods together. tag_bytes: a tag's estimated size;
    background: train while a tag is written; on_saved: RunLog.saved, which rank 0 calls after each save."""

    def __init__(self, engine, store, keep_last, tag_bytes, background, on_saved):
        self.engine, self.store, self.keep_last, self.background = engine, store, keep_last, background
        self.on_saved, self.tag_bytes = on_saved, tag_bytes  # which each save corrects
        self.group = dist.new_group(backend="gloo")  # the threads' own: NCCL's calls must come in training's order
        self.staging, self.pinned, self.thread = np.empty(0, np.uint8), False, None
        self.failed = None  # why a save has failed
        on_gpu = engine.device.type == "cuda" and not engine.offloads_optimizer
        if background and keep_last and not store.read_only and on_gpu:
            self.preallocate()

    def preallocate(self):
        """Allocate the staging buffer during the first steps, because pinning it takes seconds. Estimate this rank's
        share of a tag a little high: the optimizer has no state yet."""
        sizes = [aligned_nbytes(p) for p in self.engine.module.parameters()]
        weights = sum(sizes) if self.engine.stage == 2 else 0  # in the model's file, which rank 0 writes
        size = int(1.02 * (self.tag_bytes - weights) / dist.get_world_size()) + 3 * ALIGNMENT * len(sizes)
        self._start(self._allocate_staging, size + weights * (dist.get_rank() == 0))

    def save(self, tag, aliases, state):
        """Start to save out_dir/tag and link its aliases (best, final) to it. Waits for the previous save, and for this
        one if it cannot be written in the background. wait() reports failures."""
        if not self.keep_last:
            return
        self._join()
        if self.failed:  # the one before, on all ranks: wait() reports it
            return
        print0(f"saving checkpoint to {self.store.path(tag)}")
        start = time.monotonic()
        problem = broadcast_from_rank0(self._prepare_folder(tag, state))
        if problem:
            self.failed = problem
            return
        if dist.get_rank() == 0:
            remove_dir(self.store.path(tag, ".saving"), ignore_errors=True)
            with contextlib.suppress(OSError):  # write() reports it
                while free_bytes(self.store.out_dir) < self.tag_bytes and self.store.delete_oldest():
                    continue
        manifest = {"format": MANIFEST_FORMAT, "tag": tag, "iter_num": state["iter_num"], **topology(self.engine),
                    "state": state}
        files = self.engine.checkpoint_files(self.store.out_dir, tag + ".saving")
        size = sum({storage_key(leaf): aligned_nbytes(leaf) for leaf in tree_leaves(files)
                    if torch.is_tensor(leaf)}.values())
        if self.background:
            self._start(self._allocate_staging, size)
            self._join()
        background = self.background and len(self.staging) >= size
        if background:
            files = self._copy_to_staging(files)
            if self.engine.device.type == "cuda":
                torch.cuda.synchronize()  # training may continue once the copies are done
        else:
            if self.background:
                print0(f"too little host memory to save in the background ({format_bytes(size)} per rank): training "
                       "waits")
            files = without_attributes(files)
        blocked_s = time.monotonic() - start if background else None  # None: until the save ends
        self._start(self._write_and_commit, files, manifest, aliases, start, blocked_s)
        if not background:
            self._join()

    def _prepare_folder(self, tag, state):
        """Have rank 0 look that out_dir is there, and locked, and that the state fits into a manifest. Return why `tag`
        can't be saved, or None."""
        if dist.get_rank() != 0:
            return None
        try:
            check_state(state)
            self.store.hold_folder()
        except (OSError, UserError) as error:
            return f"{self.store.path(tag)} could not be saved ({first_line(error)})"
        return None

    def wait(self):
        """Wait for the current save. If a save has failed, report it and end the run."""
        self._join()
        if self.failed:
            exit_with_problems([f"{self.failed}; earlier checkpoints are intact", "a checkpoint could not be saved: "
                                "fix that, or make room, and start again with --init_from=auto"])

    def _start(self, target, *args):
        self.thread = threading.Thread(target=target, args=args, daemon=True)
        self.thread.start()

    def _join(self):
        if self.thread:
            self.thread.join()
            self.thread = None

    def _allocate_staging(self, size):
        """Allocate a staging buffer of `size` bytes, pinned if there is a GPU, unless host memory is short.

        Call it on a thread of its own: CUDA remembers a failure, and the thread's next kernel launch would raise it."""
        if len(self.staging) >= size:
            return
        cudart = None
        if self.engine.device.type == "cuda":
            torch.cuda.set_device(self.engine.device)  # a new thread begins on the first GPU
            cudart = torch.cuda.cudart()
        if self.pinned:  # or CUDA would copy into freed pages
            cudart.cudaHostUnregister(self.staging.ctypes.data)
        self.staging, self.pinned = np.empty(0, np.uint8), False
        # the other ranks on this machine allocate at the same time; 10% stays free
        if size * 1.1 * local_world_size() > available_memory():
            return
        try:
            staging = np.empty(size, np.uint8)
        except MemoryError:
            return
        if cudart:
            staging[::4096] = 0  # touch the pages, before CUDA holds a lock to pin them
            self.pinned = int(cudart.cudaHostRegister(staging.ctypes.data, size, 0)) == 0  # else copies are slower
        self.staging = staging

    def _copy_to_staging(self, files):
        """Return the files with all tensors copied to the staging buffer, each once, so that training can continue."""
        filled, copies = 0, {}

        def copy_leaf(leaf):
            nonlocal filled
            if not torch.is_tensor(leaf):
                return copy.deepcopy(leaf)
            tensor, key = leaf.detach(), storage_key(leaf)
            if not tensor.numel():
                return torch.empty_like(tensor, device="cpu")
            if key not in copies:  # tied weights stay tied
                # frombuffer makes a storage of this slice: torch.save writes a tensor's whole storage
                own = torch.frombuffer(self.staging[filled : filled + tensor.nbytes], dtype=tensor.dtype)
                copies[key] = own.view(tensor.shape).copy_(tensor, non_blocking=True)
                filled += aligned_nbytes(tensor)
            return copies[key]

        # is_leaf: pytree would turn a torch.Size into a tuple
        return [(path, tree_map(copy_leaf, content, is_leaf=lambda node: isinstance(node, torch.Size)))
                for path, content in files]

    def _write_and_commit(self, files, manifest, aliases, start, blocked_s):
        """Run on the thread: commit a tag, or set .failed."""
        try:
            problem = self.write(files, manifest, aliases)
        except BaseException as error:  # a failed collective, which then fails on all ranks
            problem = f"rank {dist.get_rank()}: {cause_of(error)}"
        tag = manifest["tag"]
        if problem:
            self.failed = f"{self.store.path(tag)} could not be saved ({problem})"
            if dist.get_rank() == 0:
                remove_dir(self.store.path(tag, ".saving"), ignore_errors=True)
        elif dist.get_rank() == 0:
            seconds = time.monotonic() - start
            self.tag_bytes = sum(entry["bytes"] for entry in manifest["files"].values())
            self.on_saved(manifest["iter_num"], tag, self.tag_bytes, seconds,
                          seconds if blocked_s is None else blocked_s)

    def write(self, files, manifest, aliases):
        """Write, flush and hash this rank's files, and commit the tag if no rank has failed. If the disk is full,
        delete an old tag and try again. Return the failure or None, as on all ranks: all reach both collectives."""
        work, written, failures, again = self.store.path(manifest["tag"], ".saving"), {}, [], False
        writer = threading.Thread(target=write_files, args=(work, files, written, failures), daemon=True)
        writer.start()
        done = torch.zeros(())
        while not done:  # a rank that is still writing takes part, so that the group's timeout finds those that hang
            writer.join(POLL_S)
            done.fill_(not writer.is_alive())
            dist.all_reduce(done, dist.ReduceOp.MIN, group=self.group)
        of_ranks = all_gather_objects([written, failures], self.group)
        written, failures = zip(*of_ranks, strict=True)
        failure = next((f"rank {rank}: {error}" for rank, errors in enumerate(failures) for error in errors), None)
        if dist.get_rank() == 0:
            try:
                if not failure:
                    self._commit(work, manifest, aliases, written)
            except Exception as error:
                failure = cause_of(error)
            if failure and is_full(self.store.out_dir):
                failure, again = "the disk is full", self.store.delete_oldest()
        failure, again = broadcast_from_rank0((failure, again), self.group)
        return self.write(files, manifest, aliases) if again else failure

    def _commit(self, work, manifest, aliases, written):
        """Write the manifest, rename the folder, update `latest` and the aliases, then prune. written:
        [{name: digest}] of the ranks' files. Rank 0 alone."""
        tag = manifest["tag"]
        manifest["files"] = {name: entry for files in written for name, entry in sorted(files.items())}
        write_atomic(os.path.join(work, "manifest.json"), sign_manifest(manifest))
        replace_dir(work, self.store.path(tag))
        try:
            write_atomic(self.store.path("latest"), tag)
            for name in aliases:
                self.store.alias(tag, name)
            self.store.prune(self.keep_last)
        except Exception as error:  # the tag is saved; clean() does the rest when a run resumes from it
            if is_full(self.store.out_dir):
                raise  # write() makes room and tries again, or the run ends
            print0(f"{tag} is saved, but updating {', '.join(['latest', *aliases])} or deleting older checkpoints "
                   f"failed: {error}")
        with contextlib.suppress(OSError):  # a full disk must not end the save, and DeepSpeed's package has them, too
            self.engine.copy_recovery_script(self.store.out_dir)


def without_attributes(files: list[tuple[str, dict]]) -> list[tuple[str, dict]]:
    """Return the files with each tensor as a plain view of the same memory.

    DeepSpeed sets attributes on parameters, which torch.save would write. No reader takes such a file.
    """

    def plain(leaf):
        return leaf.detach() if torch.is_tensor(leaf) else leaf

    # is_leaf: pytree would turn a torch.Size into a tuple
    return [
        (path, tree_map(plain, content, is_leaf=lambda node: isinstance(node, torch.Size)))
        for path, content in files
    ]


def write_files(folder, files, written, failures):
    """Write, flush and hash files [(path, content)]. Add each one's digest to `written`, or the error to `failures`."""
    try:
        with contextlib.suppress(FileExistsError):  # another rank's, or left by an attempt that found no room
            os.mkdir(folder)  # not the folders above it: an out_dir that was moved would be made without its lock
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
            torch.save(content, file)
    except Exception as error:
        cause = first_os_error(error)
        if cause is None:
            raise
        raise OSError(cause.errno, os.strerror(cause.errno), path) from error


def storage_key(tensor):
    """Return a key that tied weights share."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def aligned_nbytes(tensor):
    """Return the bytes that a tensor takes in the staging buffer."""
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
