"""Planted faults: bugs that a refactoring could bring in, and the test that catches each.

    python tests/faults.py                       plant each in a copy, and run its test there
    python tests/faults.py --only clipping LoRA  those of some subjects
    python tests/faults.py --quick               those that CI plants, by tests/test_faults.py
    python tests/faults.py --check               first see that all tests pass without a fault
    python tests/faults.py --gpus=1              those of the GPU suite; --gpus=2: on two GPUs
    python tests/faults.py --table               print the table of tests/README.md

The faults are in fault_lists/. One counts as caught if its test fails. An error in a fixture, a
collection error and a test that no longer exists don't count. The exit code is 0 if all faults were
caught.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from conftest import ROOT, launch
from fault_lists import (
    animals90,
    checkpoint,
    cluster,
    data,
    engine,
    gpu,
    kernels,
    model,
    plan,
    prepare,
)
from fault_places import Fault, plant

LISTS = (model, data, prepare, engine, kernels, checkpoint, cluster, plan, animals90)
FAULTS = [fault for one in LISTS for fault in one.FAULTS]
GPU_FAULTS = gpu.FAULTS
MARKS = "<!-- tests/faults.py table -->", "<!-- end -->"  # in tests/README.md
AT_ONCE = 8  # tests that share a GPU
LIMIT_S = 1800  # for a test


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def table(faults: Sequence[Fault]) -> str:
    """Return the faults as a Markdown table between the marker comments of tests/README.md."""
    rows = [row("subject", "fault", "test that catches it"), "|---|---|---|"]
    for fault in faults:
        rows.append(row(fault.subject, fault.description, f"`{fault.test}`"))
    return "\n".join([MARKS[0], *rows, MARKS[1]])


def run_tests(
    tests: Sequence[str], fault: Fault | None = None, gpus: int = 0
) -> subprocess.CompletedProcess:
    """Run tests in a copy of the project, with a fault or without.

    Without GPUs, pytest runs in a fork of the fork server, which saves the imports. Raises
    NoPlaceError.
    """
    with tempfile.TemporaryDirectory(prefix="fault-") as folder:
        # With the bytecode, which keeps its modification time
        copy = Path(folder) / "project"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "out-*"))
        if fault is not None:
            path = copy / fault.file
            path.write_text(plant(fault, path.read_text(encoding="utf-8")), encoding="utf-8")
            shutil.rmtree(path.parent / "__pycache__", ignore_errors=True)

        runner = copy / "tests" / "fault_runner.py"
        cache = f"{folder}/inductor"
        if not gpus:
            return launch(runner, *tests, timeout=LIMIT_S, INDUCTOR_CACHE=cache)
        return subprocess.run(
            [sys.executable, runner, *tests],
            cwd=copy,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
            env={**os.environ, "TEST_GPU": "1", "INDUCTOR_CACHE": cache},
        )


def caught(fault: Fault) -> tuple[bool, float, str]:
    """Plant a fault. Return whether its test fails, the seconds, and pytest's output."""
    began = time.monotonic()
    done = run_tests([fault.test_path], fault, fault.gpus)
    failed = done.returncode == 1 and re.search(r"^FAILED ", done.stdout, re.M) is not None
    return failed, time.monotonic() - began, done.stdout + (done.stderr or "")


def chosen_faults(parser: argparse.ArgumentParser, args: argparse.Namespace) -> list[Fault]:
    """Return the faults that the command line asks for. Exits if there is no such subject."""
    faults = FAULTS
    if args.gpus:
        faults = [fault for fault in GPU_FAULTS if fault.gpus == args.gpus]
    if args.quick:
        faults = [fault for fault in faults if fault.quick]
    if not args.only:
        return faults
    subjects = [fault.subject for fault in faults]
    for subject in args.only:
        if subject not in subjects:
            known = ", ".join(repr(other) for other in subjects)
            parser.error(f"there is no subject {subject!r}; there are {known}")
    return [fault for fault in faults if fault.subject in args.only]


def plant_all(faults: Sequence[Fault], at_once: int) -> int:
    """Plant each fault, and print whether it was caught. Return how many were not."""
    print(row("subject", "fault", "test", "caught") + "\n|---|---|---|---|", flush=True)
    missed = 0
    with ThreadPoolExecutor(at_once) as pool:
        for fault, (found, seconds, output) in zip(faults, pool.map(caught, faults), strict=True):
            word = "yes"
            shown = [line for line in output.splitlines() if line.startswith("E  ")]
            if not found:
                missed += 1
                word = "no"
                shown = output.splitlines()
            print(row(fault.subject, fault.description, f"`{fault.test}`", word), flush=True)
            print(f"  {seconds:.1f} s", *shown[-40:], sep="\n", file=sys.stderr, flush=True)
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="SUBJECT", help="the faults of these subjects")
    parser.add_argument("--quick", action="store_true", help="those that CI plants")
    parser.add_argument("--check", action="store_true", help="first run all tests without a fault")
    parser.add_argument(
        "--table", action="store_true", help="print tests/README.md's table and end"
    )
    parser.add_argument("--gpus", type=int, default=0, choices=(0, 1, 2), help="the GPU suite's")
    args = parser.parse_args()
    faults = chosen_faults(parser, args)
    if args.table:
        print(table(faults))
        return 0
    if args.check:
        done = run_tests(list(dict.fromkeys(fault.test_path for fault in faults)), gpus=args.gpus)
        if done.returncode:
            print(f"without any fault:\n{done.stdout}", file=sys.stderr)
            return 1
    return min(1, plant_all(faults, AT_ONCE if args.gpus else 1))


if __name__ == "__main__":
    raise SystemExit(main())
