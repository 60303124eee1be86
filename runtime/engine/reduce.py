"""ZeRO-2's gradients: from backward to this rank's shards.

DeepSpeed 0.19.8 divides, concatenates, casts and accumulates each gradient in separate passes. Then
it checks for overflow and computes the norm per parameter. Here one of two classes takes the
gradients, with the same results. docs/engineering_notes.md has the times.

  LocalAccumulation  Each parameter has a sink, in which float32 sums grow over the micro-steps. The
                     matmuls in kernels/block.py add to it, so most gradients are never stored
                     separately. On one rank it is a view of the shard. On several it is a view of a
                     full buffer, which is reduce-scattered once per step.
  BucketedAllReduce  There are no sinks. Gradients are copied into buckets. A full bucket is
                     all-reduced on a side stream while backward continues. This rank's part is
                     cast, divided and accumulated in one pass.

Both are right for any graph. Each gradient has its fixed place, one that doesn't come counts as
zero, and the ranks make the same collectives in the same order, whatever their graphs are.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runtime.engine.grad_sink import GradSink, set_sink, take_grad
from runtime.engine.layout import Zero2Layout
from runtime.engine.shard import Piece, Place
from runtime.errors import UserError

NORM_PIECE = 2**16  # elements


class LocalAccumulation:
    """Sums the gradients of all micro-steps on each rank, and reduces them once per step."""

    reduces_in_backward = False

    def __init__(self, layout: Zero2Layout) -> None:
        self.layout = layout
        self.sums = []  # of each parameter group, for all ranks

        # The sinks are views of the sums, so gradients land where they are reduced from
        for shard, size in zip(layout.shards, layout.flat_sizes, strict=True):
            if layout.world_size == 1:
                sums = shard.grads
            else:
                sums = torch.zeros(size, dtype=torch.float32, device=shard.grads.device)
            self.sums.append(sums)
            for place in shard.places:
                n = place.param.numel()
                total = sums.narrow(0, place.offset, n).view(place.param.shape)
                set_sink(place.param, GradSink(total))

    def on_grad_ready(self, param: nn.Parameter) -> None:
        """Take a parameter's gradient, when backward has computed it."""
        take_grad(param)

    def finish_backward(self) -> None:
        """Do nothing. Called after each backward."""

    def reduce_at_step(self) -> None:
        """Leave the averaged gradients in the shards. All ranks call this before each step."""
        layout = self.layout
        if layout.world_size == 1:
            return

        # The mean over the ranks, and zeros for the next step
        for shard, sums in zip(layout.shards, self.sums, strict=True):
            dist.reduce_scatter_tensor(shard.grads, sums, group=layout.group)
            shard.grads.div_(layout.world_size)
            sums.zero_()


@dataclass(frozen=True, eq=False)
class Bucket:
    """Gradients that are reduced together. places: in the bucket's flat tensor."""

    places: tuple[Place, ...]
    size: int


class BucketedAllReduce:
    """Reduces the gradients of each backward while it runs."""

    reduces_in_backward = True

    def __init__(self, layout: Zero2Layout) -> None:
        self.layout = layout
        self.owned = owned_pieces(layout)

        # Frozen parameters have no gradient, so they are in no bucket
        trained = {place.param for shard in layout.shards for place in shard.places}
        params = [param for param in layout.module.parameters() if param in trained]
        # Backward computes the gradients in about this order
        self.buckets = make_buckets(params[::-1], layout.bucket_size)

        # Where each parameter's gradient goes
        self.bucket_of = {}
        self.offset_of = {}
        for i, bucket in enumerate(self.buckets):
            for place in bucket.places:
                self.bucket_of[place.param] = i
                self.offset_of[place.param] = place.offset

        # Buffers for the bucket that is filled and the one that is reduced
        half = layout.shards[0].half
        self.stream = torch.cuda.Stream() if half.is_cuda and layout.overlaps else None
        largest = max(bucket.size for bucket in self.buckets)
        n_buffers = 2 if self.stream else 1
        self.buffers = [half.new_empty(largest) for _ in range(n_buffers)]
        self.reduced: list = [None] * n_buffers  # events on the side stream, of each buffer
        self.begin_backward()

    def begin_backward(self) -> None:
        """Note that no gradient has come yet, and that the first bucket is to be filled."""
        self.current = 0  # the bucket that is being filled
        self.filled: set[nn.Parameter] = set()  # whose gradients are in its buffer
        self.early: dict[nn.Parameter, Tensor] = {}  # gradients of later buckets

    def on_grad_ready(self, param: nn.Parameter) -> None:
        """Take a parameter's gradient, when backward has computed it."""
        # It goes to a bucket, so the parameter doesn't have to keep it
        grad = param.grad
        param.grad = None
        if grad is None:
            return
        # Is it the turn of its bucket?
        i = self.bucket_of[param]
        if i < self.current or param in self.filled:
            name = self.layout.names[param]
            raise UserError(
                f"the gradient of {name} came twice in one backward: use torch.utils.checkpoint "
                "with use_reentrant=False, or add --accumulate_locally=True"
            )

        # Keep one that came early, until its bucket is the current one
        if i > self.current:
            early = self.early.get(param)
            self.early[param] = grad if early is None else early + grad
            return
        self.put(param, grad)

        # Gradients that came early may have filled the next buckets too
        while self.current < len(self.buckets) and self.is_full():
            self.launch_bucket()

    def is_full(self) -> bool:
        """Return whether all gradients of the current bucket are in its buffer."""
        return len(self.filled) == len(self.buckets[self.current].places)

    def put(self, param: nn.Parameter, grad: Tensor) -> None:
        """Copy a gradient to its place in the buffer of the current bucket."""
        if not self.filled:
            self.wait_for(0)
        place = self.buffers[0].narrow(0, self.offset_of[param], param.numel())
        place.copy_(grad.reshape(-1))
        self.filled.add(param)

    def launch_bucket(self) -> None:
        """Reduce the current bucket, on the side stream if there is one, and begin the next one."""
        # Zeros for what the graph of this backward doesn't have
        bucket = self.buckets[self.current]
        if not self.filled:
            self.wait_for(0)
        for place in bucket.places:
            if place.param not in self.filled:
                self.buffers[0].narrow(0, place.offset, place.param.numel()).zero_()

        # The reduction, which begins after the copies into the buffer
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):  # does nothing if it is None
            self.reduce(bucket, self.buffers[0].narrow(0, 0, bucket.size))
            self.reduced[0] = self.stream.record_event() if self.stream else None

        # The next bucket takes the other buffer, and gradients that came early
        self.buffers.reverse()
        self.reduced.reverse()
        self.current += 1
        self.filled = set()
        if self.current < len(self.buckets):
            for place in self.buckets[self.current].places:
                grad = self.early.pop(place.param, None)
                if grad is not None:
                    self.put(place.param, grad)

    def reduce(self, bucket: Bucket, flat: Tensor) -> None:
        """All-reduce a bucket, and add the part of its gradients that this rank owns to its
        shards."""
        # The sum over the ranks, in the dtype of the weights
        dist.all_reduce(flat, group=self.layout.group)
        for place in bucket.places:
            if place.param in self.owned:
                piece, view = self.owned[place.param]
                part = flat.narrow(0, place.offset + piece.start, piece.numel)
                view.add_(part, alpha=1 / self.layout.world_size)

    def wait_for(self, i: int) -> None:
        """Make the current stream wait until buffer i is free. It waits for each event once,
        because a capture can't wait for an event from before it."""
        event = self.reduced[i]
        if event is not None:
            torch.cuda.current_stream().wait_event(event)
            self.reduced[i] = None

    def finish_backward(self) -> None:
        """Reduce all buckets that are left. Called after each backward."""
        while self.current < len(self.buckets):
            self.launch_bucket()

        # The step reads the shards, which the side stream may still be adding to
        for i in range(len(self.buffers)):
            self.wait_for(i)
        self.begin_backward()

    def reduce_at_step(self) -> None:
        """Do nothing: the averaged gradients are in the shards."""


def make_buckets(params: list[nn.Parameter], size: int) -> list[Bucket]:
    """Return buckets of at most `size` elements, or of one larger parameter, in this order."""
    buckets = []
    places: list[Place] = []
    filled = 0
    for param in params:
        # Close the bucket that this parameter doesn't fit into
        if places and filled + param.numel() > size:
            buckets.append(Bucket(tuple(places), filled))
            places = []
            filled = 0
        places.append(Place(param, filled))
        filled += param.numel()
    return [*buckets, Bucket(tuple(places), filled)]


def owned_pieces(layout: Zero2Layout) -> dict[nn.Parameter, tuple[Piece, Tensor]]:
    """Return {parameter: (its piece on this rank, the piece's gradients, flat)}."""
    owned = {}
    for shard in layout.shards:
        for piece in shard.pieces:
            owned[piece.param] = piece, shard.grads.narrow(0, piece.offset, piece.numel)
    return owned


def global_norm(flats: list[Tensor], group: dist.ProcessGroup | None) -> Tensor:
    """Return the norm of all ranks' flat tensors, a scalar on their device. All ranks call this."""
    if flats[0].is_cpu:  # where the float32 norm of 124 million gradients at once is 1.3% too small
        flats = [piece for flat in flats for piece in flat.split(NORM_PIECE)]
    # The norm of the norms, of this rank's shards and then of all ranks'
    squared = torch.stack([torch.linalg.vector_norm(flat) for flat in flats]).square().sum()
    if dist.get_world_size(group) > 1:
        dist.all_reduce(squared, group=group)
    return squared.sqrt()
