"""ZeRO-2 in float32 on CPU: the ranks of one machine pass gradients and weights through memory that they share.

Otherwise gloo sends both through sockets, and DeepSpeed 0.19.8 handles each gradient in a hook of its own. A step of
config/shakespeare_char_cpu.py on 2 cores, with the fused AdamW: 55 ms became 41.
"""

import contextlib
import itertools
import os

import torch
import torch.distributed as dist

from runtime.cluster.ranks import all_reduce_sum, local_world_size
from runtime.hardware import available_memory
from runtime.versions import has_all

REPLACED = ("_grad_acc_hooks", "_update_model_bit16_weights", "reduce_ipg_grads")


def shared_areas(n, group):
    """Two areas (world_size, n), float32, that all ranks see, as one tensor; None where they cannot share memory: on
    several machines, on other systems than Linux, or for lack of room."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    fd, path, areas = None, [None], None
    if rank == 0 and local_world_size() == world_size and 2 * world_size * n * 4 < available_memory():
        with contextlib.suppress(OSError, AttributeError):
            fd = os.memfd_create("zero")  # a file without a name: nothing is left when we are killed
            os.posix_fallocate(fd, 0, 2 * world_size * n * 4)  # what is not there now would kill us when we write to it
            path = [f"/proc/{os.getpid()}/fd/{fd}"]
    dist.broadcast_object_list(path, src=0, group=group)
    if path[0]:
        with contextlib.suppress(RuntimeError):
            areas = torch.from_file(path[0], shared=True, size=2 * world_size * n).view(2, world_size, n)
    everyone = all_reduce_sum(areas is not None)[0] == world_size
    if fd is not None:
        os.close(fd)  # the memory stays until the last of us ends
    return areas if everyone else None


def pass_through_memory(optimizer):
    """Give DeepSpeed's optimizer this way for its gradients and weights; returns whether that could be done.

    Every exchange has one barrier, between all ranks' writing and reading. The two areas take turns: who writes into
    one has passed the barrier of the other, which nobody reached before having read this one to its end.
    """
    from deepspeed.runtime.zero import stage_1_and_2

    group, flats = optimizer.dp_process_group, optimizer.bit16_groups_flat
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    if world_size == 1 or not (has_all(optimizer, REPLACED, "gradient path")
                               and has_all(stage_1_and_2, ["all_gather_dp_groups"], "gradient path")):
        return False
    areas = shared_areas(sum(flat.numel() for flat in flats), group)
    if areas is None:
        return False
    sizes = [flat.numel() for flat in flats]
    turns = itertools.cycle([area.split(sizes, dim=1) for area in areas])  # of each area one (world_size, n) a group

    def flush(comm_dtype=None):
        """After a backward: each gradient to its place, then everyone's share of this rank's into its partition."""
        area = next(turns)
        for i, rows in enumerate(area):
            for param, first in zip(optimizer.round_robin_bit16_groups[i], optimizer.round_robin_bit16_offsets[i]):
                place = rows[rank].narrow(0, first, param.numel())
                if param.grad is None:
                    place.zero_()
                else:
                    place.copy_(param.grad.view(-1))
        dist.barrier(group)
        for i, rows in enumerate(area):
            mine = optimizer._get_compact_grad_partition_buffer(i).flat_partition
            for row in rows:
                mine.add_(row.view(world_size, -1)[rank], alpha=1 / world_size)

    def gather(groups_flat, *args, **kwargs):
        """After the optimizer's step: everyone's weights, out of the partition that it has stepped."""
        if groups_flat is not flats:
            return others(groups_flat, *args, **kwargs)
        area = next(turns)
        for flat, rows in zip(flats, area):
            rows[rank].view(world_size, -1)[rank].copy_(flat.view(world_size, -1)[rank])
        dist.barrier(group)
        for flat, rows in zip(flats, area):
            for i, row in enumerate(rows):
                flat.view(world_size, -1)[i].copy_(row.view(world_size, -1)[i])

    for hook in optimizer._grad_acc_hooks:
        hook.remove()
    optimizer.reduce_ipg_grads = flush
    optimizer._update_model_bit16_weights = lambda group: None  # they are still views of flats: 0.4 ms
    others, stage_1_and_2.all_gather_dp_groups = stage_1_and_2.all_gather_dp_groups, gather
    return True
