"""What the proof of steady.py knows about the values of a function that it reads.

FIXED    numbers, strings, shapes: the same in every micro-step
DEVICE   the device or the dtype of a tensor, or a dtype of torch: also fixed
DATA     tensors, whose numbers differ
NONE     None, written in the code
ABSENT   None, as an attribute
Objects  modules, functions and configurations, the objects themselves
Items    a tuple or a list, or named values
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field, is_dataclass
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

import torch
from torch import nn
from torch.nn.attention import SDPBackend

from runtime.kernels.edits import is_pytorchs, own_class

PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, SDPBackend)
# whose functions have no state, but see steady_names.py
PYTHON_MODULES = ("torch", "math", "contextlib")
CALLABLE = (FunctionType, MethodType, BuiltinFunctionType, type)


class NotSteady(Exception):
    """Why something may differ from one micro-step to the next."""


class Kind(Enum):
    FIXED = "fixed"
    DEVICE = "device"
    DATA = "data"
    NONE = "none"
    ABSENT = "absent"


FIXED = Kind.FIXED
DEVICE = Kind.DEVICE
DATA = Kind.DATA
NONE = Kind.NONE
ABSENT = Kind.ABSENT


@dataclass(frozen=True)
class Objects:
    """One of these objects."""

    objects: tuple[object, ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Objects) and self.ids() == other.ids()

    def __hash__(self) -> int:
        return hash(self.ids())

    def ids(self) -> frozenset[int]:
        return frozenset(map(id, self.objects))


@dataclass
class Items:
    """The items of a tuple or a list. is_exact: there are as many of them, in this order. named:
    those of a dict whose keys are written in the code. is_own: of the function that is being
    read."""

    values: list = field(default_factory=list)
    is_exact: bool = True
    named: dict = field(default_factory=dict)
    is_own: bool = True

    def add(self, value: "Value") -> None:
        """Take one more item, such as in a loop that appends."""
        if not self.is_own:
            raise NotSteady("changes a list of another function or of a module")
        self.values = [join(*self.values, value)]
        self.is_exact = False


Value = Kind | Objects | Items


def is_plain(value: object) -> bool:
    """Return whether a value is a number, a string, None, or a tuple, list or dict of these."""
    if isinstance(value, (tuple, list)):
        return all(map(is_plain, value))
    if type(value) is dict:
        return all(map(is_plain, value.values())) and all(map(is_plain, value))
    return isinstance(value, PLAIN)


def value_of(thing: object, what: str) -> Value:
    """Return the Value of an attribute or a global. Raises NotSteady if it isn't of a known
    kind."""
    if thing is None:
        return ABSENT
    if isinstance(thing, torch.dtype):
        return DEVICE
    if type(thing) is list and is_plain(thing):
        return Items([FIXED] if thing else [], is_exact=False, is_own=False)
    if type(thing) is dict and is_plain(thing):
        return Items(named=dict.fromkeys(thing, FIXED), is_own=False)
    if is_plain(thing):
        return FIXED
    if torch.is_tensor(thing):
        return DATA
    if isinstance(thing, (nn.Module, ModuleType, *CALLABLE)) or is_dataclass(thing):
        return Objects((thing,))
    if isinstance(thing, (list, tuple)) and all(isinstance(part, nn.Module) for part in thing):
        return Items([Objects(tuple(thing))] if thing else [], is_exact=False, is_own=False)
    raise NotSteady(f"{what} is a {type(thing).__name__}, which may change")


def join(*values: Value) -> Value:
    """Return a Value that says what is true of each of these."""
    known = [value for value in values if value is not ABSENT]
    if not known:
        return ABSENT if values else FIXED
    if all(isinstance(value, Items) for value in known):
        return join_items(known)
    objects = [value for value in known if isinstance(value, Objects)]
    if objects:
        if any(value is not NONE and not isinstance(value, Objects) for value in known):
            raise NotSteady(
                "a name is a module or a function at one time, and something else at another"
            )
        things = {id(thing): thing for value in objects for thing in value.objects}
        return Objects(tuple(things.values()))
    if any(isinstance(value, Items) for value in known):
        return join(*(item_of(value) for value in known))
    if DATA in known:
        return DATA
    if all(value is known[0] for value in known):
        return known[0]
    return FIXED


def join_items(all_items: Sequence[Items]) -> Items:
    """Return Items that hold what any of these hold. To change it would change one of several
    lists."""
    first = all_items[0]
    if all(items is first for items in all_items):
        return first
    lengths = {len(items.values) for items in all_items}
    names = {frozenset(items.named) for items in all_items}
    if len(lengths) == 1 and len(names) == 1 and all(items.is_exact for items in all_items):
        values = [join(*parts) for parts in zip(*(items.values for items in all_items))]
        named = {name: join(*(items.named[name] for items in all_items)) for name in first.named}
        return Items(values, named=named, is_own=False)
    parts = [value for items in all_items for value in (*items.values, *items.named.values())]
    return Items([join(*parts)] if parts else [], is_exact=False, is_own=False)


def item_of(value: Value) -> Value:
    """Return what a loop over a value gives. Raises NotSteady for what has no fixed order."""
    if isinstance(value, Items):
        return join(*value.values, *value.named.values())
    if isinstance(value, Objects):
        items: list[object] = []
        for thing in value.objects:
            if not isinstance(thing, (nn.ModuleList, nn.Sequential)):
                raise NotSteady(f"loops over a {type(thing).__name__}")
            items += list(thing)
        return Objects(tuple(items)) if items else ABSENT
    return value


def copied(value: Value, lent: bool = False) -> Value:
    """Return a value whose lists are other ones. lent: as another function gets it, which may not
    change the lists of its caller."""
    if not isinstance(value, Items):
        return value
    values = [copied(part, lent) for part in value.values]
    named = {name: copied(part, lent) for name, part in value.named.items()}
    return Items(values, value.is_exact, named, value.is_own and not lent)


def is_fixed(value: Value) -> bool:
    """Return whether a value is the same in every micro-step, and a comparison with it, too."""
    if isinstance(value, Items):
        return all(map(is_fixed, (*value.values, *value.named.values())))
    return value in (FIXED, DEVICE, NONE, ABSENT)


def attribute(thing: object, name: str) -> object:
    """Return an attribute of an object as it is, without running code. Raises NotSteady if that
    isn't possible. A property is returned as a method, to be called."""
    if isinstance(thing, ModuleType):
        if thing.__name__.partition(".")[0] not in PYTHON_MODULES:
            raise NotSteady(f"uses {thing.__name__}, which may return something else each time")
        return getattr(thing, name)
    kind = type(thing)
    is_known = isinstance(thing, nn.Module) or is_dataclass(thing)
    if isinstance(thing, type) or not is_known:
        raise NotSteady(
            f"reads {name} of {getattr(thing, '__name__', kind.__name__)}, which may change"
        )
    static = inspect.getattr_static(kind, name, None)
    if isinstance(static, property):
        return MethodType(static.fget, thing)
    custom = getattr(kind, "__getattribute__", None)
    if custom not in (object.__getattribute__, nn.Module.__getattribute__):
        raise NotSteady(f"{kind.__name__} has a __getattribute__ of its own")
    if not hasattr(thing, name):
        raise NotSteady(f"reads {name}, which isn't set when the run begins")
    return getattr(thing, name)


def is_property(thing: object, name: str) -> bool:
    """Return whether an attribute is computed by a property."""
    return isinstance(inspect.getattr_static(type(thing), name, None), property)


def is_torch_function(function: object) -> bool:
    """Return whether a function is one of PyTorch, not one that somebody put in its place."""
    if isinstance(function, FunctionType):
        return function.__globals__.get("__name__", "").split(".")[0] == "torch"
    return isinstance(function, BuiltinFunctionType) and (function.__module__ or "").startswith(
        "torch"
    )


def is_layer(module: nn.Module) -> bool:
    """Return whether a module's class is one of PyTorch's."""
    return is_pytorchs(own_class(module))


def key_of(value: Value) -> object:
    """Return what two Values share if they say the same."""
    if isinstance(value, Objects):
        return value.ids()
    if isinstance(value, Items):
        named = tuple((name, key_of(part)) for name, part in sorted(value.named.items(), key=str))
        return value.is_exact, value.is_own, tuple(map(key_of, value.values)), named
    return value
