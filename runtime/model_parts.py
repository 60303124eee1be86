"""Parameters and buffers of a model, whatever its class: which names are one parameter, and a model
whose parameters have no memory yet.

Two modules share a parameter if they hold the same object. Nothing here goes by names.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from runtime.errors import UserError


@contextlib.contextmanager
def unset_as_nan() -> Iterator[None]:
    """Let torch.empty() give NaN, to recognize parameters that nobody has set.

    Otherwise it has what was in memory, which often is 0.
    """
    # torch.use_deterministic_algorithms() would do it, too, but imports torch.compile: a second
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


@dataclass(frozen=True)
class ModelTensors:
    """The names and shapes of what a model holds. A model can take a tag's tensors if both are
    equal."""

    params: dict[str, torch.Size]  # under each of its names
    ties: frozenset[frozenset[str]]  # the names of each parameter that has several
    buffers: dict[str, torch.Size]  # persistent ones

    def without(self, *suffixes: str) -> "ModelTensors":
        """Return these tensors without the parameters whose names have these ends."""
        params = {name: shape for name, shape in self.params.items() if not name.endswith(suffixes)}
        ties = frozenset(group for group in self.ties if group <= params.keys())
        return ModelTensors(params, ties, self.buffers)

    def differences(self, other: "ModelTensors") -> list[str]:
        """Return what differs, the names of tensors or "A is B" for a parameter that has both
        names."""
        found = []
        for ours, theirs in ((self.params, other.params), (self.buffers, other.buffers)):
            found += [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
        # Without other names or shapes, the ties may differ
        if not found:
            found = [" is ".join(sorted(group)) for group in self.ties ^ other.ties]
        return found


def tensors_of(
    model: nn.Module, shape_of: Callable[[nn.Parameter], torch.Size] = Tensor.size
) -> ModelTensors:
    """Return the ModelTensors of a model.

    shape_of: gives a parameter's shape. Within an engine at ZeRO-3 it is layout.shape_of, because
    parameters are empty between steps.
    """
    params = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        params[name] = shape_of(param)
    buffers = {name: buffer.shape for name, buffer in persistent_buffers(model).items()}
    return ModelTensors(params, frozenset(map(frozenset, ties_of(model))), buffers)


def count_elements(
    model: nn.Module, shape_of: Callable[[nn.Parameter], torch.Size] = Tensor.size
) -> int:
    """Return how many numbers a model's parameters and persistent buffers have. shape_of: as for
    tensors_of()."""
    tensors = tensors_of(model, shape_of)

    # A parameter with several names counts once, by its first
    again = {name for group in tensors.ties for name in sorted(group)[1:]}
    shapes = [shape for name, shape in tensors.params.items() if name not in again]
    return sum(shape.numel() for shape in [*shapes, *tensors.buffers.values()])


def ties_of(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several, in the order of the modules."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    return [group for group in names.values() if len(group) > 1]


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return {name: buffer} of the buffers that a state_dict has. A shared one has all its
    names."""
    params = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = dict(model.named_buffers(remove_duplicate=False))
    saved = model.state_dict(keep_vars=True)
    return {name: buffers[name] for name in saved if name in buffers and name not in params}


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set a model to evaluation. Afterwards, each module is as before: some may stay in eval()
    while the others train, such as a frozen part with dropout."""
    # Each module's own mode, not that of the model
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def check_extra_state(model: nn.Module) -> None:
    """Raise UserError if a module has a state that is neither parameter nor buffer: no reader of
    our checkpoints could give it back."""
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise UserError(
                f"{name or 'the model'} has get_extra_state ({type(module).__name__}), and "
                "checkpoints hold parameters and buffers alone: keep that state in a tensor with "
                "register_buffer"
            )


@torch.no_grad()
def replace_parameters(model: nn.Module, make: Callable[[str, nn.Parameter], Tensor]) -> None:
    """Replace all parameters by make(name, parameter). One with several names is made once, by its
    first name, so its modules still share it."""
    # From each old parameter to its new one
    made: dict[nn.Parameter, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        own = list(module.named_parameters(recurse=False, remove_duplicate=False))
        for name, param in own:
            if param not in made:
                tensor = make(f"{prefix}.{name}" if prefix else name, param)
                made[param] = like_parameter(param, tensor)
            setattr(module, name, made[param])


def replace_parameter(model: nn.Module, old: nn.Parameter, new: Tensor) -> None:
    """Replace one parameter by a tensor, in all modules that share it."""
    param = like_parameter(old, new)
    for module in model.modules():
        for name, own in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if own is old:
                setattr(module, name, param)


def like_parameter(param: nn.Parameter, tensor: Tensor) -> nn.Parameter:
    """Return a tensor as a parameter that is trained if `param` is, with its attributes."""
    new = nn.Parameter(tensor.detach(), requires_grad=param.requires_grad)
    new.__dict__.update(param.__dict__)
    return new


def without_memory(make: Callable[[], nn.Module], device: torch.device | str = "cpu") -> nn.Module:
    """Return make(), a model, with its parameters on the meta device: they take no memory, and no
    time to initialize. All other tensors, such as buffers, are made on `device` as usual.

    If they were computed from parameters, or can't be, the parameters are on `device`, too.
    """
    # First without memory; a model that needs numbers is made again with it
    try:
        with torch.device(device), parameters_on_meta():
            model = make()
    except (NotImplementedError, RuntimeError):  # it reads numbers of a parameter
        model = None
    if model is None or any(tensor.is_meta for tensor in other_tensors(model)):
        with torch.device(device):
            model = make()
    return model


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Put each parameter that a module gets on the meta device, before it is initialized."""
    register = nn.Module.register_parameter
    on_meta = WeakTensorKeyDictionary()  # of a parameter that two modules get: it stays one

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is None or param.is_meta:
            register(self, name, param)
            return
        if param not in on_meta:
            on_meta[param] = like_parameter(param, param.to("meta"))
        register(self, name, on_meta[param])

    # As long as the context lasts. unset_as_nan() would write into memory that is given back at
    # once
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register
        torch.utils.deterministic.fill_uninitialized_memory = fills


def other_tensors(model: nn.Module) -> list[Tensor]:
    """Return the buffers of a model, and the tensors that its modules have as plain attributes."""
    # Tensors that are neither parameters nor buffers
    tensors = list(model.buffers())
    for module in model.modules():
        tensors += [value for value in vars(module).values() if torch.is_tensor(value)]
    return tensors
