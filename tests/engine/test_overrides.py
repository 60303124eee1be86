"""The table in runtime/engine/__init__.py names every attribute of DeepSpeed that is replaced, and no other."""

import ast
import re

from conftest import ROOT

import runtime.engine

ENGINE = ROOT / "runtime" / "engine"


def test_the_table_is_what_the_code_replaces():
    listed = set()
    rows = re.findall(r"^    (\w+(?:, \w+)*) +(\w+)  .+? (test_\w+)$", runtime.engine.__doc__, re.M)
    for names, module, test in rows:
        listed |= {(name, module) for name in names.split(", ")}
        assert len(list((ROOT / "tests").rglob(f"{test}.py"))) == 1, test
    calls = [(path.stem, node) for path in ENGINE.glob("*.py") for node in ast.walk(ast.parse(path.read_text()))
             if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "override"]
    assert listed == {(keyword.arg, module) for module, call in calls for keyword in call.keywords}
    assert len(listed) > 8


def test_nothing_else_assigns_to_deepspeeds_methods():
    """A function or a lambda is assigned to an attribute of another object only by override()."""
    replaced = {name for names in re.findall(r"^    (\w+(?:, \w+)*)  ", runtime.engine.__doc__, re.M)
                for name in names.split(", ")}
    for path in ENGINE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            targets = node.targets if isinstance(node, ast.Assign) else []
            assigned = {target.attr for target in targets if isinstance(target, ast.Attribute)
                        and not (isinstance(target.value, ast.Name) and target.value.id == "self")}
            assert not assigned & replaced, f"{path}:{node.lineno}"
