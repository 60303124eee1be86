"""A shorter way for gradients through ZeRO-2.

Between backward and the optimizer DeepSpeed 0.19.8 divides, concatenates, casts and adds each gradient in passes of
their own, and then looks for infinities and takes the norm parameter by parameter. Here a gradient is copied once into
its bucket, a full bucket is summed over the ranks, and the rank's own part is added, in fp32 and divided by the number
of ranks in the same pass, to the partition that DeepSpeed keeps; norm and overflow come from that one flat partition.
Where one rank has all, kernels/block.py adds most gradients there within the products that make them; also where each
rank has room for the sums of all ("local sums"), which the ranks then sum over one another once a step instead of at
each micro-step. What is computed stays the same. GPT-2 XL at 8 x 4 on one H200: 798 ms a step became 717
(RESULTS.md).
"""

import math
from functools import partial

import torch
from deepspeed import comm as dist  # so that its log of messages has ours

from runtime.cluster.ranks import all_reduce_sum
from runtime.engine.ds_config import uses_offload
from runtime.versions import has_all

# What is used of DeepSpeed's optimizer at stage 2, and the methods of it that are replaced
USED = ("averaged_gradients", "bit16_groups", "bit16_groups_flat", "communication_data_type",
        "dp_process_group", "get_param_id", "grad_partition_insertion_offset", "grad_start_offset",
        "gradient_accumulation_dtype", "gradient_predivide_factor", "partition_size", "postscale_gradients",
        "reduce_bucket_size", "round_robin_bit16_groups", "round_robin_bit16_offsets",
        "_get_compact_grad_partition_buffer", "_get_compact_grad_partition_slice")
REPLACED = ("_use_compact_grad_partition_buffer", "process_gradients", "reduce_ipg_grads", "overlap_comm",
            "has_overflow", "scaled_global_norm")


def shorten(engine, accumulate_locally=False):
    """Put the shorter way into an engine where it fits: stage 2 with fp32 accumulation, no offload. Returns whether it
    did. Elsewhere DeepSpeed's own stays. accumulate_locally: whether this rank has room for the sums of all; they are
    kept if all ranks have."""
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() != 2 or uses_offload(engine.config):
        return False
    if not has_all(optimizer, USED + REPLACED, "gradient path") or not optimizer.postscale_gradients:
        return False
    if optimizer.gradient_accumulation_dtype != torch.float32:
        return False
    if optimizer.communication_data_type != optimizer.dtype or optimizer.gradient_predivide_factor != 1.0:
        return False
    optimizer._use_compact_grad_partition_buffer = lambda group: True  # DeepSpeed doesn't where the weights are fp32
    world_size = dist.get_world_size(optimizer.dp_process_group)
    optimizer.sum_over_ranks = lambda: None  # before the step, what is left to do
    if world_size > 1 and all_reduce_sum(accumulate_locally, device=optimizer.device)[0] == world_size:
        optimizer.sum_over_ranks = keep_sums(optimizer)
    optimizer.process_gradients, optimizer.reduce_ipg_grads = bucketed_sum(optimizer)
    optimizer.overlap_comm = False  # else it stops the GPU after each backward; ours has waited for the sums
    if world_size == 1:
        for i, group in enumerate(optimizer.bit16_groups):
            for param in group:
                param.grad_sum = partial(own_sum, optimizer, param, i)  # kernels/block.py adds to it in its products
    optimizer.norm_limit = math.inf  # a step whose gradient norm is not below it is skipped
    found = []  # the norm, from the look for overflow until it is asked for

    def norm():
        optimizer.sum_over_ranks()
        parts = [torch.linalg.vector_norm(group.flat_partition) for group in optimizer.averaged_gradients.values()]
        squared = torch.stack(parts).square().sum()
        dist.all_reduce(squared, group=optimizer.dp_process_group)
        size = squared.sqrt()
        optimizer.seen_norm = size / optimizer.loss_scale  # DeepSpeed tells of a skipped step's as infinite
        return size

    def norm_or_infinite(norm_type=2):
        size = found.pop() if found else norm()
        return size if optimizer.norm_limit == math.inf or size.item() < optimizer.norm_limit else size * math.inf

    def has_overflow(partition_gradients=True):
        found[:] = [norm()]
        return not found[0].item() < optimizer.norm_limit

    optimizer.has_overflow = has_overflow
    optimizer.scaled_global_norm = norm_or_infinite
    return True


def on_gpu(optimizer):
    return optimizer.device != "cpu" and torch.cuda.is_available()


def own_sum(optimizer, param, i):
    """The fp32 sum of a parameter's gradients, in its shape, where one rank owns all of it."""
    param_id = optimizer.get_param_id(param)
    return optimizer._get_compact_grad_partition_slice(i, 0, param_id, param.numel()).view(param.shape)


def keep_sums(optimizer):
    """Give each parameter a grad_sum of its own on each rank; returns a function that sums them over the ranks, into
    the partitions, and clears them."""
    group, flats = optimizer.dp_process_group, optimizer.bit16_groups_flat
    sums = [torch.zeros(flat.numel(), dtype=torch.float32, device=flat.device) for flat in flats]
    for i, flat in enumerate(sums):
        for param, first in zip(optimizer.round_robin_bit16_groups[i], optimizer.round_robin_bit16_offsets[i]):
            place = flat.narrow(0, first, param.numel()).view(param.shape)
            param.grad_sum = lambda place=place: place

    def sum_over_ranks():
        for i, flat in enumerate(sums):
            mine = optimizer._get_compact_grad_partition_buffer(i).flat_partition
            dist.reduce_scatter_tensor(mine, flat, group=group)
            mine.div_(dist.get_world_size(group))
            flat.zero_()

    return sum_over_ranks


def bucketed_sum(optimizer):
    """(take, flush): take(param, group) moves a fresh gradient on its way, flush() sees all of them to its end when a
    backward is over."""
    group = optimizer.dp_process_group
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    size = min(int(optimizer.reduce_bucket_size), sum(flat.numel() for flat in optimizer.bit16_groups_flat))
    side = torch.cuda.Stream() if on_gpu(optimizer) and optimizer.overlap_comm and world_size > 1 else None
    buffers, free, pending = [], [None, None], []  # free: when each buffer's last sum was done
    state = {"filled": 0, "index": 0, "beside": False}  # beside: something goes on in the side stream

    def add_mine(i, param, summed):
        """The part of one parameter's summed gradient that this rank owns, into its fp32 partition."""
        param_id = optimizer.get_param_id(param)
        starts = optimizer.grad_start_offset[i][rank]
        if param_id not in starts:
            return
        start, to = int(starts[param_id]), int(optimizer.grad_partition_insertion_offset[i][rank][param_id])
        n = min(param.numel() - start, int(optimizer.partition_size[i]) - to)
        mine = optimizer._get_compact_grad_partition_slice(i, rank, param_id, n)
        mine.add_(summed.narrow(0, start, n), alpha=1 / world_size)

    def reduce(flat, entries):
        dist.all_reduce(flat, group=group)
        for i, param, first in entries:
            add_mine(i, param, flat.narrow(0, first, param.numel()))

    def send():
        """Sum what the bucket holds, beside the backward that goes on, and turn to the other buffer."""
        if not pending:
            return
        index, flat = state["index"], buffers[state["index"]].narrow(0, 0, state["filled"])
        if side:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                reduce(flat, pending)
                free[index] = side.record_event()
            state.update(index=1 - index, beside=True)
        else:
            reduce(flat, pending)
        pending.clear()
        state["filled"] = 0

    def take(param, i):
        if not optimizer.ready_for_gradients:
            optimizer.micro_step_id += 1
            optimizer.ready_for_gradients = True
            for j in range(len(optimizer.bit16_groups)):  # made here, on the stream that the optimizer runs on
                optimizer._get_compact_grad_partition_buffer(j)
        if param.grad is None:  # its product has added it to grad_sum
            return
        grad, param.grad = param.grad, None
        if hasattr(param, "grad_sum"):
            param.grad_sum().add_(grad)
            return
        grad = grad.view(-1)
        if param.numel() > size:  # larger than a bucket: it is its own
            send()
            reduce_alone(grad, i, param)
            return
        if not buffers:
            buffers.extend(grad.new_empty(size) for _ in range(2 if side else 1))
        if state["filled"] + param.numel() > size:
            send()
        if free[state["index"]] is not None:
            torch.cuda.current_stream().wait_event(free[state["index"]])
            free[state["index"]] = None
        buffers[state["index"]].narrow(0, state["filled"], param.numel()).copy_(grad)
        pending.append((i, param, state["filled"]))
        state["filled"] += param.numel()

    def reduce_alone(grad, i, param):
        join()  # one communicator, one order
        reduce(grad.contiguous(), [(i, param, 0)])

    def join():
        """Wait for the side stream, if it does anything: one that does not cannot be waited for in a recording."""
        if state["beside"]:
            torch.cuda.current_stream().wait_stream(side)
            state["beside"] = False

    def flush(comm_dtype=None):
        send()
        join()
        free[:] = [None, None]

    return take, flush
