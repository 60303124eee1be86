"""What a rank holds of a parameter group, as flat tensors. This file knows nothing about
DeepSpeed."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from runtime.engine.compact import CompactState


@dataclass(frozen=True, eq=False)
class Piece:
    """The part of a parameter that is in a shard."""

    param: nn.Parameter
    start: int  # its first element, in the flat parameter
    offset: int  # where that element is in the shard
    numel: int


@dataclass(frozen=True, eq=False)
class Place:
    """Where a whole parameter is in the flat tensor that the ranks' shards make up (ZeRO-2)."""

    param: nn.Parameter
    offset: int


@dataclass(frozen=True, eq=False)
class Shard:
    """This rank's part of a parameter group, as flat tensors of one size.

    At ZeRO-3, of a sub-group: DeepSpeed cuts a group that is above sub_group_size into several.
    compact: what is kept in the place of fp32 weights and moments, of which master and the state
    have only the shapes then.
    """

    master: Tensor  # fp32 weights, which the optimizer steps. With offload, .grad is a host buffer
    half: Tensor  # the same weights as forward and backward use them
    grads: Tensor  # fp32 gradients, averaged over the ranks when a step begins
    optimizer: torch.optim.Optimizer
    group_index: int  # of the optimizer's parameter group
    pieces: tuple[Piece, ...] = ()
    places: tuple[Place, ...] = ()  # of all ranks; at ZeRO-3, parameters are cut one by one
    compact: CompactState | None = None

    @property
    def params(self) -> tuple[nn.Parameter, ...]:
        """The parameters of the group or sub-group, of which this rank may hold no part."""
        if self.places:
            return tuple(place.param for place in self.places)
        return tuple(piece.param for piece in self.pieces)

    @property
    def options(self) -> dict:
        """The optimizer's parameter group: lr, betas, ... load_state_dict() makes another dict."""
        return self.optimizer.param_groups[self.group_index]

    @property
    def state(self) -> dict:
        """The optimizer's state of master. load_state_dict() makes another dict."""
        return self.optimizer.state[self.master]


def pieces_of(places: tuple[Place, ...], size: int, rank: int) -> tuple[Piece, ...]:
    """Return the pieces in a rank's shard of `size` elements."""
    begin = rank * size
    pieces = []
    for place in places:
        # What of the parameter lies between the borders of the rank
        first = max(begin, place.offset)
        end = min(begin + size, place.offset + place.param.numel())
        if first < end:
            pieces.append(Piece(place.param, first - place.offset, first - begin, end - first))
    return tuple(pieces)
