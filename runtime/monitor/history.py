"""out_dir/history.jsonl: a record for each printed step, evaluation, sample and warning. Without torch, for plot.py."""

import errno
import json
import os
import sys

from runtime.files import write_atomic


def append_history(out_dir, record):
    """Add one record to out_dir/history.jsonl: all of it or, with an OSError, nothing."""
    line = (json.dumps(record) + "\n").encode()
    with open(os.path.join(out_dir, "history.jsonl"), "ab", buffering=0) as f:
        size = f.tell()
        if f.write(line) < len(line):
            f.truncate(size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read_history(out_dir):
    """The records of out_dir/history.jsonl, dicts with "iter"; none where there is no such file. Other lines are
    reported on stderr and skipped: the last one may be unfinished."""
    path, history = os.path.join(out_dir, "history.jsonl"), []
    if not os.path.exists(path):
        return history
    with open(path, encoding="utf-8", errors="replace") as f:
        for number, line in enumerate(f, 1):
            try:
                record = json.loads(line)
                record["iter"]
                history.append(record)
            except (ValueError, TypeError, KeyError):
                print(f"{path}: skipping line {number}, which is not a complete record", file=sys.stderr)
    return history


def series(history, key):
    """[(iter, value)] of the records that have a number there; NaN and infinity are numbers, None is not."""
    return [(r["iter"], float(r[key])) for r in history if type(r.get(key)) in (int, float)]


def trim_history(out_dir, iter_num):
    """Drop what an earlier run recorded after step iter_num, where this run begins."""
    if history := read_history(out_dir):
        records = [json.dumps(record) + "\n" for record in history if record["iter"] <= iter_num]
        write_atomic(os.path.join(out_dir, "history.jsonl"), "".join(records))
