"""A planted fault, and the place in a file where it goes.

A place is found by what the code says, not by how it is laid out: by file, function and expression,
compared as `ast.unparse` writes them. So a fault survives other line breaks, comments and quotes.
"""

import ast
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

MODULE = "the module"  # as a Fault's function: what is outside of functions and classes
NESTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Fault:
    """One replacement in one file. A run that has it works, and looks plausible.

    subject: what it is about; no two faults of a list have the same. description: what the fault
    does. file: below the project's folder. function: `name`, `Class.method`, or MODULE; None for a
    file that isn't Python. old: what is in that function once: an expression, some operands of a
    longer `and` or `or`, an argument such as `flush=True`, or statements; in other files, a text,
    in which any white space is like any other. new: what is there instead. test: the pytest id of
    the test that fails then, from tests/ on, or for an example from the project's folder on. gpus:
    that the test needs. quick: whether test_faults.py plants it, too.
    """

    subject: str
    description: str
    file: str
    function: str | None
    old: str
    new: str
    test: str
    gpus: int = 0
    quick: bool = False

    @property
    def test_path(self) -> str:
        """The pytest id of the test, from the project's folder."""
        if self.test.startswith("examples/"):
            return self.test
        return f"tests/{self.test}"


class NoPlaceError(Exception):
    """A fault whose place isn't in its file, or is there more than once."""


def plant(fault: Fault, source: str) -> str:
    """Return the source of fault.file with the fault. Raises NoPlaceError, in one sentence."""
    if fault.function is None:
        spans = spans_of_text(source, fault.old)
        where = fault.file
    else:
        spans = spans_of_code(source, fault)
        where = f"{fault.function} of {fault.file}"
    if len(spans) != 1:
        raise NoPlaceError(
            f"the fault {fault.subject!r} needs its place once, and {where} has {len(spans)} "
            f"times: {fault.old}"
        )
    start, end, indent = spans[0]
    content = source.encode()
    new = textwrap.indent(fault.new, " " * indent).lstrip()
    planted = (content[:start] + new.encode() + content[end:]).decode()
    if fault.function is not None:
        parse(fault, planted, f"{fault.file} with it", whole=True)
    return planted


def parse(fault: Fault, code: str, where: str, whole: bool = False) -> list[ast.stmt]:
    """Return the statements of code. Raises NoPlaceError if it isn't Python.

    where: what the code is, for the error. whole: it is a file.
    """
    code = textwrap.dedent(code)
    try:
        if whole:
            compile(code, fault.file, "exec")  # knows of a `return` outside of functions
        return ast.parse(code).body
    except SyntaxError as error:
        raise NoPlaceError(
            f"the fault {fault.subject!r} is no Python, line {error.lineno} of {where}"
        ) from None


def spans_of_text(source: str, old: str) -> list[tuple[int, int, int]]:
    """Return (first byte, byte after the last, indentation) of each occurrence of a text."""
    pattern = r"\s+".join(re.escape(word) for word in old.split())
    spans = []
    for match in re.finditer(pattern, source):
        start = len(source[: match.start()].encode())
        end = len(source[: match.end()].encode())
        spans.append((start, end, 0))
    return spans


def spans_of_code(source: str, fault: Fault) -> list[tuple[int, int, int]]:
    """Return (first byte, byte after the last, indentation) of each place of a fault in Python."""
    body = find_function(ast.parse(source), fault)
    old = parse(fault, fault.old, "old")
    new = parse(fault, fault.new, "new")
    if is_expression(old) and is_expression(new):
        expression = old[0].value
        found = [[node] for node in nodes_of(body) if is_same(node, expression)]
        if isinstance(expression, ast.BoolOp):
            for node in nodes_of(body):
                if isinstance(node, ast.BoolOp) and type(node.op) is type(expression.op):
                    found += runs_in(node.values, expression.values, shorter=True)
    else:
        found = list(runs_of_statements(body, old))
        argument = as_argument(old)
        if argument is not None and as_argument(new) is not None:
            found += [[node] for node in nodes_of(body) if is_same(node, argument)]

    lines = source.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    spans = []
    for nodes in found:
        first = nodes[0]
        last = nodes[-1]
        start = starts[first.lineno - 1] + first.col_offset
        end = starts[last.end_lineno - 1] + last.end_col_offset
        spans.append((start, end, first.col_offset))
    return spans


def find_function(tree: ast.Module, fault: Fault) -> list[ast.stmt]:
    """Return the statements of fault.function. Raises NoPlaceError."""
    if fault.function == MODULE:
        return [statement for statement in tree.body if not isinstance(statement, NESTED)]
    body = tree.body
    for name in fault.function.split("."):
        named = [node for node in definitions(body) if node.name == name]
        if len(named) != 1:
            raise NoPlaceError(
                f"the fault {fault.subject!r} needs {fault.function} in {fault.file} once, and "
                f"{name} is there {len(named)} times"
            )
        body = named[0].body
    return body


def definitions(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the functions and classes of these statements, but not those inside of them."""
    waiting = list(statements)
    while waiting:
        node = waiting.pop()
        if isinstance(node, NESTED):
            yield node
        else:
            waiting.extend(ast.iter_child_nodes(node))


def nodes_of(statements: list[ast.stmt]) -> Iterator[ast.AST]:
    """Yield all nodes, but those inside of f-strings: Python 3.11 doesn't know where they are."""
    waiting = list(statements)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.JoinedStr):
            waiting.extend(ast.iter_child_nodes(node))


def is_expression(statements: list[ast.stmt]) -> bool:
    return len(statements) == 1 and isinstance(statements[0], ast.Expr)


def as_argument(statements: list[ast.stmt]) -> ast.keyword | None:
    """Return the argument of a call that `name=value` is, or None."""
    if len(statements) != 1 or not isinstance(statements[0], ast.Assign):
        return None
    assignment = statements[0]
    if len(assignment.targets) != 1 or not isinstance(assignment.targets[0], ast.Name):
        return None
    return ast.keyword(assignment.targets[0].id, assignment.value)


def runs_of_statements(body: list[ast.stmt], old: list[ast.stmt]) -> Iterator[list[ast.AST]]:
    """Yield each run of statements in the same block that are those of `old`."""
    yield from runs_in(body, old)
    for node in nodes_of(body):
        for _, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                yield from runs_in(value, old)


def runs_in(
    nodes: list[ast.AST], old: list[ast.AST], shorter: bool = False
) -> Iterator[list[ast.AST]]:
    """Yield each run of nodes that are those of `old`. shorter: not if they are all nodes."""
    if shorter and len(nodes) == len(old):
        return
    for i in range(len(nodes) - len(old) + 1):
        run = nodes[i : i + len(old)]
        if all(is_same(one, other) for one, other in zip(run, old, strict=True)):
            yield run


def is_same(node: ast.AST, other: ast.AST) -> bool:
    """Return whether two nodes are the same code, wherever they are. `a = 1` doesn't read `a`."""
    if type(node) is not type(other):
        return False
    if type(getattr(node, "ctx", None)) is not type(getattr(other, "ctx", None)):
        return False
    return ast.unparse(node) == ast.unparse(other)
