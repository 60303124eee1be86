"""The optimizer's step of ZeRO-2 and 3 in bfloat16 in one pass over its memory.

DeepSpeed clips the summed gradients in one pass, lets PyTorch's AdamW make the next, and copies the weights to bfloat16
in a third; in between it asks the GPU three times whether a number is finite, and the GPU waits for the answer's
consequences. Here one kernel does all three and clears the sums for the next step, and the norm is read while it runs.
What is computed stays the same, as does the state that checkpoints hold.
"""

from __future__ import annotations  # without Triton there is no tl.constexpr

import math

import torch
import torch.distributed as dist

from runtime.kernels import jit, tl, triton
from runtime.versions import has_all

# What is used of DeepSpeed's optimizer, by stage; its step is replaced
USED = {
    2: ("micro_step_id", "single_partition_of_fp32_groups", "parallel_partitioned_bit16_groups", "bit16_groups_flat",
        "real_dp_process_group", "nccl_start_alignment_factor", "allgather_bucket_size",
        "_lazy_init_hp_params_optimizer_state", "_get_compact_grad_partition_buffer"),
    3: ("fp16_groups", "fp16_partitioned_groups_flat", "fp32_partitioned_groups_flat", "sub_group_to_group_id",
        "grad_partitions_flat_buffer", "averaged_gradients", "_pre_step", "_partition_all_parameters", "_post_step"),
}
REPLACED = ("step", "overflow", "_global_grad_norm", "clip_grad", "dp_process_group", "dtype",
            "gradient_accumulation_dtype")


@jit
def adamw(weights, sums, firsts, seconds, halves, steps, norm, n, rate, keep, beta1, beta2, epsilon, clip, limit,
          WIDE: tl.constexpr):
    """AdamW with decoupled decay (Loshchilov and Hutter, 2019) for n weights; clears sums, and leaves all else as it is
    where the gradient's norm is not below `limit`. keep: 1 - rate * decay; steps: those made before."""
    i = tl.program_id(0).to(tl.int64) * WIDE + tl.arange(0, WIDE)
    there, size = i < n, tl.load(norm)
    good = i < tl.where(size < limit, n, 0)
    t = tl.load(steps) + 1
    step_size = rate / (1 - tl.exp2(t * tl.log2(beta1)))
    root = tl.sqrt(1 - tl.exp2(t * tl.log2(beta2)))
    g = tl.load(sums + i, mask=there, other=0.0) * tl.minimum(1.0, clip / (size + 1e-6))
    first = tl.load(firsts + i, mask=there, other=0.0)
    first += (g - first) * (1 - beta1)
    second = tl.load(seconds + i, mask=there, other=0.0) * beta2 + g * g * (1 - beta2)
    weight = tl.load(weights + i, mask=there, other=0.0) * keep
    weight -= step_size * first / (tl.sqrt(second) / root + epsilon)
    tl.store(weights + i, weight, mask=good)
    tl.store(firsts + i, first, mask=good)
    tl.store(seconds + i, second, mask=good)
    tl.store(halves + i, weight.to(halves.dtype.element_ty), mask=good)
    tl.store(sums + i, tl.zeros([WIDE], tl.float32), mask=there)


def step_in_one_pass(engine):
    """Put this step into an engine where it fits: stage 2 or 3, bfloat16 with float32 sums, torch.optim.AdamW on a GPU.
    Returns whether it did. At stage 2 runtime/engine/zero2_gradients.py must be in it."""
    optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
    inner = optimizer.optimizer
    if stage not in (2, 3) or type(inner) is not torch.optim.AdamW or not triton:
        return False
    if optimizer.dtype != torch.bfloat16 or optimizer.gradient_accumulation_dtype != torch.float32:
        return False
    if getattr(optimizer, "offload_optimizer", False) or getattr(optimizer, "swap_optimizer", False):
        return False
    if not getattr(optimizer, "check_grad_overflow", True):  # the step is to be made whatever the gradient is
        return False
    if not has_all(optimizer, USED[stage] + REPLACED, "optimizer step"):
        return False
    begin, pieces, end = {2: stage_2, 3: stage_3}[stage](optimizer)

    def step(closure=None):
        begin()
        here = pieces()
        norm = sum(torch.linalg.vector_norm(sums).square() for _, sums, _, _ in here)
        if dist.get_world_size(optimizer.dp_process_group) > 1:
            dist.all_reduce(norm, group=optimizer.dp_process_group)
        norm = norm.sqrt()
        told = norm.to("cpu", non_blocking=True)
        on_host = torch.cuda.current_stream().record_event() if norm.is_cuda else None
        for piece in here:
            update(*piece, norm)
        end()
        if on_host:
            on_host.synchronize()
        optimizer.overflow = not told.item() < limit()
        optimizer.seen_norm = told.item()
        optimizer._global_grad_norm = told.item() if math.isfinite(told.item()) else math.inf

    def limit():
        return getattr(optimizer, "norm_limit", math.inf)

    def update(weights, sums, halves, options, norm):
        state = inner.state[weights]
        if not state:  # as torch.optim.AdamW begins
            state.update(step=torch.zeros((), device=sums.device), exp_avg=torch.zeros_like(sums),
                         exp_avg_sq=torch.zeros_like(sums))
        # one of the CPU's comes with a tag that was saved with offload
        state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=sums.device)
        rate, (beta1, beta2), n = float(options["lr"]), options["betas"], sums.numel()
        adamw[(triton.cdiv(n, 1024),)](
            weights.data, sums, state["exp_avg"], state["exp_avg_sq"], halves, state["step"], norm, n, rate,
            1 - rate * options["weight_decay"], beta1, beta2, options["eps"], optimizer.clip_grad or math.inf,
            limit(), WIDE=1024)
        state["step"] += norm < limit()

    optimizer.step = step
    return True


# What DeepSpeed does around the step: (begin, pieces, end). pieces() tells what this rank steps, as (float32 weights,
# sums of gradients, bfloat16 weights, options), each flat


def stage_2(optimizer):
    from deepspeed.runtime.utils import all_gather_dp_groups
    from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID

    rank, world_size = dist.get_rank(optimizer.dp_process_group), dist.get_world_size(optimizer.dp_process_group)

    def begin():
        optimizer.micro_step_id = INITIAL_MICRO_STEP_ID
        optimizer.sum_over_ranks()

    def pieces():
        return [(weights, optimizer._get_compact_grad_partition_buffer(i).flat_partition,
                 optimizer.parallel_partitioned_bit16_groups[i][rank], optimizer.optimizer.param_groups[i])
                for i, weights in enumerate(optimizer.single_partition_of_fp32_groups)]

    def end():
        optimizer._lazy_init_hp_params_optimizer_state()
        if world_size > 1:
            all_gather_dp_groups(groups_flat=optimizer.bit16_groups_flat,
                                 partitioned_param_groups=optimizer.parallel_partitioned_bit16_groups,
                                 dp_process_group=optimizer.real_dp_process_group,
                                 start_alignment_factor=optimizer.nccl_start_alignment_factor,
                                 allgather_bucket_size=optimizer.allgather_bucket_size)

    return begin, pieces, end


def stage_3(optimizer):
    def begin():
        optimizer._pre_step()
        optimizer._partition_all_parameters()

    def pieces():
        halves = optimizer.fp16_partitioned_groups_flat
        sums = optimizer.grad_partitions_flat_buffer.split([half.numel() for half in halves])
        return [(weights, sums[i], halves[i], optimizer.optimizer.param_groups[optimizer.sub_group_to_group_id[i]])
                for i, weights in enumerate(optimizer.fp32_partitioned_groups_flat)]

    def end():
        for i in range(len(optimizer.fp16_groups)):
            optimizer.averaged_gradients[i] = None
        optimizer._post_step(set())

    return begin, pieces, end
