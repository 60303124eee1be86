"""What steady.py knows about expressions."""

import ast
import builtins
from types import FunctionType

from torch import nn

from runtime.kernels import steady_names as names
from runtime.kernels.steady_calls import Calls
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
    is_fixed,
    is_property,
    item_of,
    join,
    value_of,
)


class Expressions(Calls):
    """Finds the Value of each expression."""

    def value(self, node: ast.expr, env: dict) -> Value:
        """Return the Value of an expression."""
        method = getattr(self, f"value_{type(node).__name__}", None)
        if method is None:
            raise NotSteady(f"`{ast.unparse(node)}` is not known to be the same each time")
        return method(node, env)

    def truth(self, node: ast.expr, env: dict, what: str) -> bool | None:
        """Return whether a condition is true, or None if it is fixed, but not known here."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            known = self.truth(node.operand, env, what)
            return None if known is None else not known
        if isinstance(node, ast.BoolOp):
            return self.truth_of_several(node, env, what)
        if isinstance(node, ast.Compare) and is_none_test(node):
            value = self.value(node.left, env)
            if value is NONE:
                return isinstance(node.ops[0], ast.Is)
            return None
        value = self.value(node, env)
        if value is NONE:
            return False
        if value is DATA:
            raise NotSteady(f"{what} on a value of a tensor")
        return None

    def truth_of_several(self, node: ast.BoolOp, env: dict, what: str) -> bool | None:
        """Return truth() of conditions with `and` or `or`, up to the one that decides."""
        decides = isinstance(node.op, ast.Or)
        found = []
        for part in node.values:
            found.append(self.truth(part, env, what))
            if found[-1] is decides:
                return decides
        return None if None in found else not decides

    def value_Constant(self, node: ast.Constant, env: dict) -> Value:
        return NONE if node.value is None else FIXED

    def value_Name(self, node: ast.Name, env: dict) -> Value:
        function, _ = self.functions[-1]
        name = node.id
        if name in env:
            return env[name]
        if name in function.__code__.co_varnames or name in function.__code__.co_cellvars:
            raise NotSteady(f"{name} may not be set")
        if name in function.__code__.co_freevars:
            cell = function.__closure__[function.__code__.co_freevars.index(name)]
            if isinstance(cell.cell_contents, (FunctionType, nn.Module)):
                return Objects((cell.cell_contents,))
            raise NotSteady(f"reads {name} of the function around it, which may change")
        if name in function.__globals__:
            thing = function.__globals__[name]
            value = value_of(thing, f"the global {name}")
            if value is DATA or isinstance(thing, (nn.Module, list, dict)):
                raise NotSteady(f"reads the global {name}, which may change")
            return value
        if not hasattr(builtins, name):
            raise NotSteady(f"{name} is not defined")
        return Objects((getattr(builtins, name),))

    def value_Attribute(self, node: ast.Attribute, env: dict) -> Value:
        return self.attribute_of(self.value(node.value, env), node.attr)

    def attribute_of(self, owner: Value, name: str) -> Value:
        """Return the Value of an attribute."""
        if owner in (NONE, ABSENT):
            return ABSENT
        if owner is DATA and name in ("device", "dtype"):
            return DEVICE
        if owner is DATA and name in names.FIXED_ATTRIBUTES:
            return FIXED
        if owner is DATA and name in names.TENSOR_ATTRIBUTES:
            return DATA
        if owner is DEVICE and name in ("type", "index", "is_floating_point"):
            return FIXED
        if not isinstance(owner, Objects):
            raise NotSteady(f".{name} is not known to be the same each time")
        found = []
        for thing in owner.objects:
            value = attribute(thing, name)
            if isinstance(thing, nn.Module):
                self.read.add(name)
            if is_property(thing, name):
                found.append(self.call_function(value.__func__, [Objects((thing,))], {}))
            else:
                found.append(value_of(value, f"{type(thing).__name__}.{name}"))
        return join(*found)

    def value_Tuple(self, node: ast.Tuple | ast.List, env: dict) -> Value:
        made = Items()
        for part in node.elts:
            if isinstance(part, ast.Starred):
                value = self.value(part.value, env)
                if isinstance(value, Items) and value.is_exact:
                    made.values += value.values
                else:
                    made.add(item_of(value))
            elif made.is_exact:
                made.values.append(self.value(part, env))
            else:
                made.add(self.value(part, env))
        return made

    value_List = value_Tuple

    def value_Dict(self, node: ast.Dict, env: dict) -> Value:
        made = Items()
        for key, part in zip(node.keys, node.values, strict=True):
            if not isinstance(key, ast.Constant):
                raise NotSteady("a dict whose keys are not written in the code")
            made.named[key.value] = self.value(part, env)
        return made

    def value_Subscript(self, node: ast.Subscript, env: dict) -> Value:
        whole = self.value(node.value, env)
        self.check_index(node.slice, env)
        constant = node.slice.value if isinstance(node.slice, ast.Constant) else None
        if isinstance(whole, Objects):
            if (
                all(isinstance(thing, nn.ModuleDict) for thing in whole.objects)
                and type(constant) is str
            ):
                return Objects(tuple(thing[constant] for thing in whole.objects))
            if isinstance(node.slice, ast.Slice):
                return Items([item_of(whole)], is_exact=False)
            return item_of(whole)
        if isinstance(whole, Items):
            if constant in whole.named:
                return whole.named[constant]
            if isinstance(node.slice, ast.Slice):
                return Items([item_of(whole)], is_exact=False)
            return item_of(whole)
        return whole

    def check_index(self, node: ast.expr, env: dict) -> None:
        """Raise NotSteady if a tensor is an index: the size of the result may depend on its
        numbers."""
        for part in node.elts if isinstance(node, ast.Tuple) else [node]:
            bounds = [part]
            if isinstance(part, ast.Slice):
                bounds = [
                    bound for bound in (part.lower, part.upper, part.step) if bound is not None
                ]
            for bound in bounds:
                if not is_fixed(self.value(bound, env)):
                    raise NotSteady(
                        f"`[{ast.unparse(node)}]` takes a number of items that may depend on the "
                        "data"
                    )

    def value_BinOp(self, node: ast.BinOp, env: dict) -> Value:
        return self.combine(self.value(node.left, env), self.value(node.right, env))

    def combine(self, left: Value, right: Value) -> Value:
        """Return the Value of an operation on two values."""
        if isinstance(left, Items) or isinstance(right, Items):
            if isinstance(left, Items) and isinstance(right, Items):
                return Items([join(item_of(left), item_of(right))], is_exact=False)
            if FIXED in (left, right):
                return Items([item_of(left if isinstance(left, Items) else right)], is_exact=False)
        if any(isinstance(value, (Items, Objects)) for value in (left, right)):
            raise NotSteady("an operation on something that is no tensor and no number")
        return DATA if DATA in (left, right) else FIXED

    def value_UnaryOp(self, node: ast.UnaryOp, env: dict) -> Value:
        if isinstance(node.op, ast.Not):
            self.truth(node.operand, env, "`not`")
            return FIXED
        value = self.value(node.operand, env)
        return self.combine(value, FIXED)

    def value_Compare(self, node: ast.Compare, env: dict) -> Value:
        values = [self.value(part, env) for part in (node.left, *node.comparators)]
        if all(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops):
            return FIXED
        if any(isinstance(value, Objects) for value in values):
            raise NotSteady("a comparison of objects")
        if all(map(is_fixed, values)):
            return FIXED
        if len(node.ops) > 1 or isinstance(node.ops[0], (ast.In, ast.NotIn)):
            raise NotSteady(f"`{ast.unparse(node)}` needs the numbers of a tensor")
        return DATA

    def value_BoolOp(self, node: ast.BoolOp, env: dict) -> Value:
        what = "`or`" if isinstance(node.op, ast.Or) else "`and`"
        for part in node.values[:-1]:
            self.truth(part, env, what)
        return join(*(self.value(part, env) for part in node.values))

    def value_IfExp(self, node: ast.IfExp, env: dict) -> Value:
        known = self.truth(node.test, env, "`if`")
        if known is not None:
            return self.value(node.body if known else node.orelse, env)
        return join(self.value(node.body, env), self.value(node.orelse, env))

    def value_JoinedStr(self, node: ast.JoinedStr, env: dict) -> Value:
        for part in node.values:
            if isinstance(part, ast.FormattedValue) and not is_fixed(self.value(part.value, env)):
                raise NotSteady("a text with the numbers of a tensor")
        return FIXED

    def value_ListComp(self, node: ast.ListComp | ast.GeneratorExp, env: dict) -> Value:
        inside = dict(env)
        for loop in node.generators:
            self.assign(loop.target, item_of(self.value(loop.iter, inside)), inside)
            for condition in loop.ifs:
                self.truth(condition, inside, "`if`")
        return Items([self.value(node.elt, inside)], is_exact=False)

    value_GeneratorExp = value_ListComp

    def value_Call(self, node: ast.Call, env: dict) -> Value:
        if ast.unparse(node) == "super()":
            raise NotSteady("super() is only known in super().NAME(...)")
        args, named = self.arguments(node, env)
        callee = node.func
        if isinstance(callee, ast.Attribute):
            if ast.unparse(callee.value) == "super()":
                return self.call_super(callee.attr, env, args, named)
            owner = self.value(callee.value, env)
            if owner is DATA:
                return self.call_tensor_method(callee.attr, args, named)
            if isinstance(owner, Items):
                return self.call_list_method(owner, callee.attr, args)
            function = self.attribute_of(owner, callee.attr)
        else:
            function = self.value(callee, env)
        return self.call(function, args, named, node)

    def arguments(self, node: ast.Call, env: dict) -> tuple[list[Value], dict[str, Value]]:
        """Return the Values of a call's arguments, by position and by name."""
        args: list[Value] = []
        for part in node.args:
            if not isinstance(part, ast.Starred):
                args.append(self.value(part, env))
                continue
            several = self.value(part.value, env)
            if not isinstance(several, Items) or not several.is_exact or several.named:
                raise NotSteady("a call with a number of arguments that is not known")
            args += several.values
        named: dict[str, Value] = {}
        for keyword in node.keywords:
            value = self.value(keyword.value, env)
            if keyword.arg is not None:
                named[keyword.arg] = value
            elif isinstance(value, Items) and value.is_exact and not value.values:
                named.update(value.named)
            else:
                raise NotSteady("a call with names that are not known")
        return args, named


def is_none_test(node: ast.Compare) -> bool:
    """Return whether a comparison is `... is None` or `... is not None`."""
    last = node.comparators[0]
    return (
        len(node.ops) == 1
        and isinstance(node.ops[0], (ast.Is, ast.IsNot))
        and isinstance(last, ast.Constant)
        and last.value is None
    )
