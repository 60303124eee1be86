"""The limits of the tests grow with what else the machine does."""

import ast
import os
import time

import pytest
from conftest import ROOT, patience, wait_until

WAITS = ("wait", "wait_procs", "communicate")  # and subprocess.run


def fixed_limits(source):
    """The calls that end after so many seconds on a busy machine, too: job.wait(200), run(..., timeout=200)."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        is_run = node.func.attr == "run" and ast.unparse(node.func.value) == "subprocess"
        if node.func.attr in WAITS or is_run:
            limits = [keyword.value for keyword in node.keywords if keyword.arg == "timeout"]
            if node.func.attr.startswith("wait"):
                limits += node.args
            found += [ast.unparse(node) for limit in limits if isinstance(limit, ast.Constant) and limit.value]
    return found


@pytest.mark.parametrize("load_per_core, factor", [(0.0, 2), (1.0, 2), (5.0, 5), (50.0, 10)])
def test_a_busy_machine_gets_more_time(load_per_core, factor, monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (load_per_core * os.cpu_count(), 0.0, 0.0))
    assert patience(300) == pytest.approx(300 * factor)
    begin = time.monotonic()
    assert not wait_until(lambda: False, seconds=0.1) and time.monotonic() - begin >= 0.1 * factor


@pytest.mark.timeout(2)
def test_so_does_each_test(request):
    """A mark of 2 seconds is at least 4: this test takes 3."""
    assert 4 <= request.node.get_closest_marker("timeout").args[0] <= 20
    time.sleep(3)


def test_no_test_has_a_limit_of_its_own():
    """pytest's grows with the load. What ends earlier takes patience(), as launch() and wait_until() do."""
    found = []
    for path in (ROOT / "tests").rglob("*.py"):
        # The GPU suite measures, and faults.py runs whole tests
        if path.parent.name != "gpu" and path.name != "faults.py":
            found += [f"{path.name}: {call}" for call in fixed_limits(path.read_text(encoding="utf-8"))]
    assert not found
    calls = "job.wait(200)\njob.communicate(timeout=9)\nsubprocess.run([*map(str, words)], timeout=100)\njob.wait(0)\n"
    assert len(fixed_limits(calls + "job.wait(patience(200))\nlaunch(script, timeout=100)\n")) == 3
