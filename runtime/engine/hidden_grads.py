"""What a training loop finds in param.grad, where ZeRO keeps no gradient.

Each gradient is moved to where it is summed as soon as backward has made it, so param.grad would be
None. What skips parameters without a gradient, as torch.nn.utils.clip_grad_norm_() does, would then
do nothing, without a word. So between the micro-steps and the step of the optimizer, each
param.grad is a stand-in, and whatever uses it raises UserError.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from runtime.errors import UserError

ABOVE = "above setup.compile_blocks()"
CHANGE = (
    "ZeRO keeps gradients in shards of its own: use --grad_clip to clip them, and for other "
    f"changes param.register_hook(...) {ABOVE}, or an optimizer's own step()"
)
DISCARD = (
    "ZeRO keeps gradients in shards of its own: to discard those of a step, use "
    "engine.step(skip_above=0)"
)
OWN_BACKWARD = (
    "the training loop makes a backward outside of engine.micro_step(), which would be weighted "
    "wrongly: add its loss in GPT.forward"
)


class StandIn(Tensor):
    """Looks like a gradient of a parameter, and holds nothing. Each use raises UserError."""

    @staticmethod
    def __new__(cls, param: nn.Parameter) -> "StandIn":
        return torch.Tensor._make_wrapper_subclass(
            cls, param.shape, dtype=param.dtype, device=param.device
        )

    @classmethod
    def __torch_function__(cls, *args: Any, **named: Any) -> NoReturn:
        raise UserError(f"the training loop uses param.grad, and {CHANGE}")

    @classmethod
    def __torch_dispatch__(cls, *args: Any, **named: Any) -> NoReturn:
        """Refuse what Python doesn't call: autograd adds another gradient."""
        raise UserError(OWN_BACKWARD)


class HiddenGrads:
    """Puts the stand-ins into a model's parameters, and says what a loop does to its gradients."""

    def __init__(self, module: nn.Module) -> None:
        self.named = list(module.named_parameters())
        self.in_micro_step = False
        self.stand_ins: dict[tuple, StandIn] = {}  # by shape, dtype and device
        self.left: list[Tensor | None] = [None] * len(self.named)  # what param.grad should be
        self.accept_hooks(set())

    def accept_hooks(self, fixed: set[nn.Parameter]) -> None:
        """Take the hooks on parameters as they are: call this when all is set up.

        fixed: parameters whose gradients our kernels or a CUDA graph compute, without hooks.
        """
        self.fixed = fixed
        self.hooks = [self.number_of_hooks(param) for _, param in self.named]

    def number_of_hooks(self, param: nn.Parameter) -> int:
        """Return how many hooks a parameter has that would not run if they came now."""
        number = len(param._post_accumulate_grad_hooks or ())  # DeepSpeed's or ours would be first
        if param in self.fixed:
            number += len(param._backward_hooks or ())
        return number

    @contextmanager
    def micro_step(self) -> Iterator[None]:
        """Let the gradients of a micro-step come, and put the stand-ins when they have."""
        self.take_back()
        self.in_micro_step = True
        try:
            yield
        finally:
            self.in_micro_step = False

        for i, (_, param) in enumerate(self.named):
            if param.requires_grad and param.grad is None:
                param.grad = self.stand_in(param)
            self.left[i] = param.grad

    def stand_in(self, param: nn.Parameter) -> StandIn:
        """Return the stand-in of all parameters with this shape."""
        key = (param.shape, param.dtype, param.device)  # at ZeRO-3 a parameter may be empty now
        if key not in self.stand_ins:
            self.stand_ins[key] = StandIn(param)
        return self.stand_ins[key]

    def take_back(self) -> None:
        """Remove the stand-ins. Raises UserError if the loop has changed a gradient, or has added a
        hook."""
        self.check()
        for i, (_, param) in enumerate(self.named):
            if isinstance(self.left[i], StandIn):
                param.grad = None
            self.left[i] = param.grad

    def check(self) -> None:
        """Raise UserError if the loop has set or cleared a gradient, or has added a hook."""
        for (name, param), left, hooks in zip(self.named, self.left, self.hooks, strict=True):
            if param.grad is not left:
                if param.grad is None:
                    raise UserError(
                        "zero_grad() between engine.micro_step() and engine.step() would clear "
                        f"nothing, because {DISCARD}"
                    )
                raise UserError(f"the training loop sets the gradient of {name}, and {CHANGE}")
            if self.number_of_hooks(param) != hooks:
                raise UserError(
                    f"{name} has got a gradient hook while training, which would not run: register "
                    f"it {ABOVE}"
                )

    def check_turn(self) -> None:
        """Raise UserError outside of a micro-step. Call this for each gradient that comes."""
        if not self.in_micro_step:
            raise UserError(OWN_BACKWARD)

    def watch_backward(self) -> None:
        """Check this for each gradient, where DeepSpeed's own hooks take it."""
        for _, param in self.named:
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(lambda param: self.check_turn())

    def refuse_clearing(self, set_to_none: bool = True) -> None:
        """Stand in for optimizer.zero_grad(), which has nothing to clear."""
        if any(isinstance(grad, StandIn) for grad in self.left):
            raise UserError(
                "optimizer.zero_grad() between engine.micro_step() and engine.step() would clear "
                f"nothing, because {DISCARD}"
            )
