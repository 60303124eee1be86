"""Check that all ranks run the same blocks, where DeepSpeed gathers the parameters of each.

At ZeRO-3, a forward is collective. A rank that skips a block which another one runs would gather
other parameters: the run would hang, or train on garbage.
"""

from functools import partial

from torch import nn

from runtime.cluster.ranks import all_gather_scalars
from runtime.errors import UserError


def watch_order(model: nn.Module) -> None:
    """Let each block of a model compare itself with those of the other ranks before it runs."""
    blocks = getattr(getattr(model, "transformer", None), "h", ())
    for i, block in enumerate(blocks):
        block.register_forward_pre_hook(partial(compare, i), prepend=True)
    model.register_forward_hook(partial(compare, len(blocks)))


def compare(i: int, *_: object) -> None:
    """Raise UserError unless all ranks call this with the same number."""
    blocks = {int(number) for (number,) in all_gather_scalars(i)}
    if len(blocks) > 1:
        raise UserError(
            "the ranks run different blocks of the model, but at ZeRO-3 with offload, or with prefetching "
            "of its own, DeepSpeed needs the same on all: choose them by random numbers that are the same "
            "on all ranks, or use --deepspeed_config=ds_config_zero2.json"
        )
