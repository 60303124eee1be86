"""Clipping, AdamW and the bfloat16 copy of the weights in one pass, at ZeRO-2 and 3.

DeepSpeed makes one pass for each and synchronizes three times in between to check whether a number is finite. Here one
kernel does all three and clears the gradients for the next step. The CPU reads the norm while the kernel runs. The
results and the state in checkpoints are the same.
"""

import math
from collections import namedtuple

import torch
import torch.distributed as dist
from deepspeed.runtime.utils import all_gather_dp_groups
from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID

from runtime.engine import override
from runtime.engine.zero2_gradients import global_norm
from runtime.kernels import jit, tl, triton


@jit
def adamw(master, grads, exp_avg, exp_avg_sq, bf16, step, grad_norm, n, lr, decay, beta1, beta2, eps, max_norm,
          skip_above, BLOCK: tl.constexpr):
    """Step n elements by AdamW (Loshchilov and Hutter, 2019) and clear their grads. If grad_norm is not below
    skip_above, only clear grads. decay: 1 - lr * weight_decay. step: number of steps before this one."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask, norm = i < n, tl.load(grad_norm)
    commit = i < tl.where(norm < skip_above, n, 0)
    t = tl.load(step) + 1
    step_size = lr / (1 - tl.exp2(t * tl.log2(beta1)))
    bias_correction2_sqrt = tl.sqrt(1 - tl.exp2(t * tl.log2(beta2)))
    g = tl.load(grads + i, mask=mask, other=0.0) * tl.minimum(1.0, max_norm / (norm + 1e-6))
    m = tl.load(exp_avg + i, mask=mask, other=0.0)
    m += (g - m) * (1 - beta1)
    v = tl.load(exp_avg_sq + i, mask=mask, other=0.0) * beta2 + g * g * (1 - beta2)
    weight = tl.load(master + i, mask=mask, other=0.0) * decay
    weight -= step_size * m / (tl.sqrt(v) / bias_correction2_sqrt + eps)
    tl.store(master + i, weight, mask=commit)
    tl.store(exp_avg + i, m, mask=commit)
    tl.store(exp_avg_sq + i, v, mask=commit)
    tl.store(bf16 + i, weight.to(bf16.dtype.element_ty), mask=commit)
    tl.store(grads + i, tl.zeros([BLOCK], tl.float32), mask=mask)


# This rank's part of a parameter group, as flat tensors: fp32 weights, fp32 gradients averaged over ranks, and the
# weights that forward and backward use. group: lr, betas, eps, weight_decay
Partition = namedtuple("Partition", ("master", "grads", "bf16", "group"))


class FusedStep:
    """Replaces the step of DeepSpeed's optimizer. Subclasses do what DeepSpeed does before and after it.

    gradients: a Zero2Gradients or Zero3Blocks. skip_above: skip a step whose gradient norm is not below it. grad_norm:
    of the last step, before clipping."""

    def __init__(self, optimizer, gradients):
        self.optimizer, self.gradients, self.skip_above, self.grad_norm = optimizer, gradients, math.inf, None

    def step(self, closure=None):
        optimizer = self.optimizer
        self.before_step()
        self.gradients.reduce_at_step()
        partitions = self.partitions()
        norm = global_norm([p.grads for p in partitions], optimizer.dp_process_group)
        grad_norm_cpu = norm.to("cpu", non_blocking=True)
        copied = torch.cuda.current_stream().record_event() if norm.is_cuda else None
        for p in partitions:
            self.update(p, norm)
        self.after_step()
        if copied:
            copied.synchronize()
        self.grad_norm = grad_norm_cpu.item()
        optimizer.overflow = not self.grad_norm < self.skip_above
        optimizer._global_grad_norm = self.grad_norm if math.isfinite(self.grad_norm) else math.inf

    def update(self, p, norm):
        """Launch the kernel for a Partition. norm: a scalar on the device."""
        state, group, n = self.optimizer.optimizer.state[p.master], p.group, p.grads.numel()
        if not state:  # as torch.optim.AdamW begins
            state.update(step=torch.zeros((), device=p.grads.device), exp_avg=torch.zeros_like(p.grads),
                         exp_avg_sq=torch.zeros_like(p.grads))
        # checkpoints saved with offload have it on the CPU
        state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=p.grads.device)
        lr, (beta1, beta2), max_norm = float(group["lr"]), group["betas"], self.optimizer.clip_grad or math.inf
        adamw[(triton.cdiv(n, 1024),)](
            p.master.data, p.grads, state["exp_avg"], state["exp_avg_sq"], p.bf16, state["step"], norm, n, lr,
            1 - lr * group["weight_decay"], beta1, beta2, group["eps"], max_norm, self.skip_above, BLOCK=1024)
        state["step"] += norm < self.skip_above


class Zero2Step(FusedStep):
    """ZeRO-2's step. The gradients come from a Zero2Gradients."""

    def before_step(self):
        self.optimizer.micro_step_id = INITIAL_MICRO_STEP_ID

    def partitions(self):
        optimizer, rank = self.optimizer, dist.get_rank(self.optimizer.dp_process_group)
        return [Partition(master, self.gradients.partitions[i].flat_partition,
                          optimizer.parallel_partitioned_bit16_groups[i][rank], optimizer.optimizer.param_groups[i])
                for i, master in enumerate(optimizer.single_partition_of_fp32_groups)]

    def after_step(self):
        optimizer = self.optimizer
        optimizer._lazy_init_hp_params_optimizer_state()
        if dist.get_world_size(optimizer.dp_process_group) > 1:
            all_gather_dp_groups(groups_flat=optimizer.bit16_groups_flat,
                                 partitioned_param_groups=optimizer.parallel_partitioned_bit16_groups,
                                 dp_process_group=optimizer.real_dp_process_group,
                                 start_alignment_factor=optimizer.nccl_start_alignment_factor,
                                 allgather_bucket_size=optimizer.allgather_bucket_size)


class Zero3Step(FusedStep):
    """ZeRO-3's step. Each sub-group of a parameter group is a Partition."""

    def before_step(self):
        self.optimizer._pre_step()

    def partitions(self):
        optimizer, bf16 = self.optimizer, self.optimizer.fp16_partitioned_groups_flat
        grads, groups = optimizer.grad_partitions_flat_buffer, optimizer.optimizer.param_groups
        grads = grads.split([flat.numel() for flat in bf16])
        return [Partition(master, grads[i], bf16[i], groups[optimizer.sub_group_to_group_id[i]])
                for i, master in enumerate(optimizer.fp32_partitioned_groups_flat)]

    def after_step(self):
        self.optimizer.averaged_gradients = {}


def replace_step(deepspeed, gradients):
    """Replace the step of DeepSpeed's optimizer. Returns the FusedStep, or None if unsupported. Supported: bfloat16
    with fp32 gradients, and torch.optim.AdamW. gradients: a Zero2Gradients or Zero3Blocks."""
    optimizer, kind = deepspeed.optimizer, Zero3Step if deepspeed.zero_optimization_stage() == 3 else Zero2Step
    if not (triton and type(optimizer.optimizer) is torch.optim.AdamW
            and (optimizer.dtype, optimizer.gradient_accumulation_dtype) == (torch.bfloat16, torch.float32)
            and getattr(optimizer, "check_grad_overflow", True)):  # if False, DeepSpeed never skips a step
        return None
    fused_step = kind(optimizer, gradients)
    override(optimizer, step=fused_step.step)
    return fused_step
