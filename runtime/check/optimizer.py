"""The optimizer in use: that of the training script, made for a tiny model."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from runtime.check.tiny import Tiny, Unchecked, describe_error
from runtime.engine.any_optimizer import (
    check_elementwise,
    is_adamw,
    keep_rates_of_groups,
    optimizer_name,
)
from runtime.files import ROOT

SCRIPT = Path(ROOT, "train_deepspeed.py")
NAME = "adamw"  # of the optimizer in the script
RATE = 1e-2
# With this epsilon, elements of nearly no gradient don't take full steps by their rounding
EPS = 1e-5


@dataclass(frozen=True)
class ScriptPlan:
    """What the script's line of the optimizer may read of its plan."""

    ds_config: Mapping


def statements_of(script: Path) -> Iterator[ast.stmt]:
    """Yield what the line of the optimizer may need, and that line: imports, constants, functions
    and classes of a script."""
    for statement in ast.parse(script.read_text(encoding="utf-8")).body:
        is_import = isinstance(statement, ast.Import | ast.ImportFrom)
        if is_import or isinstance(statement, ast.FunctionDef | ast.ClassDef):
            yield statement
        elif isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            targets = getattr(statement, "targets", None) or [statement.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            is_optimizer = NAME in names
            if is_optimizer or is_literal(statement.value):
                yield statement


def is_literal(value: ast.expr) -> bool:
    """Return whether an expression is a constant, or a container of constants."""
    try:
        ast.literal_eval(value)
    except ValueError:
        return False
    return True


def optimizer_in_use(
    model: nn.Module, ds_config: Mapping, script: Path = SCRIPT
) -> torch.optim.Optimizer:
    """Return the training script's optimizer for a model, with rates for a tiny one.

    Raises Unchecked if its line needs more of the script than imports, constants, functions,
    classes, `groups`, `model` and `plan.ds_config`.
    """
    names = {
        "__name__": "optimizer_in_use",
        "groups": model.parameter_groups(0.1),
        "model": model,
        "plan": ScriptPlan(ds_config),
    }
    try:
        for statement in statements_of(script):
            code = compile(ast.Module([statement], []), str(script), "exec")
            exec(code, names)  # noqa: S102 (the user's own script)
        optimizer = names[NAME]
    except Exception as error:  # whatever the user's line raises
        raise Unchecked(
            f"the optimizer can't be made outside of {script.name} ({describe_error(error)}): the "
            "run checks it before its first step"
        ) from None
    keep_rates_of_groups(optimizer)
    for group in optimizer.param_groups:
        group["lr"] = RATE * group.get("lr_ratio", 1)
        if "eps" in group:
            group["eps"] = EPS
    return optimizer


def elementwise(tiny: Tiny, ds_config: Mapping) -> str:
    """Return the name of the optimizer in use. Raises UserError if ZeRO can't step it."""
    model = tiny.model()
    optimizer = optimizer_in_use(model, ds_config)
    if not is_adamw(optimizer):
        check_elementwise(optimizer, list(model.parameters()))
    return optimizer_name(optimizer)
