"""Find the module where two runs of a model begin to differ."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Select = Callable[[Tensor], Tensor]  # of the positions that have to be the same
ATOL = 1e-4  # of activations in float32


@dataclass(frozen=True)
class Call:
    """One call of a module. given, returned: its first tensor, or None."""

    given: Tensor | None
    returned: Tensor | None


def calls_of(model: nn.Module, run: Callable[[], object]) -> dict[str, list[Call]]:
    """Return the calls of each module while run() lasts, in the order in which they end."""
    calls: dict[str, list[Call]] = defaultdict(list)

    def note(name: str, args: tuple, returned: object) -> None:
        given = args[0] if args and torch.is_tensor(args[0]) else None
        output = returned if torch.is_tensor(returned) else None
        calls[name].append(Call(given, output))

    hooks = []
    for name, module in model.named_modules():
        hook = lambda _, args, returned, name=name: note(name, args, returned)  # noqa: E731
        hooks.append(module.register_forward_hook(hook))
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def where_differs(
    model: nn.Module,
    first: dict[str, list[Call]],
    select_first: Select,
    second: dict[str, list[Call]],
    select_second: Select,
) -> str:
    """Return the function that returns something else for the same input, with its module."""
    for name, calls in first.items():
        for one, other in zip(calls, second.get(name, [])):
            inputs_agree = agree(one.given, select_first, other.given, select_second)
            outputs_agree = agree(one.returned, select_first, other.returned, select_second)
            if inputs_agree and outputs_agree is False:
                kind = type(model.get_submodule(name)).__name__
                return f"{kind}.forward ({name})" if name else f"{kind}.forward"
    return f"{type(model).__name__}.forward"


def agree(
    one: Tensor | None, select_one: Select, other: Tensor | None, select_other: Select
) -> bool | None:
    """Return whether two tensors are near where they have to be, or None if that isn't known."""
    if one is None or other is None or one.dtype != other.dtype:
        return None
    try:
        one = select_one(one)
        other = select_other(other)
    except (IndexError, RuntimeError):  # no positions
        return None
    if one.shape != other.shape:
        return None
    return torch.allclose(one.float(), other.float(), rtol=1e-4, atol=ATOL)


def at_position(t: int) -> Select:
    """Return what takes position t of tokens (..., T) or activations (..., T, C)."""

    def select(tensor: Tensor) -> Tensor:
        return tensor.select(-2 if tensor.is_floating_point() else -1, t)

    return select


def up_to_position(t: int) -> Select:
    """Return what takes the positions 0 to t of tokens (..., T) or activations (..., T, C)."""

    def select(tensor: Tensor) -> Tensor:
        return tensor.narrow(-2 if tensor.is_floating_point() else -1, 0, t + 1)

    return select
