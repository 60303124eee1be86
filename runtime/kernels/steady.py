"""Prove that a micro-step of an edited model is the same each time, as a CUDA graph repeats it.

A graph repeats the kernels of one micro-step. It would also repeat what Python chose in it. So the
proof reads the source of GPT.forward and of all that it calls, and follows what each value can be
(steady_values.py). A micro-step is steady if

  - `if`, `while` and loops depend on what is fixed: shapes, None, attributes that are numbers or
  strings - it calls only PyTorch's functions of steady_names.py, modules, and functions that are
  steady - it changes nothing that it also reads

Whatever isn't known isn't steady. The attributes that a proof takes for fixed are watched while
training (engine/guards.py): a loop may change them.
"""

import ast
import inspect
import textwrap
from types import FunctionType

from torch import nn

from runtime.kernels import edits
from runtime.kernels.steady_expressions import Expressions
from runtime.kernels.steady_values import (
    DATA,
    FIXED,
    NONE,
    Items,
    NotSteady,
    Objects,
    Value,
    is_fixed,
    item_of,
    join,
    key_of,
)

# of the modules of model.py
METHODS = {"forward", "forward_uncached", "attn_and_mlp", "logits", "losses"}
MOST_ROUNDS = 10  # through a loop, until it adds nothing to what names can be


def varying_part(gpt: nn.Module) -> str | None:
    """Return why a micro-step of this model may differ from the one before it, or None.

    Call this before DeepSpeed or our kernels change the model.
    """
    if edits.has_global_hooks():
        return "there are hooks for all modules"
    for name, param in gpt.named_parameters():
        if param._backward_hooks or param._post_accumulate_grad_hooks:
            return f"{name} has a gradient hook"
    is_edited = False
    for path, module in gpt.named_modules():
        place = path or "the model"
        kind = edits.own_class(module)
        if kind.__module__ != "runtime.lora" and not edits.is_pytorchs(kind):
            is_edited = is_edited or edits.why_unknown(module) is not None
        replaced = METHODS & vars(module).keys()
        if replaced:
            return f"the {min(replaced)} of {place} was replaced"
        if edits.has_hooks(module):
            return f"{place} has hooks"
    return why_varies(gpt) if is_edited else None


def why_varies(gpt: nn.Module) -> str | None:
    """Return why the functions of an edited model may do something else in another micro-step, or
    None."""
    judge = Judge()
    try:
        judge.call_training(gpt)
        judge.check_writes()
    except NotSteady as reason:
        return str(reason)
    except Exception as error:  # code that this doesn't expect is code that isn't proven
        return f"a function in use can't be followed ({type(error).__name__})"
    return None


class Judge(Expressions):
    """Reads functions, statement by statement."""

    def call_training(self, gpt: nn.Module) -> None:
        """Read what a training step calls: gpt(idx, targets)."""
        named = {}
        if "reduction" in inspect.signature(type(gpt).forward).parameters:
            named["reduction"] = FIXED
        self.call_modules([gpt], [DATA, DATA], named)

    def check_writes(self) -> None:
        """Raise NotSteady if an attribute that is set is also read: it may be that of a step
        before."""
        for name, place in self.written.items():
            if name in self.read:
                raise NotSteady(f"{place}: sets {name}, which a forward also reads")

    def read_function(self, function: FunctionType, env: dict[str, Value]) -> Value:
        """Return what a function returns whose arguments are in env."""
        tree = source_of(function)
        self.functions.append((function, tree))
        self.returned.append([])
        try:
            self.run(tree.body, env)
        finally:
            self.functions.pop()
            returned = self.returned.pop()
        return join(*returned) if returned else NONE

    def run(self, body: list[ast.stmt], env: dict[str, Value]) -> bool:
        """Read statements, and change env as they do. Return whether they surely end the function
        or the round of a loop."""
        for statement in body:
            self.at = statement
            try:
                ends = self.run_one(statement, env)
            except NotSteady as reason:
                raise self.with_place(reason) from None
            if ends:
                return True
        return False

    def run_one(self, statement: ast.stmt, env: dict[str, Value]) -> bool:
        """Read one statement, as run() does."""
        name = type(statement).__name__
        method = getattr(self, f"run_{name}", None)
        if method is None:
            raise NotSteady(f"`{name.lower()}` is not known to be the same each time")
        return bool(method(statement, env))

    def run_Expr(self, statement: ast.Expr, env: dict) -> None:
        if not isinstance(statement.value, ast.Constant):  # a docstring
            self.value(statement.value, env)

    def run_Pass(self, statement: ast.Pass, env: dict) -> None:
        pass

    def run_Continue(self, statement: ast.Continue, env: dict) -> bool:
        return True

    def run_Break(self, statement: ast.Break, env: dict) -> bool:
        return True

    def run_Raise(self, statement: ast.Raise, env: dict) -> bool:
        return True  # a run that ends repeats nothing

    def run_Return(self, statement: ast.Return, env: dict) -> bool:
        value = NONE
        if statement.value is not None:
            value = self.value(statement.value, env)
        self.returned[-1].append(value)
        return True

    def run_Assert(self, statement: ast.Assert, env: dict) -> None:
        self.truth(statement.test, env, "`assert`")

    def run_Assign(self, statement: ast.Assign, env: dict) -> None:
        value = self.value(statement.value, env)
        for target in statement.targets:
            self.assign(target, value, env)

    def run_AnnAssign(self, statement: ast.AnnAssign, env: dict) -> None:
        if statement.value is not None:
            self.assign(statement.target, self.value(statement.value, env), env)

    def run_AugAssign(self, statement: ast.AugAssign, env: dict) -> None:
        if isinstance(statement.target, ast.Attribute):
            raise NotSteady(f"changes {statement.target.attr}")
        old = self.value(with_load(statement.target), env)
        if isinstance(old, Items) and not old.is_own:
            raise NotSteady("changes a list of another function or of a module")
        new = self.value(statement.value, env)
        self.assign(statement.target, self.combine(old, new), env)

    def run_If(self, statement: ast.If, env: dict) -> bool:
        known = self.truth(statement.test, env, "`if`")
        if known is not None:
            return self.run(statement.body if known else statement.orelse, env)

        lazy = lazy_attribute(statement.test)
        self.lazy.append(lazy)
        first = dict(env)
        first_ends = self.run(statement.body, first)
        self.lazy.pop()
        second = dict(env)
        second_ends = self.run(statement.orelse, second)
        self.merge(env, [first, second])
        return first_ends and second_ends

    def run_For(self, statement: ast.For, env: dict) -> None:
        item = item_of(self.value(statement.iter, env))
        for _ in range(MOST_ROUNDS):
            before = {name: key_of(value) for name, value in env.items()}
            inside = dict(env)
            self.assign(statement.target, item, inside)
            self.run(statement.body, inside)
            self.merge(env, [env, inside])
            if before == {name: key_of(value) for name, value in env.items()}:
                self.run(statement.orelse, env)
                return
        raise NotSteady("a loop in which names change what they are")

    def run_With(self, statement: ast.With, env: dict) -> bool:
        for item in statement.items:
            context = self.value(item.context_expr, env)
            if context is not FIXED or item.optional_vars is not None:
                raise NotSteady("`with` of something that is not known")
        return self.run(statement.body, env)

    def merge(self, env: dict, branches: list[dict]) -> None:
        """Set names to what they can be after any of these branches."""
        merged = {}
        for name in {name for branch in branches for name in branch}:
            merged[name] = join(*(branch[name] for branch in branches if name in branch))
        env.update(merged)

    def assign(self, target: ast.expr, value: Value, env: dict) -> None:
        """Set a name, or an item of a tensor, or several of these."""
        if isinstance(target, ast.Name):
            env[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            self.unpack(target.elts, value, env)
        elif isinstance(target, ast.Subscript):
            whole = self.value(target.value, env)
            self.check_index(target.slice, env)
            if isinstance(whole, Items) and not isinstance(value, Objects):
                whole.add(value)
            elif whole is not DATA:
                raise NotSteady("sets an item of something that is no tensor")
        elif isinstance(target, ast.Attribute):
            self.set_attribute(target, value, env)
        else:
            raise NotSteady("an assignment that is not known")

    def unpack(self, targets: list[ast.expr], value: Value, env: dict) -> None:
        """Set several targets to the items of a value."""
        if isinstance(value, Items) and value.is_exact and len(value.values) == len(targets):
            values = value.values
        else:
            values = [item_of(value)] * len(targets)
        for target, part in zip(targets, values, strict=True):
            self.assign(target, part, env)

    def set_attribute(self, target: ast.Attribute, value: Value, env: dict) -> None:
        """Accept a tensor that nothing reads, such as a metric, or a value that is set once."""
        owner = self.value(target.value, env)
        if not isinstance(owner, Objects) or not all(
            isinstance(o, nn.Module) for o in owner.objects
        ):
            raise NotSteady(f"sets {target.attr} of something that is no module")
        is_set_once = target.attr in self.lazy and is_fixed(value)
        if is_set_once:
            return
        if value is not DATA:
            raise NotSteady(f"changes {target.attr}")
        self.written.setdefault(target.attr, self.place())


def lazy_attribute(test: ast.expr) -> str | None:
    """Return NAME of `if self.NAME is None`, whose body runs in the first micro-step alone."""
    if not isinstance(test, ast.Compare) or not isinstance(test.left, ast.Attribute):
        return None
    is_none = isinstance(test.ops[0], ast.Is) and ast.unparse(test.comparators[0]) == "None"
    return test.left.attr if is_none and len(test.ops) == 1 else None


def with_load(target: ast.expr) -> ast.expr:
    """Return a target of an assignment as an expression that reads it."""
    return ast.parse(ast.unparse(target), mode="eval").body


def source_of(function: FunctionType) -> ast.FunctionDef:
    """Return the syntax tree of a function. Raises NotSteady if it has no source of its own."""
    name = function.__qualname__
    if hasattr(function, "__wrapped__"):
        raise NotSteady(f"{name} is in a wrapper")
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, SyntaxError, TypeError):
        raise NotSteady(f"{name} has no source") from None
    if not isinstance(tree, ast.FunctionDef) or tree.decorator_list:
        raise NotSteady(f"{name} is no plain function")
    return tree
