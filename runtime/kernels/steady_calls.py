"""What steady.py knows about calls: which functions do the same each time, and what they return."""

import ast
import contextlib
import inspect
import math
from types import BuiltinFunctionType, FunctionType, MethodType

import torch
from torch import nn
from torch.nn.attention import sdpa_kernel
from torch.utils.checkpoint import checkpoint

from runtime.hardware import attention_backends
from runtime.kernels import edits
from runtime.kernels import steady_names as names
from runtime.kernels.steady_values import (
    ABSENT,
    DATA,
    DEVICE,
    FIXED,
    NONE,
    Items,
    NotSteady,
    Objects,
    Value,
    attribute,
    copied,
    is_fixed,
    is_plain,
    is_torch_function,
    item_of,
    join,
    key_of,
)

# Their results depend on their arguments alone
CONTEXTS = (
    contextlib.nullcontext,
    torch.no_grad,
    torch.enable_grad,
    torch.autocast,
    sdpa_kernel,
    attention_backends,
)
SEQUENCES = (list, tuple, reversed)
WAITS = "which waits for the GPU, or is not known to be the same each time"


class Calls:
    """Follows calls. What is common to all of them is here."""

    def __init__(self) -> None:
        # in which this is, the innermost last
        self.functions: list[tuple[FunctionType, ast.FunctionDef]] = []
        self.returned: list[list[Value]] = []  # by each of them
        self.known: dict[object, Value] = {}  # what calls that have been read return
        self.open: set[object] = set()  # calls that are being read
        self.read: set[str] = set()  # attributes of modules
        self.written: dict[str, str] = {}  # {attribute of a module: where it is set}
        # attributes that are None in the branches in which this is
        self.lazy: list[str | None] = []
        self.at: ast.AST | None = None

    def place(self) -> str:
        """Return the function and the line of its file in which this is."""
        function, _ = self.functions[-1]
        line = function.__code__.co_firstlineno + getattr(self.at, "lineno", 1) - 1
        return f"{function.__qualname__.rpartition('<locals>.')[2]}, line {line}"

    def with_place(self, reason: NotSteady) -> NotSteady:
        """Return a reason that begins with its place, the innermost function's."""
        if getattr(reason, "has_place", False):
            return reason
        placed = NotSteady(f"{self.place()}: {reason}")
        placed.has_place = True
        return placed

    # Calls

    def call(
        self, callee: Value, args: list[Value], named: dict[str, Value], node: ast.Call
    ) -> Value:
        """Return what a call returns. node: for what only the source tells."""
        if callee in (NONE, ABSENT):
            return DATA  # a call that isn't made: the attribute is None
        if not isinstance(callee, Objects):
            raise NotSteady(f"calls {ast.unparse(node.func)}, which may change")
        modules = [thing for thing in callee.objects if isinstance(thing, nn.Module)]
        methods: dict[FunctionType, list[object]] = {}
        found: list[Value] = []
        for thing in callee.objects:
            if isinstance(thing, MethodType):
                methods.setdefault(thing.__func__, []).append(thing.__self__)
            elif not isinstance(thing, nn.Module):
                found.append(self.call_one(thing, args, named, node))
        for function, owners in methods.items():
            if is_torch_function(function):
                raise NotSteady(f"calls {ast.unparse(node.func)}, {WAITS}")
            found.append(self.call_function(function, [Objects(tuple(owners)), *args], named))
        if modules:
            found.append(self.call_modules(modules, args, named))
        return join(*found)

    def call_one(
        self, function: object, args: list[Value], named: dict[str, Value], node: ast.Call
    ) -> Value:
        """Return what a function or a class returns."""
        text = ast.unparse(node.func)
        if not isinstance(function, (FunctionType, BuiltinFunctionType, type)):
            raise NotSteady(f"calls {text}, {WAITS}")
        if function in CONTEXTS:
            if not all(map(is_fixed, (*args, *named.values()))):
                raise NotSteady(f"calls {text} with a tensor")
            return FIXED
        if function is checkpoint:
            named = {name: value for name, value in named.items() if name != "use_reentrant"}
            return self.call(args[0], args[1:], named, node)
        if isinstance(function, FunctionType) and function.__name__ == "chunked_loss":
            return self.call_loss(function, args)
        if is_torch_function(function):
            return self.call_torch(function.__name__, args, named, node)
        if (
            getattr(math, getattr(function, "__name__", ""), None) is function
            or function in names.BUILTINS
        ):
            return self.call_fixed(text, args, named)
        if function in (enumerate, zip, range, sum, isinstance, *SEQUENCES):
            return self.call_builtin(function, args, named)
        if isinstance(function, FunctionType):
            return self.call_function(function, args, named)
        raise NotSteady(f"calls {text}, {WAITS}")

    def call_fixed(self, text: str, args: list[Value], named: dict[str, Value]) -> Value:
        """Return what a function of numbers returns. Of tensors, it would need the numbers."""
        if text == "len" and not named:
            return FIXED
        if not all(map(is_fixed, (*args, *named.values()))):
            raise NotSteady(f"{text}() of a tensor waits for the GPU")
        return FIXED

    def call_builtin(self, function: object, args: list[Value], named: dict[str, Value]) -> Value:
        """Return what one of Python's functions of sequences returns."""
        if function is isinstance:
            return FIXED
        if function is range:
            self.call_fixed("range", args, named)
            return Items([FIXED], is_exact=False)
        if function is sum:
            total = item_of(args[0])
            if isinstance(total, (Objects, Items)):
                raise NotSteady("sum() of something that is no tensor and no number")
            return DATA if DATA in (total, *args[1:]) else FIXED
        if function is enumerate:
            return Items([Items([FIXED, item_of(args[0])])], is_exact=False)
        if function is zip:
            return Items([Items([item_of(value) for value in args])], is_exact=False)
        if not args:
            return Items()
        return Items([item_of(args[0])], is_exact=False)

    def call_torch(
        self, name: str, args: list[Value], named: dict[str, Value], node: ast.Call
    ) -> Value:
        """Return what a function of torch or torch.nn.functional returns."""
        if name in names.FIXED_FUNCTIONS:
            return FIXED
        if name not in names.FUNCTIONS:
            raise NotSteady(f"calls {ast.unparse(node.func)}, {WAITS}")
        sizes = args if name in names.NEED_DEVICE else args[1:]
        self.check_arguments(name, sizes, named)
        if name in names.NEED_DEVICE and "device" not in named:
            raise NotSteady(f"calls {ast.unparse(node.func)} without a device, so on the CPU")
        if name == "where" and len(args) < 3:
            raise NotSteady(f"calls {ast.unparse(node.func)} of a condition alone, {WAITS}")
        return DATA

    def call_tensor_method(self, name: str, args: list[Value], named: dict[str, Value]) -> Value:
        """Return what a method of a tensor returns."""
        if name in names.FIXED_METHODS:
            return FIXED
        if name not in names.TENSOR_METHODS:
            raise NotSteady(f"calls .{name}(), {WAITS}")
        self.check_arguments(name, args, named)
        if name == "to" and any(value not in (DEVICE, DATA) for value in (*args, *named.values())):
            raise NotSteady(
                "calls .to() with something that is no dtype and of no tensor, so maybe the CPU"
            )
        return DATA

    def check_arguments(self, name: str, sizes: list[Value], named: dict[str, Value]) -> None:
        """Raise NotSteady for arguments that a function of PyTorch reads on the CPU."""
        if any(isinstance(value, Objects) for value in (*sizes, *named.values())):
            raise NotSteady(f"{name} of something that is no tensor and no number")
        if name in names.FIXED_ARGUMENTS and not all(map(is_fixed, (*sizes, *named.values()))):
            raise NotSteady(f"{name} with a size that may depend on the data")
        if "generator" in named or "out" in named:
            raise NotSteady(f"{name} with a generator or out")
        if named.get("device", DEVICE) is not DEVICE:
            raise NotSteady(f"{name} with a device that is not that of a tensor, so maybe the CPU")

    def call_list_method(self, items: Items, name: str, args: list[Value]) -> Value:
        """Return what a method of a list that was made here returns."""
        if name == "append" and len(args) == 1:
            items.add(args[0])
            return NONE
        if name == "pop" and items.is_own and not items.named and all(map(is_fixed, args)):
            items.is_exact = False
            return join(*items.values) if items.values else ABSENT
        raise NotSteady(f".{name}() is not known to be the same each time")

    def call_loss(self, chunked_loss: FunctionType, args: list[Value]) -> Value:
        """Return what chunked_loss returns. It calls the losses of the head."""
        unknown = edits.unknown_in_chunks(chunked_loss)
        if unknown:
            raise NotSteady(f"{unknown} in use is not the original one of runtime/loss.py")
        head = args[0]
        if not isinstance(head, Objects):
            raise NotSteady("chunked_loss without a head")
        for module in head.objects:
            method = attribute(module, "losses")
            self.call_function(method.__func__, [Objects((module,)), DATA, DATA], {})
        return DATA

    def call_modules(
        self, modules: list[nn.Module], args: list[Value], named: dict[str, Value]
    ) -> Value:
        """Return what modules return. Those of one class are read together."""
        by_forward: dict[FunctionType, list[nn.Module]] = {}
        found: list[Value] = []
        for module in modules:
            kind = edits.own_class(module)
            reason = edits.why_not_called(kind)
            if reason:
                raise NotSteady(reason)
            forward = inspect.getattr_static(kind, "forward", None)
            if kind in names.LAYERS or kind.__module__ == "runtime.lora":
                found.append(self.call_layer(module, args))
            elif kind is nn.Sequential:
                found.append(self.call_sequential(module, args))
            elif edits.is_pytorchs(kind) or not isinstance(forward, FunctionType):
                raise NotSteady(f"calls a {kind.__name__}, {WAITS}")
            else:
                by_forward.setdefault(forward, []).append(module)
        for forward, several in by_forward.items():
            found.append(self.call_function(forward, [Objects(tuple(several)), *args], named))
        return join(*found)

    def call_layer(self, module: nn.Module, args: list[Value]) -> Value:
        """Return what a layer of PyTorch returns."""
        if getattr(module, "max_norm", None) is not None:
            raise NotSteady("an Embedding with max_norm, which waits for the GPU")
        if any(isinstance(value, Objects) for value in args):
            raise NotSteady(f"calls a {type(module).__name__} with something that is no tensor")
        return DATA

    def call_sequential(self, module: nn.Sequential, args: list[Value]) -> Value:
        """Return what an nn.Sequential returns."""
        value = args[0]
        for part in module:
            value = self.call_modules([part], [value], {})
        return value

    def call_function(
        self, function: FunctionType, args: list[Value], named: dict[str, Value]
    ) -> Value:
        """Return what a function that isn't PyTorch's returns. Each is read once per kinds of
        arguments."""
        names_of = tuple(sorted((name, key_of(value)) for name, value in named.items()))
        key = (function, tuple(map(key_of, args)), names_of)
        if key in self.known:
            return copied(self.known[key])
        if key in self.open:
            raise NotSteady(f"{function.__qualname__} calls itself")
        self.open.add(key)
        own_args = [copied(value, lent=True) for value in args]
        own_named = {name: copied(value, lent=True) for name, value in named.items()}
        env = self.bind(function, own_args, own_named)
        at = self.at
        self.known[key] = self.read_function(function, env)
        self.at = at
        return copied(self.known[key])

    def bind(
        self, function: FunctionType, args: list[Value], named: dict[str, Value]
    ) -> dict[str, Value]:
        """Return {parameter: Value} of a call. Raises NotSteady if the arguments don't fit."""
        signature = inspect.signature(function)
        try:
            bound = signature.bind(*args, **named)
        except TypeError as error:
            raise NotSteady(f"calls {function.__qualname__} with {error}") from None
        env: dict[str, Value] = {}
        for name, parameter in signature.parameters.items():
            if name in bound.arguments:
                env[name] = bound.arguments[name]
                if parameter.kind is parameter.VAR_POSITIONAL:
                    env[name] = Items(list(env[name]))
                elif parameter.kind is parameter.VAR_KEYWORD:
                    env[name] = Items(named=dict(env[name]))
            elif parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                env[name] = Items()
            elif parameter.default is None:
                env[name] = NONE
            elif is_plain(parameter.default) and not isinstance(parameter.default, (list, dict)):
                env[name] = FIXED
            else:
                raise NotSteady(
                    f"{function.__qualname__} has a default value of {name} that may change"
                )
        return env

    def call_super(
        self, name: str, env: dict[str, Value], args: list[Value], named: dict[str, Value]
    ) -> Value:
        """Return what super().name(...) returns in the function in which this is."""
        function, _ = self.functions[-1]
        free = function.__code__.co_freevars
        if "__class__" not in free:
            raise NotSteady("super() outside of a class")
        around = function.__closure__[free.index("__class__")].cell_contents
        own = env[function.__code__.co_varnames[0]]
        by_method: dict[FunctionType, list[object]] = {}
        for thing in own.objects:
            method = getattr(super(around, thing), name)
            by_method.setdefault(method.__func__, []).append(thing)
        found = []
        for method, things in by_method.items():
            if is_torch_function(method):
                kind = getattr(torch.nn, method.__qualname__.split(".")[0], None)
                if kind not in names.LAYERS or name != "forward":
                    raise NotSteady(f"calls super().{name}, {WAITS}")
                found.append(DATA)
            else:
                found.append(self.call_function(method, [Objects(tuple(things)), *args], named))
        return join(*found)
