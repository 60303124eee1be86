"""Copy what a save writes to host memory, so that training can go on while it is written."""

import copy
import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from runtime.cluster.ranks import local_world_size
from runtime.hardware import available_memory

ALIGNMENT = 64  # bytes, of the tensors in the buffer
PAGE = 4096  # bytes
LEFT_FREE = 1.1  # 10% of the host's memory stays free

Files = list[tuple[str, dict]]  # (path, content)


@dataclass(frozen=True, eq=False)
class Decoded:
    """A flat fp32 tensor that is kept in another format, and made when a save needs it.

    n: its elements, at least one. device: on which they are kept. fill(target): writes them to a
    tensor on the CPU; from a GPU, the copies may not be done yet.
    """

    n: int
    device: torch.device
    fill: Callable[[Tensor], None]

    @property
    def nbytes(self) -> int:
        return 4 * self.n


class Staging:
    """A buffer in host memory, pinned if there is a GPU."""

    def __init__(self, device: torch.device):
        self.device = device
        self.buffer = np.empty(0, np.uint8)
        self.pinned = False

    def allocate(self, size: int) -> None:
        """Make the buffer `size` bytes large, unless it is, or host memory is short.

        Call it on a thread of its own: CUDA remembers a failure, and the thread's next kernel
        launch would raise it.
        """
        if len(self.buffer) >= size:
            return
        cudart = None
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # a new thread begins on the first GPU
            cudart = torch.cuda.cudart()

        # Give the old one back: unregistered, or CUDA would copy into freed pages
        if cudart is not None and self.pinned:
            cudart.cudaHostUnregister(self.buffer.ctypes.data)
        self.buffer = np.empty(0, np.uint8)
        self.pinned = False

        # The other ranks on this machine allocate at the same time
        if not fits_in_memory(size, available_memory(), local_world_size()):
            return
        try:
            buffer = np.empty(size, np.uint8)
        except MemoryError:
            return
        if cudart:
            buffer[::PAGE] = 0  # touch the pages, before CUDA holds a lock to pin them
            error = cudart.cudaHostRegister(buffer.ctypes.data, size, 0)
            self.pinned = int(error) == 0  # else copies are slower
        self.buffer = buffer

    def copy(self, files: Files) -> Files:
        """Return the files with all tensors copied to the buffer, each once.

        On a GPU the copies may not be done yet.
        """
        # Tensors lie one after another, each at a multiple of ALIGNMENT
        filled = 0
        copies: dict[tuple, Tensor] = {}

        def copied(leaf: Any) -> Any:
            nonlocal filled
            if isinstance(leaf, Decoded):
                place = self.buffer[filled : filled + leaf.nbytes]
                flat = torch.frombuffer(place, dtype=torch.float32)
                leaf.fill(flat)
                filled += aligned_nbytes(leaf)
                return flat
            if not torch.is_tensor(leaf):
                return copy.deepcopy(leaf)

            # Tied weights, which are equal views of the same memory, are copied once
            tensor = leaf.detach()
            if not tensor.numel():
                return torch.empty_like(tensor, device="cpu")
            key = storage_key(tensor)
            if key not in copies:  # tied weights stay tied
                # frombuffer makes a storage of this slice: torch.save writes whole storages
                place = self.buffer[filled : filled + tensor.nbytes]
                flat = torch.frombuffer(place, dtype=tensor.dtype)
                copies[key] = flat.view(tensor.shape).copy_(tensor, non_blocking=True)
                filled += aligned_nbytes(tensor)
            return copies[key]

        return map_leaves(copied, files)


def without_attributes(files: Files) -> Files:
    """Return the files with each tensor as a plain view of the same memory.

    DeepSpeed sets attributes on parameters, which torch.save would write. No reader takes such a
    file.
    """

    def plain(leaf: Any) -> Any:
        return leaf.detach() if torch.is_tensor(leaf) else leaf

    return map_leaves(plain, files)


def decoded(content: dict, folder: str) -> dict:
    """Return a file's content with the tensors that are still to be made.

    They are in memory if there is enough, else in files without a name in the folder, from which
    the system reads them into memory as it can. Raises OSError if the disk is full.
    """

    def made(leaf: Any) -> Any:
        if not isinstance(leaf, Decoded):
            return leaf
        if fits_in_memory(leaf.nbytes, available_memory(), local_world_size()):
            tensor = torch.empty(leaf.n)
        else:
            with tempfile.TemporaryFile(dir=folder) as file:
                file.truncate(leaf.nbytes)
                if hasattr(os, "posix_fallocate"):  # a hole could find a full disk later
                    os.posix_fallocate(file.fileno(), 0, leaf.nbytes)
                tensor = torch.from_numpy(np.memmap(file, np.float32, "r+", shape=leaf.n))
        # This thread has a stream of its own: wait for the last step, and then for the copies
        is_on_gpu = leaf.device.type == "cuda"
        if is_on_gpu:
            torch.cuda.synchronize(leaf.device)
        leaf.fill(tensor)
        if is_on_gpu:
            torch.cuda.synchronize(leaf.device)
        return tensor

    return tree_map(made, content, is_leaf=is_size)


def decoded_on_disk(files: Files) -> int:
    """Return the bytes that decoded() is going to take on the disk, by the memory that is free
    now."""
    most = 0
    # One file after the other: its tensors go when it is written
    for _, content in files:
        sizes = [leaf.nbytes for leaf in tree_leaves(content) if isinstance(leaf, Decoded)]
        if sizes:
            most = max(most, beyond_memory(sizes, available_memory(), local_world_size()))
    return most


def beyond_memory(sizes: Iterable[int], free: float, ranks: int) -> int:
    """Return how many bytes of tensors, made one after the other, don't fit into memory.

    sizes: of one rank's tensors, in bytes. free: bytes on a machine, on which so many `ranks` make
    as many at the same time.
    """
    beyond = 0
    for size in sizes:
        if fits_in_memory(size, free, ranks):
            free -= size * ranks
        else:
            beyond += size
    return beyond


def fits_in_memory(size: float, free: float, ranks: int) -> bool:
    """Return whether `size` bytes of each of a machine's ranks fit into so much free memory."""
    return size * LEFT_FREE * ranks <= free


def map_leaves(function: Callable[[Any], Any], files: Files) -> Files:
    """Return the files with function(leaf) instead of each leaf of their contents."""
    mapped = []
    for path, content in files:
        mapped.append((path, tree_map(function, content, is_leaf=is_size)))
    return mapped


def is_size(node: Any) -> bool:
    """Return whether this is a torch.Size, which pytree would turn into a tuple."""
    return isinstance(node, torch.Size)


def staged_nbytes(files: Files) -> int:
    """Return the bytes that the tensors of files take in the buffer."""
    # By the same keys as in copy(), so that the buffer is exactly as large as needed
    sizes = {}
    for leaf in tree_leaves(files):
        if isinstance(leaf, Decoded):
            sizes[(id(leaf),)] = aligned_nbytes(leaf)
        elif torch.is_tensor(leaf):
            sizes[storage_key(leaf)] = aligned_nbytes(leaf)
    return sum(sizes.values())


def storage_key(tensor: Tensor) -> tuple:
    """Return a key that tied weights share."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def aligned_nbytes(tensor: Tensor | Decoded) -> int:
    """Return the bytes that a tensor takes in the buffer."""
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
