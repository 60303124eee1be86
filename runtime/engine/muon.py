"""Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/) for the matrices of
blocks, at ZeRO-2.

Each matrix's update is its momentum with singular values near 1. Weights and momentum are sharded
as AdamW's are, in one flat tensor per rank. split_matrices() gives each rank whole blocks if it
can, and lets the matrices of one place in a block follow each other: a view of neighbors of one
shape is the batch of a GEMM.
A matrix that lies on several ranks, at most one per border, is gathered by all. There is no second
moment, so Muon needs 4 bytes per parameter less than AdamW.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runtime.engine.clip import Clip
from runtime.engine.compact import (
    join_weight,
    mix,
    noise_of,
    round_to_bfloat16,
    seed_of,
    split_weight,
)
from runtime.engine.shard import Place, Shard
from runtime.errors import UserError
from runtime.kernels.gram import symmetric_product

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of Newton-Schulz, as in torch.optim.Muon
ROUNDS = (3, 2)  # its iterations: five, as there
MAX_BATCH = 2**28  # elements; a batch of matrices takes a few times this memory for a moment


def split_matrices(
    groups: list[dict], model: nn.Module, lr_ratio: float, world_size: int
) -> list[dict]:
    """Return parameter groups with the matrices of GPT.muon_matrices() in groups for Muon.

    Each group that has such matrices gets one for Muon, with its own options, such as
    weight_decay. Its learning rate is `lr_ratio` times what it would be, and its "parts" are those
    of its "params". Matrices that are frozen or in no group are left out. Raises UserError if none
    is left.

    The matrices are the same for any number of ranks. Each rank gets whole blocks if it can. Within
    its share, the matrices of one place in a block follow each other, so that they make up a batch
    of a GEMM.
    """
    # Each rank's blocks, of which it gets the matrices
    of_blocks = model.muon_matrices()
    n_blocks = len(of_blocks)
    # {parameter: parts}, in the order of the group. Blocks may share a parameter
    parts_of: dict[nn.Parameter, int] = {}
    for rank in range(world_size):
        share = of_blocks[rank * n_blocks // world_size : (rank + 1) * n_blocks // world_size]
        # A block may have more matrices than another
        for same_place in itertools.zip_longest(*share):
            for entry in same_place:
                if entry is not None:
                    param, parts = entry
                    parts_of.setdefault(param, parts)

    # AdamW's groups, without these, and Muon's after them
    others = []
    muons = []
    for group in groups:
        params = dict.fromkeys(group["params"])
        rest = [param for param in params if param not in parts_of]
        matrices = [param for param in parts_of if param in params and param.requires_grad]
        if any(param.requires_grad for param in rest):
            others.append({**group, "params": rest})
        if matrices:
            own = {
                "kind": "muon",
                "lr_ratio": lr_ratio * group.get("lr_ratio", 1),
                "params": matrices,
                "parts": [parts_of[param] for param in matrices],
            }
            muons.append({**group, **own})
    if not muons:
        raise UserError(
            "optimizer=muon has no matrix to train: all of GPT.muon_matrices are frozen or in no "
            "parameter group: use --optimizer=adamw"
        )
    return [*others, *muons]


def is_muon(group: Mapping) -> bool:
    """Return whether a parameter group is Muon's."""
    return group.get("kind") == "muon"


def moments_of(group: Mapping) -> tuple[str, ...]:
    """Return the names of the moments that the optimizer keeps for a parameter group."""
    if is_muon(group):
        return ("exp_avg",)
    return ("exp_avg", "exp_avg_sq")


def orthogonalize(x: Tensor, product: Callable[..., Tensor]) -> Tensor:
    """Return x (n, rows, columns), matrices of norm 1, with their singular values moved to about 1.

    An iteration of Newton-Schulz is x <- p(A) x, with A = x x^T and p(A) = a + b A + c A^2. We
    iterate on A, on the smaller side of x, and multiply x by all p(A) of a round at once. Longer
    rounds lose small singular values to rounding. product(x, y, alpha, beta): alpha x y^T + beta x,
    which is symmetric, because A and all p(A) commute.
    """
    # The smaller side of the matrices makes the smaller product
    a, b, c = COEFFICIENTS
    is_tall = x.size(1) > x.size(2)

    def polynomial(gram: Tensor) -> Tensor:
        """Return a + b A + c A^2 of A."""
        result = product(gram, gram, c, b)
        result.diagonal(dim1=1, dim2=2).add_(a)
        return result

    for iterations in ROUNDS:
        side = x.mT if is_tall else x
        gram = product(side, side)
        factor = polynomial(gram)
        factors = factor
        for _ in range(iterations - 1):
            gram = product(product(gram, factor), factor)
            factor = polynomial(gram)
            factors = product(factors, factor)
        # Rounding makes factors unsymmetric if product is plain
        x = x @ factors if is_tall else factors.mT @ x
    return x


def plain_product(x: Tensor, y: Tensor, alpha: float = 1.0, beta: float = 0.0) -> Tensor:
    """Do what kernels.gram.symmetric_product does where Triton doesn't run."""
    if not beta:
        return x @ y.mT
    return torch.baddbmm(x, x, y.mT, beta=beta, alpha=alpha)


def next_direction(grads: Tensor, momentum: Tensor, factor: Tensor, is_applied: Tensor) -> Tensor:
    """Add clipped gradients to the momentum, clear them, and return Nesterov's direction (bfloat16,
    on CPU float32). factor: Clip.factor()."""
    # A step that isn't applied leaves the momentum as it is, and clears the gradients
    clipped = torch.where(is_applied, grads * factor, 0.0)
    momentum.lerp_(clipped, is_applied * (1 - MOMENTUM))
    grads.zero_()
    dtype = torch.bfloat16 if grads.is_cuda else torch.float32
    return clipped.lerp(momentum, MOMENTUM).to(dtype)


def normalize(x: Tensor) -> Tensor:
    """Return matrices (n, rows, columns) divided by their norms, in float16, or on CPU in float32.
    Newton-Schulz is several times as exact in float16 as in bfloat16, and needs no more range once
    x is normalized."""
    norms = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=torch.float32)
    dtype = torch.float16 if x.is_cuda else torch.float32
    return (x / norms.clamp(min=1e-7)).to(dtype)


def apply_update(weights: Tensor, half: Tensor, update: Tensor, lr: Tensor, decay: Tensor) -> None:
    """Decay the fp32 weights, subtract lr * update, and copy them to half precision.

    lr, decay (lr * weight_decay, the share of a weight that it loses): device scalars.
    """
    weights.mul_(1 - decay).sub_(update.float() * lr)
    half.copy_(weights)


def next_compact_direction(
    grads: Tensor, momentum: Tensor, factor: Tensor, is_applied: Tensor, seed: Tensor
) -> Tensor:
    """Do what next_direction() does to a momentum in bfloat16, which is rounded at random."""
    wide = momentum.float()
    direction = next_direction(grads, wide, factor, is_applied)
    momentum.copy_(round_to_bfloat16(wide, noise_of(seed, 0, wide.numel())))
    return direction


def apply_compact_update(
    half: Tensor, remainder: Tensor, update: Tensor, lr: Tensor, decay: Tensor
) -> None:
    """Do what apply_update() does to weights that are bfloat16 and remainders."""
    # The fp32 weights exist only for this step
    weights = join_weight(half, remainder)
    weights = weights * (1 - decay) - update.float() * lr
    new_half, new_remainder = split_weight(weights)
    half.copy_(new_half)
    remainder.copy_(new_remainder)


@dataclass
class MatrixBatch:
    """Matrices of one shape that follow each other in the flat tensor of all ranks.

    start, end: elements, counted from the first one of this rank.
    """

    start: int
    end: int
    rows: int
    columns: int


class Muon:
    """Steps this rank's part of a parameter group of Muon's.

    places: of the group in the flat tensor of all ranks. parts: of each, as in GPT.muon_matrices().
    size: elements per rank. group: the ranks that share the flat tensor. use_kernels: whether
    Triton runs here.
    """

    def __init__(
        self,
        places: tuple[Place, ...],
        parts: list[int],
        size: int,
        group: dist.ProcessGroup | None,
        use_kernels: bool = False,
    ) -> None:
        self.group = group
        self.size = size
        self.batches: list[MatrixBatch] = []
        # This rank's matrices, and all that lie on a border between ranks: every rank takes part in
        # their all_reduce
        first_of_rank = size * dist.get_rank(group)
        for place, n_parts in zip(places, parts, strict=True):
            rows = place.param.shape[0] // n_parts
            columns = place.param.shape[1]
            n = rows * columns
            start = place.offset - first_of_rank
            for first in range(start, start + place.param.numel(), n):
                self.add(MatrixBatch(first, first + n, rows, columns))

        self.product = symmetric_product if use_kernels else plain_product
        # Each runs in one pass
        compiled = partial(torch.compile, dynamic=False, disable=not use_kernels)
        self.next_direction = compiled(next_direction)
        self.next_compact_direction = compiled(next_compact_direction)
        self.normalize = compiled(normalize)
        self.apply_update = compiled(apply_update)
        self.apply_compact_update = compiled(apply_compact_update)

    def is_shared(self, batch: MatrixBatch) -> bool:
        """Return whether a matrix lies on several ranks."""
        return batch.start // self.size != (batch.end - 1) // self.size

    def add(self, matrix: MatrixBatch) -> None:
        """Add a matrix: to the batch before it if it can, or not at all if others own it."""
        # Only matrices of one shape that lie together are one batch
        last = self.batches[-1] if self.batches else None
        is_own = 0 <= matrix.start and matrix.end <= self.size
        fits_last = (
            last is not None
            and last.start >= 0
            and last.end == matrix.start
            and (last.rows, last.columns) == (matrix.rows, matrix.columns)
            and matrix.end - last.start <= MAX_BATCH
        )
        if is_own and fits_last:
            last.end = matrix.end
        elif is_own or self.is_shared(matrix):
            self.batches.append(matrix)

    def step(self, shard: Shard, clip: Clip) -> None:
        """Step a shard, unless the norm is too large, and clear its gradients."""
        # Decided on the GPU, without waiting for the norm
        factor = clip.factor()
        is_applied = clip.applies()
        # On the device; torch.tensor() would make the CPU wait for backward
        lr = is_applied * shard.options["lr"]
        decay = lr * shard.options["weight_decay"]
        for batch in self.batches:
            # What this rank has of these matrices
            first = max(0, min(self.size, batch.start))
            end = max(0, min(self.size, batch.end))
            own = slice(first, end)
            direction = self.direction_of(shard, own, factor, is_applied)
            if self.is_shared(batch):
                part = direction
                direction = part.new_zeros(batch.end - batch.start)
                direction[first - batch.start : end - batch.start] = part
                dist.all_reduce(direction, group=self.group)
            if first == end:
                continue
            # The update, of whole matrices. Tall ones get a higher rate
            matrices = self.normalize(direction.view(-1, batch.rows, batch.columns))
            update = orthogonalize(matrices, self.product).flatten()
            update = update[first - batch.start : end - batch.start]
            scale = max(1, batch.rows / batch.columns) ** 0.5
            self.update_weights(shard, own, update, lr * scale, decay)

    def direction_of(self, shard: Shard, own: slice, factor: Tensor, is_applied: Tensor) -> Tensor:
        """Return Nesterov's direction of a slice of a shard, and step its momentum."""
        grads = shard.grads[own]
        if shard.compact is None:
            momentum = shard.state["exp_avg"][own]
            return self.next_direction(grads, momentum, factor, is_applied)
        momentum = shard.compact.moments["exp_avg"].values[own]
        # Each slice has noise of its own
        seed = mix(seed_of(shard.state["step"]) ^ (own.start & 0x7FFFFFFF))
        return self.next_compact_direction(grads, momentum, factor, is_applied, seed)

    def update_weights(
        self, shard: Shard, own: slice, update: Tensor, lr: Tensor, decay: Tensor
    ) -> None:
        """Step the weights of a slice of a shard."""
        half = shard.half[own]
        if shard.compact is None:
            self.apply_update(shard.master.data[own], half, update, lr, decay)
        else:
            remainder = shard.compact.remainder[own]
            self.apply_compact_update(half, remainder, update, lr, decay)
