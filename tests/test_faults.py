"""The list of planted faults: each has its place and its test, tests/README.md shows it, and the
quick ones are caught."""

import re

import pytest
from conftest import ROOT
from fault_places import MODULE, Fault, NoPlaceError, plant
from faults import FAULTS, GPU_FAULTS, MARKS, caught, table

EXAMPLE = ROOT / "examples" / "animals90"
THERE = [
    fault
    for fault in FAULTS + GPU_FAULTS
    if EXAMPLE.exists() or not fault.file.startswith("examples/animals90")
]


@pytest.mark.parametrize("fault", THERE, ids=lambda fault: fault.subject)
def test_a_fault_has_its_place_and_its_test(fault):
    source = (ROOT / fault.file).read_text(encoding="utf-8")
    assert plant(fault, source) != source  # or a NoPlaceError says what is missing
    file, name = re.fullmatch(r"([\w/]+\.py)::(test_\w+)(?:\[.+\])?", fault.test_path).groups()
    assert f"\ndef {name}(" in (ROOT / file).read_text(encoding="utf-8")


@pytest.mark.long
@pytest.mark.parametrize(
    "fault", [fault for fault in THERE if fault.quick], ids=lambda fault: fault.subject
)
def test_a_quick_fault_is_caught(fault):
    found, _, output = caught(fault)
    assert found, output


def test_the_table_of_the_readme_is_the_list():
    text = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    assert MARKS[0] + text.split(MARKS[0])[1].split(MARKS[1])[0] + MARKS[1] == table(FAULTS)
    for faults in (FAULTS, GPU_FAULTS):
        assert len({fault.subject for fault in faults}) == len(faults) >= 20


SOURCE = '''\
SIZES = [1, 2]  # Übergrößen

def total(sizes, weights=None,
          scale=1.0):
    """Return 1 + 2."""
    text = f"{sizes[0]} of {sizes}"
    if (weights is not None
            and scale != 1.0 and sizes):
        # each size has a weight
        sizes = dot(sizes, weights,
                    exact=True)
        sizes = scale * sizes
    return sum(sizes)  # sum(sizes)


class Counter:
    def total(self):
        return 1
'''


def fault_of(function: str | None, old: str, new: str) -> Fault:
    return Fault(
        subject="a sum",
        description="it is another",
        file="sums.py",
        function=function,
        old=old,
        new=new,
        test="test_sums.py::test_sums",
    )


@pytest.mark.parametrize(
    "function, old, new, expected",
    [
        (MODULE, "[1,2]", "[]", "SIZES = []  # Übergrößen"),
        ("total", "sum( sizes )", "0", "return 0  # sum(sizes)"),
        ("total", "scale*sizes", "sizes", "sizes = sizes\n    return"),
        ("total", "exact = True", "exact=False", "exact=False)"),
        ("total", "weights is not None and scale != 1.0", "True", "if (True and sizes):"),
        ("total", "sizes = scale * sizes", "pass", "exact=True)\n        pass\n    return"),
        (
            "total",
            "sizes = dot(sizes, weights, exact=True)\nsizes = scale * sizes",
            "if scale:\n    sizes = 0",
            "a weight\n        if scale:\n            sizes = 0\n    return",
        ),
        ("Counter.total", "1", "2", "    def total(self):\n        return 2"),
        (None, "class Counter: def total(self):", "def one():", "\n\ndef one():\n        return 1"),
    ],
)
def test_a_place_is_found_however_it_is_laid_out(function, old, new, expected):
    planted = plant(fault_of(function, old, new), SOURCE)
    assert planted.count(expected) == 1
    assert len(planted) - len(SOURCE) < 40


@pytest.mark.parametrize(
    "function, old, new, sentence",
    [
        (
            "total",
            "max(sizes)",
            "0",
            "needs its place once, and total of sums.py has 0 times: max(",
        ),
        ("total", "sizes", "0", "needs its place once, and total of sums.py has 4 times: sizes"),
        ("total", "sum(sizes)", "return", "has 0 times: sum(sizes)"),
        ("Counter.add", "1", "2", "needs Counter.add in sums.py once, and add is there 0 times"),
        (None, "total", "sum", "and sums.py has 2 times: total"),
        ("total", "return sum(sizes)", "def", "is no Python, line 1 of new"),
        ("total", "sizes = scale * sizes", "break", "is no Python, line 12 of sums.py with it"),
    ],
)
def test_a_fault_without_its_place_is_one_sentence(function, old, new, sentence):
    with pytest.raises(NoPlaceError) as error:
        plant(fault_of(function, old, new), SOURCE)
    assert str(error.value).startswith("the fault 'a sum' ") and sentence in str(error.value)
