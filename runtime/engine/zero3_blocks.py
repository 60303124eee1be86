"""ZeRO-3's forward and backward with one all_gather and one reduce_scatter per block.

DeepSpeed 0.19.8 gathers, reduces and releases each parameter on its own. GPT-2 XL has 580, and the
GPU waits for the CPU. Here, parameters are of two kinds:

  matrices of blocks  One all_gather brings a block's matrices into a buffer while the block
                      before it computes, in forward and again in backward. There are buffers for
                      stage3_max_live_parameters: GPT-2 XL gathers 16 of its 48 blocks each time,
                      and begins the next forward with the 32 that backward used last. Gradients go
                      to one of two buffers. One reduce_scatter takes a block's while the next
                      block's backward computes. With accumulate_locally, each rank sums them in
                      float32, and they are reduced once per step.
  all others          Embeddings, layer norms and biases are gathered once per step. Each rank sums
                      their gradients in float32, and they are reduced once per step.

The first kind needs blocks that each run once, in order, with parameters of their own.
blocks_to_gather() proves that, or all parameters are of the second kind. That is right for any
graph: which blocks run, how often, on which rank, and which parameters they share. It takes more
memory, as in ZeRO-2.

DeepSpeed keeps the sharded weights and gradients, the optimizer and checkpoints. All buffers have
fixed addresses, so micro-steps can be captured in a CUDA graph. On one rank, parameters are views
of DeepSpeed's shards.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _coalescing_manager

from runtime.engine.grad_sink import GradSink, set_sink, take_grad
from runtime.engine.layout import ShardedParameter, Zero3Layout, shape_of
from runtime.errors import UserError
from runtime.kernels.edits import why_not_our_forward


def blocks_to_gather(model: nn.Module) -> tuple[list[nn.Module], str | None]:
    """Return (the blocks whose matrices can be gathered one by one, None), or ([], why none can).

    Each block has to run once, in order, on all ranks, with parameters that nothing else uses. That
    is so if GPT.forward is ours and no block shares a parameter.
    """
    # Another model may have no such blocks: then all parameters are gathered at once
    blocks = list(getattr(getattr(model, "transformer", None), "h", ()))
    if not blocks:
        return [], "the model has no blocks"
    reason = why_not_our_forward(model)
    if reason:
        return [], reason

    # A module that occurs twice would be gathered in two turns
    of_blocks = {id(module) for block in blocks for module in block.modules()}
    n_modules = sum(len(list(block.modules())) for block in blocks)
    if len(of_blocks) < n_modules:
        return [], "blocks share a module"

    # Every name of a parameter, also of one that has several
    block_of: dict[nn.Parameter, int] = {}
    for i, block in enumerate(blocks):
        for param in block.parameters():
            if block_of.setdefault(param, i) != i:
                return [], "blocks share a parameter"

    # A name outside of the blocks means that something else uses the parameter, such as a tied head
    in_blocks = 0
    names = 0
    for _, param in model.named_parameters(remove_duplicate=False):
        names += param in block_of
    for block in blocks:
        in_blocks += len(list(block.named_parameters(remove_duplicate=False)))
    if names != in_blocks:
        return [], "a parameter of a block is used outside of it"

    # The buffers take turns, so each block has to fit each of them
    shapes = [[(shape_of(p), p.requires_grad) for p in block.parameters()] for block in blocks]
    if any(other != shapes[0] for other in shapes):
        return [], "the blocks have different parameters"
    return blocks, None


class Zero3Blocks:
    """Gathers a model's parameters and reduces its gradients, for a Layout of stage 3.

    blocks: the modules whose matrices are gathered one by one, or [].
    """

    def __init__(
        self, layout: Zero3Layout, blocks: list[nn.Module], accumulate_locally: bool
    ) -> None:
        self.layout = layout
        self.group = layout.group
        self.world_size = layout.world_size
        if self.world_size == 1:
            blocks = []

        # The matrices of each block are gathered one block at a time, all else once per step
        params = [[layout.of[p] for p in block.parameters()] for block in blocks]
        self.matrices = [[p for p in of_block if len(p.shape) > 1] for of_block in params]
        self.reduces_in_backward = bool(blocks) and not accumulate_locally
        self.holds_first = False  # what gather_first() gathers is whole, with the present weights
        self.make_buffers()
        self.make_sinks(accumulate_locally)
        self.begin_micro_step()

        # What happens when
        layout.module.register_forward_pre_hook(self.begin_forward)
        layout.module.register_forward_hook(self.end_forward)
        for i, block in enumerate(blocks):
            block.register_forward_pre_hook(partial(self.before_forward, i))
            block.register_forward_hook(partial(self.after_forward, i))

    def full_size(self, sharded: ShardedParameter, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor of zeros for all ranks' parts of a parameter."""
        return sharded.flat.new_zeros(self.world_size * sharded.flat.numel(), dtype=dtype)

    def make_buffers(self) -> None:
        """Allocate the whole parameters."""
        in_blocks = {p.param for block in self.matrices for p in block}
        self.others = [p for p in self.layout.params if p.param not in in_blocks]
        is_cuda = self.others[0].flat.is_cuda
        self.stream = torch.cuda.Stream() if self.layout.overlaps and is_cuda else None

        # Of all but the blocks' matrices
        self.full = {}
        for p in self.others:
            self.full[p] = p.flat if self.world_size == 1 else self.full_size(p)
        self.views = [(p, p.whole(full)) for p, full in self.full.items()]

        # Of the blocks, which take turns
        per_block = sum(p.numel for block in self.matrices[:1] for p in block)
        live = self.layout.max_live_parameters // max(1, per_block)
        held = self.matrices[: max(2, live)]
        self.buffers = [[self.full_size(p) for p in block] for block in held]
        self.block_views = []
        for block, buffer in zip(self.matrices, itertools.cycle(self.buffers)):
            views = [(p, p.whole(full)) for p, full in zip(block, buffer, strict=True)]
            self.block_views.append(views)

    def make_sinks(self, accumulate_locally: bool) -> None:
        """Allocate the whole gradients, and give each trained parameter its sink."""
        trained = [p for p in self.layout.params if p.grads is not None]
        in_blocks = {p for block in self.matrices for p in block}

        # Sums over the micro-steps, reduced once per step
        self.sums = {}
        for p in trained:
            if accumulate_locally or p not in in_blocks:
                self.sums[p] = p.grads if self.world_size == 1 else self.full_size(p, torch.float32)
                set_sink(p.param, GradSink(p.whole(self.sums[p])))

        # Of the blocks: those of one backward, in two buffers that take turns
        self.reduced = []
        for block in self.matrices:
            self.reduced.append([p for p in block if p.grads is not None and p not in self.sums])
        first = self.reduced[0] if self.reduced else []
        self.grad_buffers = [[self.full_size(p) for p in first] for _ in range(2)]
        sizes = [p.flat.numel() for p in first]
        self.own_parts = self.others[0].flat.new_empty(sum(sizes)).split(sizes)
        self.sinks = []
        self.block_of = {}  # of parameters that are reduced with their block
        for i, params in enumerate(self.reduced):
            sinks = []
            for p, buffer in zip(params, self.grad_buffers[i % 2], strict=True):
                self.block_of[p.param] = i
                sinks.append(GradSink(p.whole(buffer), one_backward=True))
                set_sink(p.param, sinks[-1])
            self.sinks.append(sinks)

    # Collectives

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Launch on the side stream, after all that has been launched so far."""
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):  # does nothing if it is None
            yield

    def collective(self, function: Callable, outputs: list, inputs: list) -> None:
        """Call all_gather_into_tensor or reduce_scatter_tensor for each pair, in one NCCL
        kernel."""
        with _coalescing_manager(self.group):
            for output, tensor in zip(outputs, inputs, strict=True):
                function(output, tensor, group=self.group)

    def gather(self, i: int) -> None:
        """Gather block i into its buffer, if there is one and the buffer doesn't hold it yet."""
        slot = i % max(1, len(self.buffers))
        if i in range(len(self.matrices)) and self.held[slot] != i:
            parts = [p.flat for p in self.matrices[i]]
            with self.on_stream():
                self.collective(dist.all_gather_into_tensor, self.buffers[slot], parts)
                self.gathered[slot] = self.stream.record_event() if self.stream else None
            self.held[slot] = i

    def reduce(self, i: int) -> None:
        """Reduce block i's gradients, and add this rank's part to its shards."""
        if not self.reduced[i]:
            return
        for sink in self.sinks[i]:
            sink.finish_backward()

        # The mean over the ranks. The side stream adds it while backward goes on
        shards = [p.grads for p in self.reduced[i]]
        with self.on_stream():
            self.collective(dist.reduce_scatter_tensor, self.own_parts, self.grad_buffers[i % 2])
            torch._foreach_add_(shards, self.own_parts, alpha=1 / self.world_size)
            self.emptied[i % 2] = self.stream.record_event() if self.stream else None

    def wait_for(self, events: list, i: int) -> None:
        """Make the current stream wait for an event of a buffer."""
        event = events[i % len(events)]
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    def prepare(self) -> None:
        """Gather what a forward begins with, unless it is whole. Called before each micro-step,
        outside a CUDA graph."""
        if not self.holds_first:
            self.gather_first()

    def gather_first(self) -> None:
        """Gather all but the blocks' matrices, and the first blocks."""
        self.holds_first = True
        if self.world_size == 1:
            return

        # One collective for all: small parameters would each wait for the CPU
        pairs = list(self.full.items())
        for block, buffer in zip(self.matrices, self.buffers):
            pairs += zip(block, buffer, strict=True)
        params, full = zip(*pairs)
        self.collective(dist.all_gather_into_tensor, full, [p.flat for p in params])

    def gathered_parts(self) -> list[tuple[Tensor, Tensor]]:
        """Return [(this rank's part of a whole parameter, what it was gathered from)], flat."""
        parts = []
        for p, full in self.full.items():
            size = p.flat.numel()
            parts.append((full.narrow(0, self.layout.rank * size, size), p.flat))
        return parts if self.world_size > 1 else []

    # Forward and backward

    def begin_micro_step(self) -> None:
        """Note that the buffers hold the first blocks, and that no block has run.

        They are there from gather_first() or from the backward before. When __init__ calls this,
        they aren't yet: prepare() gathers them.
        """
        self.held = list(range(len(self.buffers)))  # the block in each buffer
        self.next = 0  # the block whose turn it is
        self.in_backward = len(self.matrices)  # the block whose backward has begun
        # Events of each buffer: those of this micro-step, because a captured graph can't wait for
        # others
        self.gathered: list[torch.cuda.Event | None] = [None] * len(self.buffers)
        self.emptied: list[torch.cuda.Event | None] = [None] * 2

    def begin_forward(self, model: nn.Module, inputs: tuple) -> None:
        """Make all but the blocks' matrices whole."""
        # An evaluation may follow a change of the weights, and a forward without a backward leaves
        # the last blocks in the buffers
        if not self.holds_first or not model.training:
            self.gather_first()
        # Later blocks take the buffers now. At the end of backward, the first ones have them again
        self.holds_first = not self.matrices
        for p, full in self.views:
            p.show(full)
        self.begin_micro_step()

    def end_forward(self, model: nn.Module, inputs: tuple, outputs: object) -> None:
        """Empty the parameters after an evaluation: the loop may change the weights then."""
        if not model.training and not torch.is_grad_enabled():
            self.hide_others()

    def hide_others(self) -> None:
        """Make all but the blocks' matrices empty, and gather them again when they are needed.

        A loop may look at the parameters between two steps. If they kept the values of the last
        forward, GatheredParameters would take those for the present ones.
        """
        self.holds_first = False
        if self.world_size > 1:
            for p in self.others:
                p.hide()

    def use(self, i: int) -> None:
        """Make block i's matrices whole."""
        self.gather(i)
        self.wait_for(self.gathered, i)
        for p, full in self.block_views[i]:
            p.show(full)

    def release(self, i: int) -> None:
        """Make block i's matrices empty."""
        for p in self.matrices[i]:
            p.hide()

    def before_forward(self, i: int, block: nn.Module, inputs: tuple) -> None:
        """Gather block i, and launch the gather of the next one."""
        if i != self.next and block.training:
            raise UserError(
                f"block {i} ran when it was the turn of block {self.next}, which ZeRO-3 can't "
                "train by block: change the order in GPT.forward in model.py, not in another place"
            )
        self.next = i + 1
        self.use(i)
        self.gather(i + 1)

    def after_forward(self, i: int, block: nn.Module, inputs: tuple, outputs: object) -> None:
        """Release block i, and watch for its backward."""
        self.release(i)
        for output in outputs if isinstance(outputs, tuple) else [outputs]:
            if torch.is_tensor(output) and output.requires_grad and not output.is_leaf:
                output.register_hook(partial(self.before_backward, i))

    def before_backward(self, i: int, grad: Tensor) -> None:
        """Called with the gradient of each of block i's outputs. Then block i + 1 is done."""
        self.go_back_to(i)

    def go_back_to(self, i: int) -> None:
        """Begin the backward of each block down to block i, and reduce the gradients of those
        before.

        A block may have no backward: it returns its input, or computes without gradients. Its turn
        comes all the same, so that all ranks make the same collectives.
        """
        while self.in_backward > i:
            self.in_backward -= 1
            self.begin_backward(self.in_backward)

    def begin_backward(self, i: int) -> None:
        """Make block i's matrices whole for its backward, and reduce the gradients of block i +
        1."""
        self.wait_for(self.emptied, i)  # block i + 2's gradients were in the same buffer
        self.use(i)
        self.gather(i - 1)
        if i + 1 < len(self.matrices):
            self.release(i + 1)
            self.reduce(i + 1)

    def on_grad_ready(self, param: nn.Parameter) -> None:
        """Take a gradient from autograd. There is none if a kernel has put it into the sink."""
        block = self.block_of.get(param)
        if block is not None and block > self.in_backward:
            name = self.layout.names[param]
            raise UserError(
                f"the gradient of {name} came when ZeRO-3 had reduced block {block}: compute what "
                "uses it in the block's forward, or add --accumulate_locally=True"
            )
        take_grad(param)

    def finish_backward(self) -> None:
        """Finish the reductions of this backward. Called after each backward."""
        # The first block's gradients come last, and no hook follows them
        if self.matrices:
            self.go_back_to(0)
            self.release(0)
            self.reduce(0)
            self.holds_first = True
            if self.stream:
                # A captured graph can't wait for a stream that has not joined it
                self.stream.wait_stream(torch.cuda.current_stream())
                torch.cuda.current_stream().wait_stream(self.stream)

    # The optimizer's step

    def reduce_at_step(self) -> None:
        """Leave the averaged gradients of all parameters in the shards. Called before each step."""
        self.hide_others()  # the step changes the weights
        if self.world_size > 1 and self.sums:  # with LoRA, all that is trained may be in blocks
            shards = [p.grads for p in self.sums]
            sums = list(self.sums.values())
            self.collective(dist.reduce_scatter_tensor, shards, sums)
            torch._foreach_mul_(shards, 1 / self.world_size)
            torch._foreach_zero_(sums)
