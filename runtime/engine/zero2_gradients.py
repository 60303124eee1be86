"""ZeRO-2's gradients, from backward into this rank's fp32 partition.

DeepSpeed 0.19.8 divides, concatenates, casts and accumulates each gradient in passes of their own, then checks for
overflow and computes the norm parameter by parameter. Here one of two classes takes the gradients, and overflow check
and norm read the flat partitions:

  LocalAccumulation  param.main_grad, an fp32 tensor of the parameter's shape as in Megatron-LM. The matmuls of
                     kernels/block.py accumulate into it, so most gradients are never stored by themselves. It is a view
                     of the partition on one rank, else of a full buffer on every rank: one reduce-scatter per step.
  BucketedAllReduce  no main_grad. Gradients are copied into a bucket; a full one is all-reduced on a side stream while
                     backward continues, and this rank's part is cast, divided and accumulated in one pass.

What is computed stays the same. GPT-2 XL at 8 x 4 on one H200: 798 ms per step became 717 (RESULTS.md).
"""

import math
from contextlib import nullcontext

import torch
from deepspeed import comm as dist  # so that its log of messages has ours

from runtime.cluster.ranks import all_reduce_sum
from runtime.engine.ds_config import supports_fast_gradients


class Zero2Gradients:
    """Gradients of DeepSpeed's stage 2 optimizer, accumulated into partitions that stay where they are."""

    def __init__(self, optimizer, fast):
        self.optimizer, self.fast, self.group = optimizer, fast, optimizer.dp_process_group
        self.world_size, self.norm = dist.get_world_size(self.group), None
        self.partitions = [optimizer._build_compact_grad_partition_buffer(i)
                           for i in range(len(optimizer.bit16_groups_flat))]
        optimizer.averaged_gradients.update(enumerate(self.partitions))
        # The place of each parameter, (parameter group, parameter, offset): all ranks' partitions are one flat tensor
        self.places = [(i, *place) for i, params in enumerate(optimizer.round_robin_bit16_groups)
                       for place in zip(params, optimizer.round_robin_bit16_offsets[i])]

    def on_grad_ready(self, param, group):
        """DeepSpeed's hook: backward is done with a parameter."""
        if not self.optimizer.ready_for_gradients:
            self.optimizer.micro_step_id += 1
            self.optimizer.ready_for_gradients = True
        grad, param.grad = param.grad, None
        if grad is not None:  # else a matmul has accumulated it into main_grad
            self.accumulate(param, grad)

    def accumulate(self, param, grad):
        param.main_grad.add_(grad)

    def finish_backward(self, comm_dtype=None):
        """Called after each backward."""

    def before_step(self):
        """Called before each step, which finds the averaged gradients in the partitions."""

    def global_norm(self):
        """The norm of the averaged gradients times the loss scale, a scalar on the device. All ranks."""
        self.before_step()
        squared = torch.stack([torch.linalg.vector_norm(p.flat_partition) for p in self.partitions]).square().sum()
        dist.all_reduce(squared, group=self.group)
        norm = squared.sqrt()
        self.fast.grad_norm = norm.item() / self.optimizer.loss_scale
        return norm

    def has_overflow(self, partition_gradients=True):
        """Whether DeepSpeed has to skip the step: the norm is not finite, or not below fast.skip_above."""
        self.norm = self.global_norm()
        return not self.fast.grad_norm < self.fast.skip_above

    def scaled_global_norm(self, norm_type=2):
        """The norm by which DeepSpeed clips; infinite to have it skip the step. In float32 it asks for nothing else."""
        norm, self.norm = self.global_norm() if self.norm is None else self.norm, None
        return norm if self.fast.grad_norm < self.fast.skip_above else norm * math.inf

    def zero_grad(self, set_to_none=True):
        """After a step. DeepSpeed's own has dropped the partitions: clear and restore them. FusedStep clears them."""
        type(self.optimizer).zero_grad(self.optimizer, set_to_none)
        for i, partition in enumerate(self.partitions):
            if self.optimizer.averaged_gradients[i] is None:
                partition.flat_partition.zero_()
                self.optimizer.averaged_gradients[i] = partition


class LocalAccumulation(Zero2Gradients):
    def __init__(self, optimizer, fast):
        super().__init__(optimizer, fast)
        self.main_grads = ([partition.flat_partition for partition in self.partitions] if self.world_size == 1 else
                           [torch.zeros_like(flat, dtype=torch.float32) for flat in optimizer.bit16_groups_flat])
        for i, param, offset in self.places:
            param.main_grad = self.main_grads[i].narrow(0, offset, param.numel()).view(param.shape)

    def before_step(self):
        if self.world_size == 1:
            return
        for partition, main_grads in zip(self.partitions, self.main_grads):
            dist.reduce_scatter_tensor(partition.flat_partition, main_grads, group=self.group)
            partition.flat_partition.div_(self.world_size)
            main_grads.zero_()


class BucketedAllReduce(Zero2Gradients):
    def __init__(self, optimizer, fast):
        super().__init__(optimizer, fast)
        flats = optimizer.bit16_groups_flat
        self.size = min(int(optimizer.reduce_bucket_size), sum(flat.numel() for flat in flats))
        self.stream = torch.cuda.Stream() if flats[0].is_cuda and optimizer.overlap_comm else None
        self.buckets = [flats[0].new_empty(self.size) for _ in range(2 if self.stream else 1)]
        self.reduced = [None for _ in self.buckets]  # events on the side stream
        self.entries, self.filled = [], 0  # of the first bucket: (param, offset), elements
        self.owned = {}  # param: (start, view), where this rank's partition holds its elements from start on
        for i, param, offset in self.places:
            partition = self.partitions[i].flat_partition
            offset -= dist.get_rank(self.group) * partition.numel()
            start, end = max(0, -offset), min(param.numel(), partition.numel() - offset)
            if start < end:
                self.owned[param] = start, partition[offset + start : offset + end]

    def accumulate(self, param, grad):
        grad, n = grad.view(-1), param.numel()
        if self.filled + n > self.size:
            self.launch_bucket()
        if n > self.size:  # a bucket of its own
            self.wait_for_buckets()  # one communicator, one order
            self.reduce(grad.contiguous(), [(param, 0)])
            return
        self.wait_for_buckets(1)
        self.buckets[0].narrow(0, self.filled, n).copy_(grad)
        self.entries.append((param, self.filled))
        self.filled += n

    def launch_bucket(self):
        """Reduce the first bucket, on the side stream while backward continues, and switch to the other one."""
        if not self.entries:
            return
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream) if self.stream else nullcontext():
            self.reduce(self.buckets[0].narrow(0, 0, self.filled), self.entries)
            self.reduced[0] = self.stream and self.stream.record_event()
        self.entries, self.filled = [], 0
        self.buckets.reverse()
        self.reduced.reverse()

    def reduce(self, flat, entries):
        """All-reduce flat, and accumulate what this rank owns of its entries."""
        dist.all_reduce(flat, group=self.group)
        for param, offset in entries:
            if param in self.owned:
                start, view = self.owned[param]
                view.add_(flat.narrow(0, offset + start, view.numel()), alpha=1 / self.world_size)

    def wait_for_buckets(self, n=2):
        """Have the current stream wait until the first n are reduced. Each event is waited for once: during a capture,
        one from before it cannot be."""
        for i, event in enumerate(self.reduced[:n]):
            if event is not None:
                torch.cuda.current_stream().wait_event(event)
                self.reduced[i] = None

    def finish_backward(self, comm_dtype=None):
        self.launch_bucket()
        self.wait_for_buckets()


def install(engine, fast, accumulate_locally=False):
    """Replace DeepSpeed's gradient path by one of these; returns it, or None where supports_fast_gradients says no.
    accumulate_locally: whether this rank has room for LocalAccumulation, which is taken if all ranks have. fast: the
    FastPath, for skip_above and grad_norm. All ranks."""
    optimizer, (model_dtype, _) = engine.optimizer, engine.get_data_types()
    if not supports_fast_gradients(engine.config, str(model_dtype).removeprefix("torch.")):
        return None
    world_size = dist.get_world_size(optimizer.dp_process_group)
    local = world_size == 1 or all_reduce_sum(accumulate_locally, device=optimizer.device)[0] == world_size
    gradients = (LocalAccumulation if local else BucketedAllReduce)(optimizer, fast)
    optimizer._use_compact_grad_partition_buffer = lambda group: True  # DeepSpeed's: not where weights are fp32
    optimizer.process_gradients, optimizer.reduce_ipg_grads = gradients.on_grad_ready, gradients.finish_backward
    optimizer.has_overflow, optimizer.scaled_global_norm = gradients.has_overflow, gradients.scaled_global_norm
    optimizer.zero_grad = gradients.zero_grad
    optimizer.overlap_comm = False  # else it synchronizes after each backward; finish_backward waits on the GPU
    return gradients
