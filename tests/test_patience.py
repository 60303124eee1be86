"""The limits of the tests grow with what else the machine does."""

import os
import time

import pytest
from conftest import patience, wait_until


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
