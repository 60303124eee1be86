"""ZeRO-2's gradients: from backward to this rank's fp32 partition.

DeepSpeed 0.19.8 divides, concatenates, casts and accumulates each gradient in separate passes. Then it checks for
overflow and computes the norm per parameter. Here one of two classes takes the gradients, with the same results. The
overflow check and the norm read the flat partitions. docs/engineering_notes.md has the times.

  LocalAccumulation  Each parameter has a main_grad, an fp32 tensor of its shape, as in Megatron-LM. The matmuls in
                     kernels/block.py accumulate into it, so most gradients are never stored separately. On one rank it
                     is a view of the partition. On several it is a view of a full buffer, which is reduce-scattered
                     once per step.
  BucketedAllReduce  There is no main_grad. Gradients are copied into a bucket. A full bucket is all-reduced on a side
                     stream while backward continues. This rank's part is cast, divided and accumulated in one pass."""

import torch
import torch.distributed as dist

from runtime.engine import override


class Zero2Gradients:
    """Accumulates the gradients of DeepSpeed's stage 2 optimizer into partitions with fixed addresses."""

    def __init__(self, optimizer):
        self.optimizer, self.group = optimizer, optimizer.dp_process_group
        self.world_size = dist.get_world_size(self.group)
        self.partitions = [optimizer._build_compact_grad_partition_buffer(i)
                           for i in range(len(optimizer.bit16_groups_flat))]
        optimizer.averaged_gradients.update(enumerate(self.partitions))
        # of each group: (parameter, offset) of each parameter in the flat tensor of all ranks' partitions
        self.places = [list(zip(*group)) for group in zip(optimizer.round_robin_bit16_groups,
                                                          optimizer.round_robin_bit16_offsets)]
        self.owned = {}  # param: (start, view), where this rank's partition holds its elements from start on
        for param, _ in sum(self.places, []):
            if own := param._hp_mapping:
                flat, at = self.partitions[own.param_group_index].flat_partition, own.hp_fragment_address
                self.owned[param] = own.lp_fragment_address.start, flat.narrow(0, at.start, at.numel)
        self.overlaps = optimizer.overlap_comm
        override(optimizer, _use_compact_grad_partition_buffer=lambda group: True,  # DeepSpeed's is False for float32
                 process_gradients=self.on_grad_ready, reduce_ipg_grads=self.finish_backward,
                 overlap_comm=False)  # it would synchronize after each backward; finish_backward waits on the GPU

    def on_grad_ready(self, param, group):
        """Take a parameter's gradient. DeepSpeed calls this when backward has computed it."""
        grad, param.grad = param.grad, None
        if grad is not None:  # otherwise a matmul has accumulated it into main_grad
            self.accumulate(param, grad)

    def accumulate(self, param, grad):
        param.main_grad.add_(grad)

    def finish_backward(self, comm_dtype=None):
        """Finish the reductions of this backward. DeepSpeed calls this after each backward."""

    def reduce_at_step(self):
        """Leave the averaged gradients in the partitions. Called before each optimizer step."""

    def shares(self):
        """Return each parameter's share of the squared norm of the averaged gradients, in the order of self.places, on
        the device. All ranks call this, after reduce_at_step()."""
        zero = self.partitions[0].flat_partition.new_zeros(1)
        zero, *norms = torch._foreach_norm([zero, *(view for _, view in self.owned.values())])
        norms = dict(zip(self.owned, norms))
        squared = torch.stack([norms.get(param, zero) for places in self.places for param, _ in places]).square()
        if self.world_size > 1:
            dist.all_reduce(squared, group=self.group)
        return squared / squared.sum()


def global_norm(flats, group):
    """Return the norm of all ranks' flat tensors, a scalar on their device. All ranks call this."""
    if flats[0].is_cpu:  # where the float32 norm of 124 million gradients at once is 1.3% too small
        flats = [piece for flat in flats for piece in flat.split(2**16)]
    squared = torch.stack([torch.linalg.vector_norm(flat) for flat in flats]).square().sum()
    if dist.get_world_size(group) > 1:
        dist.all_reduce(squared, group=group)
    return squared.sqrt()


class LocalAccumulation(Zero2Gradients):
    def __init__(self, optimizer):
        super().__init__(optimizer)
        self.main_grads = ([partition.flat_partition for partition in self.partitions] if self.world_size == 1 else
                           [torch.zeros_like(flat, dtype=torch.float32) for flat in optimizer.bit16_groups_flat])
        for main_grads, places in zip(self.main_grads, self.places):
            for param, offset in places:
                param.main_grad = main_grads.narrow(0, offset, param.numel()).view(param.shape)

    def reduce_at_step(self):
        if self.world_size == 1:
            return
        for partition, main_grads in zip(self.partitions, self.main_grads):
            dist.reduce_scatter_tensor(partition.flat_partition, main_grads, group=self.group)
            partition.flat_partition.div_(self.world_size)
            main_grads.zero_()


class BucketedAllReduce(Zero2Gradients):
    def __init__(self, optimizer):
        super().__init__(optimizer)
        flats = optimizer.bit16_groups_flat
        self.size = min(int(optimizer.reduce_bucket_size), sum(flat.numel() for flat in flats))
        self.stream = torch.cuda.Stream() if flats[0].is_cuda and self.overlaps else None
        self.buckets = [flats[0].new_empty(self.size) for _ in range(2 if self.stream else 1)]
        self.reduced = [None for _ in self.buckets]  # events on the side stream
        self.entries, self.filled = [], 0  # of the first bucket: (param, offset), elements

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
        """Reduce the first bucket on the side stream while backward continues, and switch to the other bucket."""
        if not self.entries:
            return
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):  # does nothing if it is None
            self.reduce(self.buckets[0].narrow(0, 0, self.filled), self.entries)
            self.reduced[0] = self.stream and self.stream.record_event()
        self.entries, self.filled = [], 0
        self.buckets.reverse()
        self.reduced.reverse()

    def reduce(self, flat, entries):
        """All-reduce `flat` and accumulate the part of its entries that this rank owns."""
        dist.all_reduce(flat, group=self.group)
        for param, offset in entries:
            if param in self.owned:
                start, view = self.owned[param]
                view.add_(flat.narrow(0, offset + start, view.numel()), alpha=1 / self.world_size)

    def wait_for_buckets(self, n=2):
        """Make the current stream wait until the first n buckets are reduced. It waits for each event once, because a
        capture can't wait for an event from before it."""
        for i, event in enumerate(self.reduced[:n]):
            if event is not None:
                torch.cuda.current_stream().wait_event(event)
                self.reduced[i] = None

    def finish_backward(self, comm_dtype=None):
        self.launch_bucket()
        self.wait_for_buckets()
