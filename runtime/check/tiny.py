"""A tiny model of the class in use, and what a check says about it."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from runtime.errors import UserError

EQUAL = "equal"
DIFFERS = "differs"
NOT_CHECKED = "not checked"
RAISES = "raises"

VOCAB = 61  # not a multiple of 64, so the vocabulary is padded
BLOCK_SIZE = 32
T = 12  # tokens of a sequence
LAYERS = 4
OWN_FIELDS = {"block_size", "vocab_size", "n_layer", "n_head", "n_embd", "dropout", "bias", "gelu"}


@dataclass(frozen=True)
class Result:
    """What a check has found, in one sentence. status: EQUAL, DIFFERS, NOT_CHECKED or RAISES."""

    name: str
    status: str
    sentence: str


class Unchecked(Exception):
    """A check doesn't apply to this model. The message says why."""


class Different(Exception):
    """A check has found a difference. The message says what differs, and where to look."""


Check = Callable[["Tiny"], str]  # returns a sentence. Raises Different, Unchecked or UserError


@dataclass(frozen=True)
class Tiny:
    """Makes models of a class, all with the same weights."""

    model_class: type[nn.Module]
    config: Any  # a GPTConfig

    def model(self, seed: int = 0, **changed: Any) -> nn.Module:
        """Return a model as its constructor makes it. changed: fields of its configuration."""
        set_seed(seed)
        return self.model_class(replace(self.config, **changed))

    def stirred(self, **changed: Any) -> nn.Module:
        """Return a model whose weights are far from where they start: with biases of 0, much would
        be equal that isn't."""
        model = self.model(**changed)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for param in model.parameters():
                noise = torch.randn(param.shape, generator=generator)
                param.add_(0.1 * noise)
        return model


def tiny_of(model_class: type[nn.Module], config: Any) -> Tiny:
    """Return the Tiny of a class. config: keeps all fields but the sizes. Raises UserError."""
    names = {field.name for field in fields(config)}
    sizes = {"block_size": BLOCK_SIZE, "vocab_size": VOCAB, "n_layer": LAYERS}
    small = {"n_head": 2, "n_embd": 32}
    same_heads = {"n_head": config.n_head, "n_embd": 8 * config.n_head}
    if names <= OWN_FIELDS:
        shapes = [small, same_heads]
    else:  # fields of the user's own may belong to the number of heads
        shapes = [same_heads, small]
    if "dropout" in names:
        sizes["dropout"] = 0.0

    # The first shape with which its forward runs
    problem = ""
    for shape in shapes:
        try:
            tiny = Tiny(model_class, replace(config, **sizes, **shape))
            model = tiny.model().eval()
            with torch.no_grad():
                model(tokens())
            return tiny
        except Exception as error:  # whatever a model raises that can't have this shape
            problem = problem or describe_error(error)
    raise UserError(
        f"no tiny {model_class.__name__} could be made to check it ({problem}): let its forward "
        f"run with n_layer={LAYERS}, n_head={config.n_head} and n_embd={8 * config.n_head}"
    )


def default_config(config_class: type) -> Any:
    """Return a GPTConfig with the defaults of all fields. Raises UserError."""
    try:
        return config_class()
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{config_class.__name__} can't be made of its defaults ({error}): give each field a "
            "default"
        ) from None


def tokens(seed: int = 0, rows: int = 2, length: int = T) -> Tensor:
    """Return (rows, length) random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (rows, length), generator=generator)


def set_seed(seed: int) -> None:
    """Seed what a model on the CPU may draw from: PyTorch, Python and NumPy."""
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed GPUs, too
    random.seed(seed)
    np.random.seed(seed)


@contextmanager
def own_randomness() -> Iterator[None]:
    """Restore all random states at the end, so that a run draws what it would have drawn."""
    of_torch = torch.default_generator.get_state()
    of_python = random.getstate()
    of_numpy = np.random.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(of_torch)
        random.setstate(of_python)
        np.random.set_state(of_numpy)


def make_check(name: str, check: Check, tiny: Tiny) -> Result:
    """Return the Result of a check, also if the model raises."""
    try:
        return Result(name, EQUAL, check(tiny))
    except Unchecked as reason:
        return Result(name, NOT_CHECKED, str(reason))
    except (Different, UserError) as difference:
        return Result(name, DIFFERS, str(difference))
    except Exception as error:  # the model's own
        return Result(name, RAISES, describe_error(error))


def describe_error(error: BaseException) -> str:
    """Return an exception as one line, with the innermost function that isn't PyTorch's."""
    lines = str(error).splitlines() or [""]
    place = ""
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if "site-packages" not in code.co_filename:
            place = f" in {code.co_qualname}, line {trace.tb_lineno}"
        trace = trace.tb_next
    return f"{type(error).__name__}: {lines[0]}{place}"


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Return the gradient of a loss for each parameter that is trained; 0 for one that gets
    none."""
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    found = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
    grads = {}
    for (name, param), grad in zip(params.items(), found, strict=True):
        grads[name] = torch.zeros_like(param) if grad is None else grad
    return grads


def differing(
    found: dict[str, Tensor], wanted: dict[str, Tensor], rtol: float = 1e-4
) -> str | None:
    """Return the name of the tensor that is farthest from the wanted one, or None if all are near.

    rtol: of the largest element. It is at least 1e-5 of the largest one of all tensors.
    """
    largest = max((tensor.abs().max().item() for tensor in wanted.values()), default=0.0)
    worst = None
    worst_ratio = 1.0
    for name, tensor in wanted.items():
        if name not in found or found[name].shape != tensor.shape:
            return name
        limit = rtol * tensor.abs().max().item() + 1e-5 * largest + 1e-9
        ratio = (found[name] - tensor).abs().max().item() / limit
        if not ratio <= worst_ratio:  # also NaN
            worst = name
            worst_ratio = ratio
    return worst


def owner_of(model: nn.Module, name: str) -> str:
    """Return "CLASS.forward" of the module of model.py that uses a parameter."""
    path = name.rpartition(".")[0]
    while path:
        kind = type(model.get_submodule(path))
        if not kind.__module__.startswith("torch."):
            return f"{kind.__name__}.forward"
        path = path.rpartition(".")[0]
    return f"{type(model).__name__}.forward"
