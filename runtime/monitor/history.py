"""out_dir/history.jsonl, one JSON object per line; docs/output.md lists the keys. Without torch,
for plot.py."""

import errno
import json
import math
import os
import sys
from collections.abc import Mapping
from typing import Any

from runtime.files import write_atomic
from runtime.output import printable
from runtime.untrusted import UnsafeFileError, open_no_follow, open_regular, parse_json

MAX_HISTORY_BYTES = 10**9  # 5 million iterations
MAX_RECORD_BYTES = 10**6  # a printed sample may have 1,000 tokens
MAX_RECORDS = 1_000_000  # reading them takes 10 seconds
MAX_REPORTED = 10  # invalid lines
MAX_SKIPPED = 1000  # a killed run leaves one
MAX_VALUE = 1e30  # that a plot can draw


def append_history(out_dir: str, record: Mapping) -> None:
    """Add one record to out_dir/history.jsonl: all of it, or nothing and an OSError.

    Raises UnsafeFileError if the file is a link, which others may have put there.
    """
    line = json_line(record).encode()
    path = os.path.join(out_dir, "history.jsonl")
    descriptor = open_no_follow(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with os.fdopen(descriptor, "ab", buffering=0) as file:
        size = os.fstat(descriptor).st_size
        if file.write(line) < len(line):
            file.truncate(size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read_history(out_dir: str) -> list[dict]:
    """Return the records of out_dir/history.jsonl, dicts with "iter"; [] if there is no such file.

    Invalid lines are reported and skipped: the last one may be incomplete. Raises UnsafeFileError.
    """
    path = os.path.join(out_dir, "history.jsonl")
    history: list[dict] = []
    if not os.path.lexists(path):
        return history
    with open_regular(path, MAX_HISTORY_BYTES, follow_links=False) as file:
        number = 0
        skipped = []  # numbers of lines
        while True:
            line = file.readline(MAX_RECORD_BYTES)
            if not line:
                break
            number += 1
            try:
                # A line that a killed run has left may be incomplete
                record = parse_json(line.decode(errors="replace"))
                is_complete = isinstance(record, dict) and is_iteration(record.get("iter"))
            except ValueError:
                is_complete = False
            if is_complete:
                history.append(record)
            else:
                skipped.append(number)
            if len(history) > MAX_RECORDS or len(skipped) > MAX_SKIPPED:
                raise UnsafeFileError(
                    f"{path} has more than {MAX_RECORDS:,} records, or more than {MAX_SKIPPED:,} "
                    "lines that are none: move it elsewhere"
                )

    # What was skipped
    for number in skipped[:MAX_REPORTED]:
        report(f"{path}: skipping line {number}, which is not a complete record")
    if len(skipped) > MAX_REPORTED:
        report(f"{path}: skipping {len(skipped):,} lines in all, which are not complete records")
    return history


def json_line(record: Mapping) -> str:
    """Return a record as a line of JSON, which has no NaN and no infinity: they become null."""
    return json.dumps(without_nan(record), allow_nan=False) + "\n"


def without_nan(value: object) -> object:
    """Return a value of JSON with None in the place of numbers that are not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return value


def report(message: str) -> None:
    print(printable(message), file=sys.stderr)


def is_iteration(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**53  # beyond that, a plot can't draw it


def series(history: list[dict], key: str) -> list[tuple[int, float]]:
    """Return [(iter, value)] of the records whose `key` is a number that can be drawn."""
    points = []
    for record in history:
        value: Any = record.get(key)
        if type(value) not in (int, float):
            continue
        if abs(value) <= MAX_VALUE:
            points.append((record["iter"], float(value)))
    return points


def trim_history(out_dir: str, iter_num: int) -> None:
    """Drop the records of an earlier run after step iter_num, where this run starts."""
    path = os.path.join(out_dir, "history.jsonl")
    if os.path.lexists(path):
        kept = [record for record in read_history(out_dir) if record["iter"] <= iter_num]
        write_atomic(path, "".join(json_line(record) for record in kept))
