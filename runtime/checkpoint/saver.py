"""Saving beside training: the state is copied to host memory in a moment, a thread writes, checks and commits it.

A tag is written to iter_5.saving/. When every rank's files are on the disk and hashed, rank 0 writes the manifest,
gives the folder its name, and only then lets older tags go: a reader sees whole tags alone, whenever we are killed.
The threads of the ranks talk through a group of their own, because NCCL's order of calls belongs to training.
"""

import copy
import os
import shutil
import threading
import time

import numpy as np
import torch
import torch.distributed as dist

from runtime.checkpoint.tags import STATE, link, prune, sealed
from runtime.cluster.ranks import local_world_size, print0, silence_stdout
from runtime.files import file_digest, format_bytes, free_bytes, replace_dir, write_atomic
from runtime.hardware import available_memory
from runtime.lora import write_adapter

LINE = 64  # bytes; where a tensor begins in the staging buffer


def tag_bytes(n_params, dtype, stage, n_trained=None):
    """Bytes of a tag, from a model's parameters: the weights that the ranks share (at stage 3 the frozen ones, dealt
    out), from stage 1 on the fp32 originals of those that learn, with Adam's two moments, and with LoRA the adapter.
    GPT-2 XL's 1.56e9 at stage 2 in bfloat16: 21.8 GB."""
    n_trained = n_params if n_trained is None else n_trained
    shared = (n_params - n_trained if stage == 3 else n_params) * {"float32": 4}.get(dtype, 2)
    return shared + n_trained * ((8 if stage == 0 else 12) + (4 if n_trained < n_params else 0))


def space_problem(out_dir, needed):
    """Why a tag of so many bytes cannot be saved in out_dir, or None."""
    free = free_bytes(out_dir)
    if free < needed:
        return f"a tag takes {format_bytes(needed)} and {out_dir} has {format_bytes(free)} free"
    return None


class Saver:
    """Saves an engine's tags, one at a time. All ranks call its methods together."""

    def __init__(self, engine, out_dir, keep_last, expected_bytes, beside=True, ahead=False):
        self.engine, self.out_dir, self.keep_last, self.beside = engine, out_dir, keep_last, beside
        self.expected_bytes = expected_bytes  # of a tag; the first one that is saved corrects it
        self.group = dist.new_group(backend="gloo")
        self.staging, self.pinned = np.empty(0, np.uint8), False
        self.thread = None
        self.problem, self.committed = None, True  # why a save failed; whether the last one was committed
        self.recovery = []  # the folder for DeepSpeed's own scripts, if it wants them there
        if beside and ahead:  # pinning GPT-2 XL's share takes seconds: beside the first steps, and no save waits for it
            self.thread = threading.Thread(target=self.reserve, args=(self.share(),), daemon=True)
            self.thread.start()

    def share(self):
        """The bytes of this rank's part of a tag, reckoned a little high, before the optimizer has any state."""
        stage, first = self.engine.zero_optimization_stage(), dist.get_rank() == 0
        if stage == 0:
            return int(1.02 * self.expected_bytes) * first
        params = list(self.engine.parameters())
        rounding = 3 * LINE * len(params)
        if stage == 3:
            return int(1.02 * self.expected_bytes / dist.get_world_size()) + rounding
        weights = sum(padded(p) for p in params)
        return int(1.02 * (self.expected_bytes - weights) / dist.get_world_size()) + weights * first + rounding

    def save(self, tag, facts, state, names):
        """Begin to save out_dir/tag; best and final among `names` come to hold the same files. Waits for the save
        before it, and for this one unless it can be beside training. Look at .problem afterwards."""
        self.wait()
        began = time.time()
        work = os.path.join(self.out_dir, tag + ".saving")
        problem = [None]
        if dist.get_rank() == 0:
            shutil.rmtree(work, ignore_errors=True)
            try:
                os.makedirs(work)
                problem = [space_problem(self.out_dir, self.expected_bytes)]
            except OSError as error:
                problem = [error.strerror]
        dist.broadcast_object_list(problem, src=0, group=self.group)
        if problem[0]:
            self.fail(tag, problem[0])
            return
        files = self.collect(tag + ".saving", state)
        manifest = {"format": 2, "tag": tag, **facts, "state": state}
        size = sum({identity(t): padded(t) for _, content in files for t in tensors(content)}.values())
        beside = self.beside and self.reserve(size)
        if self.beside and not beside:
            print0(f"host memory is short of the {format_bytes(size)} a rank that saving beside training takes: "
                   "training waits for this save")
        if beside:
            place = self.placer()
            files = [(path, to_host(content, place)) for path, content in files]
            if self.engine.device.type == "cuda":
                torch.cuda.synchronize()  # the copies are done, and training may go on
        stood = time.time() - began if beside else None  # None: as long as the save takes
        self.thread = threading.Thread(target=self.finish, args=(files, manifest, names, began, stood), daemon=True)
        self.thread.start()
        if not beside:
            self.wait()

    def wait(self):
        """Until no save is in flight."""
        if self.thread:
            self.thread.join()
            self.thread = None

    def collect(self, folder, state):
        """[(path, content)] of this rank's files, as DeepSpeed would write them; the tensors are the engine's own."""
        files, checkpoint_engine, self.recovery = [], self.engine.checkpoint_engine, []
        checkpoint_engine.save = lambda state_dict, path: files.append((path, state_dict))
        self.engine._copy_recovery_script = self.recovery.append  # later, where a full disk is expected
        try:
            name_stage(self.engine.optimizer)
            if self.engine.zero_optimization_stage() < 3:  # frozen weights once, not a second time as a copy
                self.engine._get_param_fragment_func = torch.Tensor.detach
            with silence_stdout():
                self.engine.save_checkpoint(self.out_dir, tag=folder, client_state={STATE: state}, save_latest=False)
        finally:
            del checkpoint_engine.save, self.engine._copy_recovery_script  # the classes' own are back
            vars(self.engine).pop("_get_param_fragment_func", None)
        return files

    def reserve(self, size):
        """Have a staging buffer of `size` bytes, pinned where there is a GPU; False where host memory is short."""
        if len(self.staging) >= size:
            return True
        self.release()
        # by how much the others on this machine take at the same time; a tenth more stays free
        if size * 1.1 * local_world_size() > available_memory():
            return False
        try:
            staging = np.empty(size, np.uint8)
        except MemoryError:
            return False
        if self.engine.device.type == "cuda":
            staging[::4096] = 0  # the pages are there before CUDA holds its lock to pin them
            error = self.on_thread(lambda cudart: cudart.cudaHostRegister(staging.ctypes.data, size, 0))
            self.pinned = error == 0
            if error:
                print0(f"{format_bytes(size)} of host memory could not be pinned (CUDA error {error}): saves block "
                       "training for longer")
        self.staging = staging
        return True

    def release(self):
        """Drop the staging buffer. CUDA would copy into its pages, gone or not, if they stayed registered."""
        if self.pinned:
            self.on_thread(lambda cudart: cudart.cudaHostUnregister(self.staging.ctypes.data))
        self.staging, self.pinned = np.empty(0, np.uint8), False

    def on_thread(self, call):
        """Return the error code of call(cudart), made on a thread that ends with it: CUDA keeps a failure as the last
        error of its thread, and the thread's next kernel launch would raise it."""
        codes = [999]  # cudaErrorUnknown, if the call itself raises

        def run():
            with torch.cuda.device(self.engine.device):  # a new thread begins on the first GPU
                codes.append(int(call(torch.cuda.cudart())))

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return codes[-1]

    def placer(self):
        """A function that copies a tensor to its place in the staging buffer, once, and returns that copy."""
        filled, seen = 0, {}

        def place(tensor):
            nonlocal filled
            key = identity(tensor)
            if not tensor.numel():
                return torch.empty_like(tensor, device="cpu")
            if key not in seen:  # tied weights stay one
                # of its own slice: torch.save writes the whole storage that a tensor is a view of
                mine = torch.frombuffer(self.staging[filled : filled + tensor.nbytes], dtype=tensor.dtype)
                seen[key] = mine.view(tensor.shape).copy_(tensor, non_blocking=True)
                filled += padded(tensor)
            return seen[key]

        return place

    def finish(self, files, manifest, names, began, stood):
        """The thread's whole life: a checkpoint that is committed, or a sentence in .problem."""
        try:
            problem = self.write(files, manifest, names)
        except BaseException as error:  # a collective that failed or timed out, as it then does on all ranks
            problem = f"rank {dist.get_rank()}: {sentence(error)}"
        if problem:
            self.fail(manifest["tag"], problem)
            return
        self.committed = True
        if dist.get_rank() == 0:
            self.tell(manifest, began, stood)

    def write(self, files, manifest, names):
        """Write, sync and hash this rank's files; decide together; rank 0 commits. Return why it failed, or None: the
        same on all ranks, which all come to both collectives whatever happens before them."""
        work = os.path.join(self.out_dir, manifest["tag"] + ".saving")
        written, problem = {}, None
        try:
            for path, content in files:
                torch.save(content, path)
                written[os.path.basename(path)] = file_digest(path, flush=True)
        except Exception as error:  # a full disk is a RuntimeError
            problem = f"rank {dist.get_rank()}: {sentence(error)}"
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (written, problem), group=self.group)
        problem = [next((problem for _, problem in everyone if problem), None)]
        if dist.get_rank() == 0 and not problem[0]:
            manifest["files"] = {name: entry for written, _ in everyone for name, entry in sorted(written.items())}
            try:
                adapter = write_adapter(work, manifest)
                manifest["files"] |= {os.path.basename(path): file_digest(path, flush=True) for path in adapter}
                self.commit(work, manifest, names)
            except Exception as error:
                problem = [sentence(error)]
        dist.broadcast_object_list(problem, src=0, group=self.group)
        return problem[0]

    def fail(self, tag, why):
        """Report a failed save in .problem, and remove what it has written."""
        self.problem, self.committed = f"{self.out_dir}/{tag} could not be saved ({why})", False
        if dist.get_rank() == 0:
            shutil.rmtree(os.path.join(self.out_dir, tag + ".saving"), ignore_errors=True)

    def commit(self, work, manifest, names):
        """Rank 0: the manifest last, then the name, `latest`, best and final, and the oldest tags go."""
        tag = manifest["tag"]
        write_atomic(os.path.join(work, "manifest.json"), sealed(manifest))
        replace_dir(work, os.path.join(self.out_dir, tag))
        try:
            write_atomic(os.path.join(self.out_dir, "latest"), tag)
            for name in names:
                link(self.out_dir, tag, name)
            prune(self.out_dir, self.keep_last)
            for folder in self.recovery:
                self.engine._copy_recovery_script(folder)
        except Exception as error:  # the tag stands; a start from it sees to these
            print0(f"{tag} is saved, but latest{''.join(f', {name}' for name in names)} or older tags could not be "
                   f"seen to: {error}")

    def tell(self, manifest, began, stood):
        """Rank 0: what the save took, and whether a tag is as large as it was reckoned to be."""
        size, seconds = sum(entry["bytes"] for entry in manifest["files"].values()), time.time() - began
        if size > 1.05 * self.expected_bytes + 2**20:
            print0(f"a tag takes {format_bytes(size)}, and not the {format_bytes(self.expected_bytes)} reckoned before")
        self.expected_bytes = size
        print0(f"saved {manifest['tag']} in {seconds:.1f} s: {format_bytes(size)}, {size / seconds / 1e9:.2f} GB/s; "
               f"training stood still for {seconds if stood is None else stood:.2f} s")


def sentence(error):
    """An exception as one line."""
    return (str(error) or type(error).__name__).splitlines()[0]


def name_stage(optimizer):
    """DeepSpeed's BF16_Optimizer, its choice for bfloat16 at stage 1, leaves its stage out of what it saves, and
    zero_to_fp32 then refuses the file; everything else that it reads is there."""
    if type(optimizer).__name__ == "BF16_Optimizer" and "state_dict" not in vars(optimizer):
        incomplete = optimizer.state_dict
        optimizer.state_dict = lambda: {**incomplete(), "zero_stage": 1}


def identity(tensor):
    """What two names of the same values, as tied weights have, share."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def padded(tensor):
    """The bytes of a tensor in the staging buffer, up to where the next may begin."""
    return -(-tensor.nbytes // LINE) * LINE


def tensors(node):
    """All tensors in nested dicts, lists and tuples."""
    if torch.is_tensor(node):
        yield node
    elif isinstance(node, dict):
        for value in node.values():
            yield from tensors(value)
    elif type(node) in (list, tuple):
        for value in node:
            yield from tensors(value)


def to_host(node, place):
    """A copy of nested dicts, lists and tuples that training cannot change any more; tensors go where place() says."""
    if torch.is_tensor(node):
        return place(node.detach())
    if isinstance(node, dict):
        new = copy.copy(node)
        for key, value in node.items():
            new[key] = to_host(value, place)
        return new
    if type(node) in (list, tuple):
        return type(node)(to_host(value, place) for value in node)
    return copy.deepcopy(node)
