"""ZeRO-3's forward and backward with one all_gather and one reduce_scatter per block.

DeepSpeed 0.19.8 gathers, reduces and releases each parameter on its own. GPT-2 XL has 580, and the GPU waits for the
CPU. Here, DeepSpeed's hooks are removed, and parameters are of two kinds:

  matrices of blocks  One all_gather brings a block's matrices into a buffer while the block before it computes, in
                      forward and again in backward. There are buffers for stage3_max_live_parameters: GPT-2 XL gathers
                      16 of its 48 blocks each time, and begins the next forward with the 32 that backward used last.
                      Gradients go to one of two buffers. One reduce_scatter takes a block's while the next block's
                      backward computes. With accumulate_locally, each rank sums them in float32, and they are reduced
                      once per step.
  all others          Embeddings, layer norms and biases are gathered once per step. Each rank sums their gradients in
                      float32, and they are reduced once per step.

DeepSpeed keeps the sharded weights and gradients, the optimizer, its step, and checkpoints. All buffers have fixed
addresses, so micro-steps can be captured in a CUDA graph. On one rank, parameters are views of DeepSpeed's shards."""

import itertools
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch.distributed.distributed_c10d import _coalescing_manager

from runtime.engine import override


def in_shape_of(param, flat):
    """Return the elements of a flat tensor in the parameter's full shape, without ZeRO's padding."""
    return flat[: param.ds_numel].view(param.ds_shape)


def set_data(views):
    """Make parameters whole. views: (parameter, its full tensor) of each."""
    for param, full in views:
        param.data, param.ds_status = full, ZeroParamStatus.AVAILABLE


class Zero3Blocks:
    """Gathers a model's parameters and reduces its gradients, for DeepSpeed's stage 3 optimizer."""

    def __init__(self, deepspeed, accumulate_locally):
        self.optimizer, model = deepspeed.optimizer, deepspeed.module
        self.overlaps, self.max_live_parameters = deepspeed.zero_overlap_comm(), deepspeed.zero_max_live_parameters()
        self.group = self.optimizer.dp_process_group
        self.world_size = dist.get_world_size(self.group)
        trained = [param for group in self.optimizer.fp16_groups for param in group]
        shards = self.optimizer.grad_partitions_flat_buffer.split([p.ds_tensor.numel() for p in trained])
        self.grads = dict(zip(trained, shards, strict=True))  # of this rank, averaged
        self.remove_deepspeeds_hooks()
        model.register_forward_pre_hook(self.begin_forward)
        blocks = model.transformer.h if self.world_size > 1 else []
        self.blocks = [[p for p in block.parameters() if len(p.ds_shape) > 1] for block in blocks]
        self.make_buffers(model, accumulate_locally)
        for i, block in enumerate(blocks):
            block.register_forward_pre_hook(partial(self.before_forward, i))
            block.register_forward_hook(partial(self.after_forward, i))
        for param in trained:
            param.register_post_accumulate_grad_hook(self.on_grad_ready)

    def remove_deepspeeds_hooks(self):
        optimizer = self.optimizer
        optimizer.parameter_offload.destroy()  # they gather and release
        for hook in [*optimizer._grad_acc_hooks, *optimizer._leaf_module_hooks]:  # they reduce
            hook.remove()
        for bucket in optimizer.ipg_buckets.values():
            bucket.buffer = None
        override(optimizer, independent_gradient_partition_epilogue=self.finish_backward)

    def make_buffers(self, model, accumulate_locally):
        """Allocate the full parameters and their gradients, and set every main_grad."""
        W, in_blocks = self.world_size, {id(param) for block in self.blocks for param in block}
        others = [param for param in model.parameters() if id(param) not in in_blocks]
        self.stream = torch.cuda.Stream() if self.overlaps and others[0].is_cuda else None

        def full_size(p, dtype=None):
            return p.ds_tensor.new_zeros(W * p.ds_tensor.numel(), dtype=dtype)

        self.full = {p: p.ds_tensor if W == 1 else full_size(p) for p in others}
        self.views = [(p, in_shape_of(p, full)) for p, full in self.full.items()]
        size = sum(p.ds_numel for block in self.blocks[:1] for p in block)
        live = self.max_live_parameters // max(1, size)
        self.buffers = [[full_size(p) for p in block] for block in self.blocks[:max(2, live)]]
        self.block_views = [[(p, in_shape_of(p, full)) for p, full in zip(block, buffer, strict=True)]
                            for block, buffer in zip(self.blocks, itertools.cycle(self.buffers))]

        self.sums = {p: self.grads[p] if W == 1 else full_size(p, torch.float32)
                     for p in self.grads if accumulate_locally or id(p) not in in_blocks}
        for param, total in self.sums.items():
            param.main_grad = in_shape_of(param, total)
        self.reduced = [[p for p in block if p in self.grads and p not in self.sums] for block in self.blocks]
        self.grad_buffers = [[full_size(p) for p in params] for params in self.reduced[:1] * 2]
        sizes = [p.ds_tensor.numel() for params in self.reduced[:1] for p in params]
        self.own_parts = others[0].ds_tensor.new_empty(sum(sizes)).split(sizes)  # this rank's of a block's gradients
        for i, params in enumerate(self.reduced):
            for param, buffer in zip(params, self.grad_buffers[i % 2], strict=True):
                param.main_grad, param.overwrite_main_grad = in_shape_of(param, buffer), True

    # Collectives

    @contextmanager
    def on_stream(self):
        """Launch on the side stream, after all that has been launched so far."""
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):  # does nothing if it is None
            yield

    def collective(self, function, outputs, inputs):
        """Call all_gather_into_tensor or reduce_scatter_tensor for each pair of tensors, in one NCCL kernel."""
        with _coalescing_manager(self.group):
            for output, tensor in zip(outputs, inputs, strict=True):
                function(output, tensor, group=self.group)

    def gather(self, i):
        """Gather block i into its buffer, if there is a block i and the buffer does not hold it yet."""
        slot = i % max(1, len(self.buffers))
        if i in range(len(self.blocks)) and self.held[slot] != i:
            with self.on_stream():
                self.collective(dist.all_gather_into_tensor, self.buffers[slot], [p.ds_tensor for p in self.blocks[i]])
                self.gathered[slot] = self.stream and self.stream.record_event()
            self.held[slot] = i

    def reduce(self, i):
        """Reduce block i's gradients, and add this rank's part to its shards."""
        if not self.reduced[i]:
            return
        with self.on_stream():
            self.collective(dist.reduce_scatter_tensor, self.own_parts, self.grad_buffers[i % 2])
            torch._foreach_add_([self.grads[p] for p in self.reduced[i]], self.own_parts, alpha=1 / self.world_size)
            self.emptied[i % 2] = self.stream and self.stream.record_event()

    def wait_for(self, events, i):
        event = events[i % len(events)]
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    def gather_first(self):
        """Gather all but the blocks' matrices, and the first blocks. Called after each step, outside a CUDA graph."""
        if self.world_size > 1:
            blocks = [pair for block, buffer in zip(self.blocks, self.buffers) for pair in zip(block, buffer)]
            params, full = zip(*self.full.items(), *blocks)
            self.collective(dist.all_gather_into_tensor, full, [p.ds_tensor for p in params])

    # Forward and backward

    def begin_forward(self, model, inputs):
        if not model.training:
            self.gather_first()
        set_data(self.views)
        self.held = list(range(len(self.buffers)))  # the block in each buffer
        # Events are those of this micro-step, because a captured graph can't wait for others
        self.gathered, self.emptied, self.last = [None] * len(self.buffers), [None] * 2, None

    def use(self, i):
        """Make block i's matrices whole."""
        self.gather(i)
        self.wait_for(self.gathered, i)
        set_data(self.block_views[i])

    def release(self, i):
        for param in self.blocks[i]:
            param.data, param.ds_status = param.data.new_empty(0), ZeroParamStatus.NOT_AVAILABLE

    def before_forward(self, i, block, inputs):
        self.use(i)
        self.gather(i + 1)

    def after_forward(self, i, block, inputs, outputs):
        self.release(i)
        for output in outputs if isinstance(outputs, tuple) else [outputs]:
            if output is not None and output.requires_grad and not output.is_leaf:
                output.register_hook(partial(self.before_backward, i))

    def before_backward(self, i, grad):
        """Called with the gradient of each of block i's outputs. Then block i + 1 is done."""
        if self.last == i:
            return
        self.last = i
        self.wait_for(self.emptied, i)  # block i + 2's gradients were in the same buffer
        self.use(i)
        self.gather(i - 1)
        if i + 1 < len(self.blocks):
            self.release(i + 1)
            self.reduce(i + 1)

    def on_grad_ready(self, param):
        """Take a gradient from autograd. There is none if a kernel has written to main_grad."""
        grad, param.grad = param.grad, None
        if grad is not None:
            param.main_grad.copy_(grad) if hasattr(param, "overwrite_main_grad") else param.main_grad.add_(grad)

    def finish_backward(self):
        """Finish the reductions of this backward. DeepSpeed calls this after each backward."""
        if self.blocks:
            self.release(0)
            self.reduce(0)
            if self.stream:
                # A captured graph can't wait for a stream that has not joined it
                self.stream.wait_stream(torch.cuda.current_stream())
                torch.cuda.current_stream().wait_stream(self.stream)

    # The optimizer's step

    def reduce_at_step(self):
        """Leave the averaged gradients of all parameters in the shards. Called before each optimizer step."""
        if self.world_size > 1 and self.sums:  # with LoRA, all that is trained may be in blocks
            shards = [self.grads[param] for param in self.sums]
            self.collective(dist.reduce_scatter_tensor, shards, self.sums.values())
            torch._foreach_mul_(shards, 1 / self.world_size)
            torch._foreach_zero_(list(self.sums.values()))
