"""The list of planted faults: it fits the sources and the tests, and tests/README.md shows it."""

import re

import pytest
from conftest import ROOT
from faults import FAULTS, MARKS, table
from gpu.gpu_faults import GPU_FAULTS


@pytest.mark.parametrize("fault", [fault for fault in FAULTS + GPU_FAULTS if not fault.file.startswith("examples/")
                                   or (ROOT / "examples" / "animals90").exists()], ids=lambda fault: fault.subject)
def test_a_fault_has_its_place_and_its_test(fault):
    source = (ROOT / fault.file).read_text(encoding="utf-8")
    assert source.count(fault.old) == 1 and fault.new != fault.old
    file, name = re.fullmatch(r"([\w/]+\.py)::(test_\w+)(?:\[.+\])?", fault.test).groups()
    assert f"\ndef {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8")


def test_the_table_of_the_readme_is_the_list():
    text = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    assert MARKS[0] + text.split(MARKS[0])[1].split(MARKS[1])[0] + MARKS[1] == table(FAULTS)
    assert len({fault.subject for fault in FAULTS}) == len(FAULTS) >= 20
