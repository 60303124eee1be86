"""What a tag records of the model's source, to say later that the model was edited.

The source is that of the files that hold the classes of the model and its modules: hashes of their
functions, classes and constants, without comments, docstrings and formatting.
"""

import ast
import functools
import hashlib
import inspect
import os
import site
import sysconfig
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from runtime.checkpoint.errors import OTHER_TAG, CheckpointError
from runtime.model_parts import ModelTensors, tensors_of
from runtime.weights import print_note

MOST_SHOWN = 5  # names in a note
# Where packages are. Their classes, such as nn.Linear, change with versions, which a tag has, too
PACKAGES = (
    sysconfig.get_path("stdlib"),
    sysconfig.get_path("purelib"),
    *site.getsitepackages(),
)


def source_of(model: nn.Module) -> dict:
    """Return {"file": the name of the file that has the model's class, "parts": {name: hash}}.

    Call it before an edit during the run could change the files.
    """
    # The classes, and the files that have them. A dict keeps the order
    classes = {}
    for module in model.modules():
        for kind in type(module).__mro__:
            classes[kind] = True
    files = {}
    for kind in classes:
        path = file_of(kind)
        if path is not None and not kind.__module__.startswith("runtime."):  # kernels and LoRA
            files[path] = True
    parts = {}
    for path in files:
        parts.update(hashed_parts(path))

    # The first of its files, in the order in which Python looks for methods
    own = None
    for kind in type(model).__mro__:
        path = file_of(kind)
        if path in files:
            own = os.path.basename(path)
            break
    return {"file": own, "parts": parts}


def file_of(kind: type) -> str | None:
    """Return the path of the file that has a class. None: it has none, or is a package's."""
    if kind.__module__.split(".")[0] in ("builtins", "torch"):
        return None
    try:
        path = inspect.getfile(kind)
    except (OSError, TypeError):
        # Its module isn't in sys.modules, so ask one of its functions
        codes = [value.__code__ for value in vars(kind).values() if inspect.isfunction(value)]
        path = codes[0].co_filename if codes else ""
    path = os.path.abspath(path)
    if not os.path.isfile(path) or path.startswith(PACKAGES):
        return None
    return path


@functools.cache  # by its first reading: Python has imported that one
def hashed_parts(path: str) -> dict[str, str]:
    """Return {name: hash} of the functions, methods, classes and constants of a file."""
    try:
        tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return {}

    # {name: its statements}. A class is its methods, each by itself, and a head with all else
    parts: dict[str, list[ast.stmt]] = {}
    for statement in tree.body:
        if isinstance(statement, ast.ClassDef):
            head = parts.setdefault(statement.name, [])
            for inner in statement.body:
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    parts.setdefault(f"{statement.name}.{inner.name}", []).append(inner)
                else:
                    head.append(inner)
            for expression in (*statement.bases, *statement.decorator_list):
                head.append(ast.Expr(expression))
        elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            parts.setdefault(statement.name, []).append(statement)
        elif isinstance(statement, ast.Assign):
            names = ", ".join(ast.unparse(target) for target in statement.targets)
            parts.setdefault(names, []).append(statement)
        elif isinstance(statement, ast.AnnAssign):
            parts.setdefault(ast.unparse(statement.target), []).append(statement)
    return {name: hash_of(statements) for name, statements in parts.items()}


def hash_of(statements: list[ast.stmt]) -> str:
    """Return a hash of statements without comments, docstrings and formatting."""
    texts = []
    for statement in statements:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(statement) is not None:
                del statement.body[0]
            statement.body = statement.body or [ast.Pass()]
        if not is_text(statement):  # a class's docstring
            texts.append(ast.unparse(statement))
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:8]


def is_text(statement: ast.stmt) -> bool:
    """Return whether a statement is a text alone, as a docstring is."""
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Constant):
        return False
    return isinstance(statement.value.value, str)


def edited_parts(saved: dict | None, model: nn.Module) -> list[str] | None:
    """Return the names of what was edited, added or removed since a tag recorded its source.

    saved: "model_source" of its manifest, or None. Returns None if that isn't known.
    """
    if not saved or not saved["parts"]:
        return None
    parts = source_of(model)["parts"]
    names = {**saved["parts"], **parts}
    return [name for name in names if saved["parts"].get(name) != parts.get(name)]


def shown_names(names: list[str]) -> str:
    """Return names as a list to print."""
    shown = ", ".join(names[:MOST_SHOWN])
    more = len(names) - MOST_SHOWN
    if more > 0:
        return f"{shown} and {more} more"
    return shown


def note_edited(where: str, state: dict, model: nn.Module) -> None:
    """Print a note if the model's source isn't that of a tag. state: of the tag's manifest."""
    edited = edited_parts(state.get("model_source"), model)
    if edited:
        print_note(
            f"the model's source differs from the one that {where} was trained with: "
            f"{shown_names(edited)}"
        )


def check_file(where: str, state: dict, model: nn.Module) -> None:
    """Raise CheckpointError if a tag was trained with the model of another file than this one's.

    A manifest doesn't choose what Python imports: only the user does.
    """
    saved = state.get("model_source")
    file = source_of(model)["file"]
    if not saved or saved["file"] in (None, file):
        return
    if edited_parts(saved, model):
        module = saved["file"].removesuffix(".py")
        raise CheckpointError(
            f"{where} was trained with the model of {saved['file']}, and this program takes that "
            f"of {file}: change the import in runtime/chosen_model.py to `from {module} import "
            "GPT, GPTConfig`"
        )


def check_tensors(
    where: str,
    saved: ModelTensors,
    source: dict | None,
    model: nn.Module,
    shape_of: Callable[[nn.Parameter], torch.Size] = torch.Tensor.size,
) -> None:
    """Raise CheckpointError unless a model has the tensors of a tag.

    source: "model_source" of the tag's manifest, or None. shape_of: as for tensors_of().
    """
    differing = tensors_of(model, shape_of).differences(saved)
    if not differing:
        return

    # What may have changed the model since
    edited = edited_parts(source, model)
    if source is None or edited is None:
        advice = "restore model.py"
    elif edited:
        advice = f"restore {source['file']}, which was edited since ({shown_names(edited)})"
    else:
        advice = (
            f"{source['file']} wasn't edited since, so use the script that changed the model then, "
            f"or {OTHER_TAG}"
        )
    names = ", ".join(differing[:3])
    raise CheckpointError(f"{where} has another model than this program ({names}): {advice}")
