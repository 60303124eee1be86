"""Clipping, AdamW and the half-precision copy of the weights in one pass, at ZeRO-2 and 3.

DeepSpeed makes one pass for each and synchronizes three times in between to check whether a number is finite. Here one
kernel does all three and clears the gradients for the next step. The CPU reads the norm while the kernel runs. The
results and the state in checkpoints are the same. Where Triton doesn't run, PyTorch's AdamW takes the kernel's place.
With offload, it is the CPU's (offload.py)."""

import math
from collections import namedtuple

import torch
import torch.distributed as dist
from deepspeed.runtime.utils import all_gather_into_tensor_dp_groups

from runtime.engine import override
from runtime.engine.any_optimizer import is_adamw, step_by_itself
from runtime.engine.muon import Muon, is_muon, moments_of
from runtime.engine.offload import step_by_pytorch, step_on_host
from runtime.engine.zero2_gradients import global_norm
from runtime.kernels import jit, tl, triton


@jit
def adamw(master, grads, exp_avg, exp_avg_sq, half, step, grad_norm, n, lr, decay, beta1, beta2, eps, inverse_scale,
          max_norm, skip_above, BLOCK: tl.constexpr):
    """Step n elements by AdamW (Loshchilov and Hutter, 2019) and clear their grads. If grad_norm is not below
    skip_above, only clear grads. decay: 1 - lr * weight_decay. step: number of steps before this one. inverse_scale:
    of the loss scale, which grads have in them, and grad_norm hasn't."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask, norm = i < n, tl.load(grad_norm)
    commit = i < tl.where(norm < skip_above, n, 0)
    t = tl.load(step) + 1
    step_size = lr / (1 - tl.exp2(t * tl.log2(beta1)))
    bias_correction2_sqrt = tl.sqrt(1 - tl.exp2(t * tl.log2(beta2)))
    g = tl.load(grads + i, mask=mask, other=0.0) * (inverse_scale * tl.minimum(1.0, max_norm / (norm + 1e-6)))
    m = tl.load(exp_avg + i, mask=mask, other=0.0)
    m += (g - m) * (1 - beta1)
    v = tl.load(exp_avg_sq + i, mask=mask, other=0.0) * beta2 + g * g * (1 - beta2)
    weight = tl.load(master + i, mask=mask, other=0.0) * decay
    weight -= step_size * m / (tl.sqrt(v) / bias_correction2_sqrt + eps)
    tl.store(master + i, weight, mask=commit)
    tl.store(exp_avg + i, m, mask=commit)
    tl.store(exp_avg_sq + i, v, mask=commit)
    tl.store(half + i, weight.to(half.dtype.element_ty), mask=commit)
    tl.store(grads + i, tl.zeros([BLOCK], tl.float32), mask=mask)


# This rank's part of a parameter group, as flat tensors: fp32 weights, fp32 gradients averaged over ranks, and the
# weights that forward and backward use. group: lr, betas, eps, weight_decay. places: (parameter, offset) of the group
Partition = namedtuple("Partition", ("master", "grads", "half", "group", "places"), defaults=[None])


class FusedStep:
    """Replaces the step of DeepSpeed's optimizer. Subclasses do what DeepSpeed does after it.

    gradients: a Zero2Gradients or Zero3Blocks. use_kernel: use the kernel, else PyTorch's AdamW. offloads: the state is
    in host memory. skip_above: skip a step whose gradient norm is not below it. with_shares: also compute
    gradients.shares(). grad_norm and shares: of the last step, before clipping, on the CPU."""

    def __init__(self, optimizer, gradients, use_kernel, offloads):
        self.optimizer, self.gradients, self.skip_above, self.with_shares = optimizer, gradients, math.inf, False
        self.grad_norm = self.shares = None
        self.use_kernel, self.offloads, self.muon = use_kernel, offloads, None  # muon is created at the first step
        if offloads:  # buffers of DeepSpeed's own step, for GPT-2 XL 3.1 GB of host memory and 161 MB on the GPU
            override(optimizer, param_buffer_of_bit16_for_cpu_offload_groups=[], temp_grad_buffer_for_gpu_offload=None)
        self.has_own_step = not is_adamw(optimizer.optimizer)
        override(optimizer, step=self.step)

    def step(self, closure=None):
        optimizer = self.optimizer
        self.gradients.reduce_at_step()
        partitions = self.partitions()
        norm = global_norm([p.grads for p in partitions], optimizer.dp_process_group) / optimizer.loss_scale
        grad_norm_cpu = norm.to("cpu", non_blocking=True)
        self.shares = self.gradients.shares().to("cpu", non_blocking=True) if self.with_shares else None
        copied = torch.cuda.current_stream().record_event() if norm.is_cuda else None
        if self.has_own_step:
            self.step_by_itself(partitions, norm)
        else:
            for p in partitions:
                self.update(p, norm, 1 / optimizer.loss_scale)
        self.after_step()
        if copied:
            copied.synchronize()
        self.grad_norm = grad_norm_cpu.item()
        optimizer.overflow = not self.grad_norm < self.skip_above
        optimizer._update_scale(optimizer.overflow)
        optimizer._global_grad_norm = self.grad_norm if math.isfinite(self.grad_norm) else math.inf

    def step_by_itself(self, partitions, norm):
        """Step all Partitions by the optimizer's own step(), if the norm is below skip_above. Clear the gradients."""
        if norm < self.skip_above:  # the CPU waits here
            max_norm = self.optimizer.clip_grad or math.inf
            scale = (max_norm / (norm + 1e-6)).clamp(max=1) / self.optimizer.loss_scale
            step_by_itself(self.optimizer.optimizer, partitions, scale)
        for p in partitions:
            p.grads.zero_()

    def update(self, p, norm, inverse_scale):
        """Step a Partition. norm: a scalar on the device. inverse_scale: as for the kernel."""
        state, max_norm = self.optimizer.optimizer.state[p.master], self.optimizer.clip_grad or math.inf
        if not state:  # as torch.optim.AdamW begins
            state.update({"step": 0, **{moment: torch.zeros_like(p.master.data) for moment in moments_of(p.group)}})
        # DeepSpeed's CPU Adam begins with a number
        state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=p.master.device)
        if is_muon(p.group):
            if self.muon is None:
                group = self.optimizer.dp_process_group
                self.muon = Muon(p.places, p.group["parts"], p.grads.numel(), group, self.use_kernel)
            self.muon.step(p, state["exp_avg"], norm, inverse_scale, max_norm, self.skip_above)
        elif self.use_kernel and not self.offloads:
            n, lr, (beta1, beta2) = p.grads.numel(), float(p.group["lr"]), p.group["betas"]
            adamw[(triton.cdiv(n, 1024),)](
                p.master.data, p.grads, state["exp_avg"], state["exp_avg_sq"], p.half, state["step"], norm, n, lr,
                1 - lr * p.group["weight_decay"], beta1, beta2, p.group["eps"], inverse_scale, max_norm,
                self.skip_above, BLOCK=1024)
        else:
            if norm < self.skip_above:
                p.grads.mul_((max_norm / (norm + 1e-6)).clamp(max=1) * inverse_scale)
                (step_on_host if self.offloads else step_by_pytorch)(p, state, self.optimizer.optimizer)
            p.grads.zero_()
        state["step"] += (norm < self.skip_above).to(state["step"].device)


class Zero2Step(FusedStep):
    """ZeRO-2's step. The gradients come from a Zero2Gradients."""

    def partitions(self):
        optimizer, rank = self.optimizer, dist.get_rank(self.optimizer.dp_process_group)
        return [Partition(master, self.gradients.partitions[i].flat_partition,
                          optimizer.parallel_partitioned_bit16_groups[i][rank], optimizer.optimizer.param_groups[i],
                          self.gradients.places[i])
                for i, master in enumerate(optimizer.single_partition_of_fp32_groups)]

    def after_step(self):
        optimizer = self.optimizer
        optimizer._lazy_init_hp_params_optimizer_state()
        all_gather_into_tensor_dp_groups(optimizer.bit16_groups_flat, optimizer.parallel_partitioned_bit16_groups,
                                         optimizer.real_dp_process_group)  # on one rank, does nothing


class Zero3Step(FusedStep):
    """ZeRO-3's step. Each sub-group of a parameter group is a Partition."""

    def partitions(self):
        optimizer, half = self.optimizer, self.optimizer.fp16_partitioned_groups_flat
        grads, groups = optimizer.grad_partitions_flat_buffer, optimizer.optimizer.param_groups
        grads = grads.split([flat.numel() for flat in half])
        return [Partition(master, grads[i], half[i], groups[optimizer.sub_group_to_group_id[i]])
                for i, master in enumerate(optimizer.fp32_partitioned_groups_flat)]

    def after_step(self):
        self.optimizer.averaged_gradients = {}
