"""out_dir/history.jsonl, one JSON object per line; docs/output.md lists the keys. Without torch, for plot.py."""

import errno
import json
import math
import os
import sys

from runtime.files import write_atomic


def append_history(out_dir, record):
    """Add one record to out_dir/history.jsonl: all of it, or nothing and an OSError."""
    line = (json.dumps(record) + "\n").encode()
    with open(os.path.join(out_dir, "history.jsonl"), "ab", buffering=0) as f:
        size = f.tell()
        if f.write(line) < len(line):
            f.truncate(size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read_history(out_dir):
    """Return the records of out_dir/history.jsonl, dicts with "iter"; [] if there is no such file. Invalid lines are
    reported and skipped: the last one may be incomplete."""
    path, history = os.path.join(out_dir, "history.jsonl"), []
    if not os.path.exists(path):
        return history
    with open(path, encoding="utf-8", errors="replace") as f:
        for number, line in enumerate(f, 1):
            try:
                record = json.loads(line)
                record["iter"] + 0  # a number
                history.append(record)
            except (ValueError, TypeError, KeyError):
                print(f"{path}: skipping line {number}, which is not a complete record", file=sys.stderr)
    return history


def series(history, key):
    """Return [(iter, value)] of the records whose `key` is a finite number."""
    return [(r["iter"], float(r[key])) for r in history if type(r.get(key)) in (int, float) and math.isfinite(r[key])]


def trim_history(out_dir, iter_num):
    """Drop the records of an earlier run after step iter_num, where this run starts."""
    if os.path.exists(path := os.path.join(out_dir, "history.jsonl")):
        records = [json.dumps(record) + "\n" for record in read_history(out_dir) if record["iter"] <= iter_num]
        write_atomic(path, "".join(records))
