"""Say when the ranks have other buffers, of which a checkpoint holds those of rank 0."""

import hashlib

import torch
import torch.distributed as dist
from torch import nn

from runtime.cluster.ranks import all_gather_objects
from runtime.model_parts import persistent_buffers


def different_buffers(module: nn.Module) -> list[str]:
    """Return the names of the persistent buffers that aren't the same on all ranks.

    All ranks call it. With one rank, or without buffers, it costs nothing; else training waits for
    the GPU.
    """
    if dist.get_world_size() == 1:
        return []

    digests = {}
    for name, buffer in persistent_buffers(module).items():
        content = buffer.detach().cpu().contiguous().flatten().view(torch.uint8)
        digests[name] = hashlib.sha256(content.numpy().tobytes()).hexdigest()
    if not digests:  # the same on all ranks: they have one model
        return []

    of_ranks = all_gather_objects(digests)
    return [name for name in digests if any(one.get(name) != digests[name] for one in of_ranks)]
