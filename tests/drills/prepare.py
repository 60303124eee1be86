"""Prepare a large text, watch its memory and its cores, and kill it at random moments until it is done again.

    python tests/drills/prepare.py --mb=1000 --kills=5

data/prepare.py must take less than 4 GB; from 200 MB on, its workers must all work; and after kills, the same command
must give the bytes of the run that was never killed, and leave no other file behind."""

import contextlib
import hashlib
import json
import random
import subprocess
import sys
import time

import numpy as np
import psutil
from common import arguments, report
from conftest import ROOT


def write_text(path, size):
    """About `size` bytes of JSON lines: documents of up to 8 kB in made-up words by Zipf's law, each 50th one again."""
    rng = np.random.default_rng(0)
    syllables = [c + v for c in "bdfghklmnprstvwz" for v in ("a", "e", "i", "o", "u", "an", "er", "ing", "ou", "y")]
    words = np.array(["".join(rng.choice(syllables, rng.integers(1, 5))) for _ in range(30_000)])
    number = written = 0
    with open(path, "w") as file:
        while written < size:
            if number % 50 != 49:
                text = words[rng.zipf(1.3, rng.integers(30, 1200)) % len(words)]
                lines = "\n".join(" ".join(text[i : i + 12]) for i in range(0, len(text), 12))
            written += file.write(json.dumps({"text": lines}) + "\n")
            number += 1


def start(args, name):
    command = [sys.executable, str(ROOT / "data" / "prepare.py"), str(args.folder / "text.jsonl"),
               f"--name={args.folder / name}", f"--tokenizer={args.tokenizer}"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def watched(job):
    """(exit code, most MB, {thread: its CPU seconds}, the first reads). CPU time is read more often than memory, which
    takes longer to read: a worker can be done with its part of 20 MB in a tenth of a second."""
    most, seconds, looks, process = 0, {}, 0, psutil.Process(job.pid)
    while job.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            seconds.update((thread.id, thread.user_time + thread.system_time) for thread in process.threads())
            most = max(most, 0 if looks % 20 else process.memory_full_info().uss)
        looks += 1
        time.sleep(0.01)
    return job.returncode, most / 1e6, seconds


def killed(args, most_s):
    """(kills, starts) until it is done."""
    kills = starts = 0
    while True:
        starts += 1
        job = start(args, "killed")
        if kills < args.kills:
            time.sleep(random.uniform(0.2, most_s))
            if job.poll() is None:
                job.kill()
                kills += 1
        code = job.wait()
        if code == 0 or starts > args.kills + 3:
            return kills, starts


def hashes(folder):
    return {path.name: path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def main():
    args = arguments(__doc__, mb=1000, kills=5, tokenizer="gpt2")
    write_text(args.folder / "text.jsonl", args.mb * 10**6)
    size = (args.folder / "text.jsonl").stat().st_size / 1e6
    began = time.time()
    code, memory, seconds = watched(start(args, "whole"))
    whole_s, (_, *of_workers) = time.time() - began, seconds.values()
    kills, starts = killed(args, whole_s / (args.kills + 1))
    same = hashes(args.folder / "whole") == hashes(args.folder / "killed")
    busy = [s for s in of_workers if s > 0.1 * max(of_workers)]  # not the threads of libraries
    shared = len(busy) >= psutil.cpu_count() or args.mb < 200  # one worker can take all of a small text
    passed = code == 0 and memory < 4000 and shared
    report(args, passed and same and kills == args.kills,
           mb=round(size), seconds=round(whole_s, 1), mb_per_s=round(size / whole_s, 1), peak_mb=round(memory),
           cpu_seconds=[round(s, 1) for s in (next(iter(seconds.values())), *busy)],
           cores=round(sum(seconds.values()) / whole_s, 2),
           mb_per_cpu_second_of_a_worker=round(size / sum(busy), 1), kills=kills, starts=starts, same_bytes=same)


if __name__ == "__main__":
    main()
