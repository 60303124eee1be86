"""What DeepSpeed's own ZeRO-3 path can't train, and that it would train wrong or crash on.

There, a forward is collective, block by block. A rank that skips a block which another one runs
would gather other parameters: the run would hang, or train on garbage. DeepSpeed also reduces a
block's gradients when its backward ends, so a block has to run once, with parameters of its own,
and to have a backward.
"""

import torch
from torch import nn

from runtime.cluster.ranks import all_gather_scalars
from runtime.errors import UserError

ADVICE = (
    "which ZeRO-3 with offload, or with prefetching of its own, can't train: use "
    "--deepspeed_config=ds_config_zero2.json or config/ds/zero2_offload.json"
)


class Lockstep:
    """Watches that each block of a model runs at most once in a forward, and the same ones on all
    ranks. Raises UserError, on all ranks, before a block is gathered."""

    def __init__(self, model: nn.Module, world_size: int) -> None:
        self.world_size = world_size
        self.blocks = list(getattr(getattr(model, "transformer", None), "h", ()))
        self.check_parameters()

        # Blocks of the present forward
        self.ran: set[int] = set()
        self.went_back: set[int] = set()  # blocks whose backward has begun

        # Before a block is gathered: hooks that come first
        model.register_forward_pre_hook(self.begin, prepend=True)
        for i, block in enumerate(self.blocks):
            block.register_forward_pre_hook(
                lambda module, inputs, i=i: self.before_block(i), prepend=True
            )
            block.register_forward_hook(
                lambda module, inputs, outputs, i=i: self.after_block(i, outputs)
            )
        model.register_forward_hook(self.end)

    def check_parameters(self) -> None:
        """Raise UserError if blocks share parameters."""
        seen: set[nn.Parameter] = set()
        for block in self.blocks:
            params = set(block.parameters())
            if params & seen:
                raise UserError(f"blocks of the model share parameters, {ADVICE}")
            seen |= params

    def begin(self, model: nn.Module, inputs: tuple) -> None:
        """Begin a forward."""
        self.ran = set()
        self.went_back = set()

    def before_block(self, i: int) -> None:
        """Check that block i may run now."""
        self.compare(i)
        if i in self.ran:
            raise UserError(f"block {i} of the model runs twice in a forward, {ADVICE}")
        self.ran.add(i)

    def after_block(self, i: int, outputs: object) -> None:
        """Watch for the backward of block i."""
        block = self.blocks[i]
        if not (torch.is_grad_enabled() and block.training):
            return
        tensors = outputs if isinstance(outputs, tuple) else (outputs,)
        with_grad = [t for t in tensors if torch.is_tensor(t) and t.requires_grad]
        if is_trained(block) and not with_grad:
            raise UserError(f"block {i} of the model computes without gradients, {ADVICE}")
        for tensor in with_grad:
            tensor.register_hook(lambda grad: self.went_back.add(i))

    def end_backward(self) -> None:
        """Check that each trained block that ran has had a backward. Call this after each
        backward."""
        for i in sorted(self.ran - self.went_back):
            if is_trained(self.blocks[i]):
                raise UserError(f"block {i} of the model gets no gradient, {ADVICE}")

    def end(self, model: nn.Module, inputs: tuple, outputs: object) -> None:
        """Check that all ranks end their forward here."""
        self.compare(len(self.blocks))

    def compare(self, i: int) -> None:
        """Raise UserError unless all ranks call this with the same number."""
        if self.world_size == 1:
            return
        blocks = {number for (number,) in all_gather_scalars(i)}
        if len(blocks) > 1:
            raise UserError(f"the ranks run different blocks of the model, {ADVICE}")


def is_trained(module: nn.Module) -> bool:
    """Return whether some parameters of a module are trained."""
    return any(param.requires_grad for param in module.parameters())
