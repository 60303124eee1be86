"""Tell whether somebody has edited a function that a fast path replaces."""

import ast
import functools
import hashlib
import inspect
import textwrap
from collections.abc import Callable


@functools.cache
def function_hash(function: Callable) -> str | None:
    """Return a hash of a function's source without comments, docstring and formatting, or None if
    it has no source of its own: a function in a wrapper hasn't."""
    if hasattr(function, "__wrapped__"):
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError, TypeError):
        return None
    if not isinstance(tree.body[0], ast.FunctionDef):  # a lambda
        return None
    if ast.get_docstring(tree.body[0]) is not None:
        del tree.body[0].body[0]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:8]
