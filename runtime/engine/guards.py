"""Watch what a CUDA graph takes for fixed: what Python reads in a micro-step, besides tensors.

A graph repeats the numbers and choices of the micro-step that was captured. A training loop may
change them afterwards, such as model.aux_weight, or the p of an nn.Dropout.
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from types import FunctionType

import torch
from torch import nn

from runtime.kernels.edits import is_pytorchs, own_class
from runtime.kernels.steady_values import is_plain

MISSING = object()
# By id(): classes and configurations, and (the globals of a file, a name in them)
Seen = set[int | tuple[int, str]]
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class Entry:
    """owner[name] has to stay `value`. by_identity: the same object, not an equal one."""

    owner: Mapping
    name: str
    value: object
    label: str  # for messages
    by_identity: bool

    def is_changed(self) -> bool:
        """Return whether it is no longer so."""
        now = self.owner.get(self.name, MISSING)
        if now is self.value:
            return False
        if self.by_identity or type(now) is not type(self.value):
            return True
        return now != self.value


class Guards:
    """The entries of a model. Make them before a micro-step is captured."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        # The names that the model's functions read
        functions = list(functions_of(model))
        names = {"training"}
        for function in functions:
            names.update(function.__code__.co_names)
        self.names = names

        # What these names are now, in modules and in files
        self.entries: list[Entry] = []
        seen: Seen = set()
        for path, module in model.named_modules():
            self.watch_module(path or "model", module, seen)
        for function in functions:
            self.watch_globals(function, seen)

        # What after_capture() and changed() compare with
        self.tensors_before = list(tensors_of(model))
        self.hooks = [getattr(module, name) for module in model.modules() for name in HOOKS]
        self.n_hooks = sum(map(len, self.hooks))

    def watch_module(self, path: str, module: nn.Module, seen: Seen) -> None:
        """Watch the attributes of a module that its functions read, its parts and its buffers."""
        names = self.names
        if is_pytorchs(own_class(module)):
            names = {"training", "p", "eps", *getattr(module, "__constants__", ())}
        self.watch_values(vars(module), names, path)
        for owner in (module._modules, module._buffers):
            for name, value in owner.items():
                self.entries.append(Entry(owner, name, value, f"{path}.{name}", True))

        # Its classes, and the configurations that it holds
        for kind in type(module).__mro__:
            if id(kind) not in seen and not kind.__module__.startswith(("torch.", "builtins")):
                seen.add(id(kind))
                self.watch_values(vars(kind), self.names, kind.__name__)
        for name, value in vars(module).items():
            if is_dataclass(value) and not isinstance(value, type) and id(value) not in seen:
                seen.add(id(value))
                self.watch_values(vars(value), self.names, f"{path}.{name}")

    def watch_values(self, owner: Mapping, names: set[str], label: str) -> None:
        """Watch those of these names that are numbers, strings, None, or tensors."""
        for name in names & owner.keys():
            value = owner[name]
            path = f"{label}.{name}"
            if torch.is_tensor(value):
                self.entries.append(Entry(owner, name, value, path, True))
            elif is_plain(value):
                self.entries.append(Entry(owner, name, copy.deepcopy(value), path, False))

    def watch_globals(self, function: FunctionType, seen: Seen) -> None:
        """Watch the constants and functions that a function finds in its file."""
        owner = function.__globals__
        for name in function.__code__.co_names:
            value = owner.get(name, MISSING)
            if name not in owner or (id(owner), name) in seen:
                continue
            seen.add((id(owner), name))
            if is_plain(value):
                self.entries.append(Entry(owner, name, copy.deepcopy(value), name, False))
            elif isinstance(value, FunctionType):
                self.entries.append(Entry(owner, name, value, name, True))

    def cpu_tensor(self) -> str | None:
        """Return the name of a tensor on the CPU that a micro-step may read, or None. A graph would
        keep its numbers."""
        for entry in self.entries:
            if torch.is_tensor(entry.value) and entry.value.device.type == "cpu":
                return entry.label
        return None

    def after_capture(self) -> list[tuple[dict, str, torch.Tensor]]:
        """Return [(owner, name, tensor)] of the attributes that the capture has set, such as
        metrics: each replay writes these tensors. They aren't watched from now on."""
        before = {(id(owner), name): tensor for owner, name, tensor in self.tensors_before}
        self.tensors_before = []
        made = []
        for owner, name, tensor in tensors_of(self.model):
            if before.get((id(owner), name)) is not tensor:
                made.append((owner, name, tensor))
        left = {(id(owner), name) for owner, name, _ in made}
        kept = [entry for entry in self.entries if (id(entry.owner), entry.name) not in left]
        self.entries = kept
        return made

    def changed(self) -> str | None:
        """Return what has changed, such as "model.aux_weight", or None."""
        for entry in self.entries:
            # Most are the same object, and this runs in each micro-step
            if entry.owner.get(entry.name, MISSING) is not entry.value and entry.is_changed():
                return entry.label
        if sum(map(len, self.hooks)) != self.n_hooks:
            return "the number of hooks"
        return None


def tensors_of(model: nn.Module) -> Iterator[tuple[dict, str, torch.Tensor]]:
    """Return (owner, name, tensor) of the buffers and of the tensors that are plain attributes."""
    for module in model.modules():
        for owner in (vars(module), module._buffers):
            for name, value in owner.items():
                if torch.is_tensor(value):
                    yield owner, name, value


def functions_of(model: nn.Module) -> Iterator[FunctionType]:
    """Return the functions that a model's modules may call and that aren't PyTorch's."""
    # The methods of its classes
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    found: list[FunctionType] = []
    for kind in kinds:
        for value in vars(kind).values():
            value = value.fget if isinstance(value, property) else value
            if isinstance(value, FunctionType):
                found.append(value)

    # And the functions that these call
    seen: set[FunctionType] = set()
    while found:
        function = found.pop()
        package = function.__globals__.get("__name__", "").partition(".")[0]
        if function in seen or package == "torch":
            continue
        seen.add(function)
        yield function
        for name in function.__code__.co_names:
            called = function.__globals__.get(name)
            if isinstance(called, FunctionType):
                found.append(called)
