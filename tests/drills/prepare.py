"""Prepare a large text, watch its memory and its cores, and kill it at random moments until it is done again.

    python tests/drills/prepare.py --mb=1000 --kills=5

data/prepare.py must take less than 4 GB, its processes together; its workers must all work; and after kills, the same
command must give the bytes of the run that was never killed, and leave no process and no file behind.
"""

import hashlib
import json
import random
import subprocess
import sys
import time

import numpy as np
import psutil
from common import arguments, family, report
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
    """(exit code, most MB of all its processes together, {pid: its CPU seconds}, the first is ours). Of memory that
    several of them share, each counts its part. CPU time is read more often than memory, which takes longer to read:
    a worker can be done with its part of 20 MB in a tenth of a second."""
    most, seconds, looks = 0, {}, 0
    while job.poll() is None:
        memory = 0
        for process in family(job.pid):
            try:
                seconds[process.pid] = sum(process.cpu_times()[:2])
                memory += 0 if looks % 20 else process.memory_full_info().pss
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                pass
        most, looks = max(most, memory), looks + 1
        time.sleep(0.01)
    return job.returncode, most / 1e6, seconds


def killed(args, most_s):
    """(kills, starts, workers that outlived their parent by 3 s) until it is done."""
    kills = starts = orphans = 0
    while True:
        starts += 1
        job = start(args, "killed")
        if kills < args.kills:
            time.sleep(random.uniform(0.2, most_s))
            workers = family(job.pid)[1:]
            if job.poll() is None:
                job.kill()
                kills += 1
            orphans += len(psutil.wait_procs(workers, timeout=3)[1])
        code = job.wait()
        if code == 0 or starts > args.kills + 3:
            return kills, starts, orphans


def hashes(folder):
    return {path.name: path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def main():
    args = arguments(__doc__, mb=1000, kills=5, tokenizer="gpt2")
    write_text(args.folder / "text.jsonl", args.mb * 10**6)
    size = (args.folder / "text.jsonl").stat().st_size / 1e6
    began = time.time()
    code, memory, seconds = watched(start(args, "whole"))
    whole_s, (_, *of_workers) = time.time() - began, seconds.values()
    kills, starts, orphans = killed(args, whole_s / (args.kills + 1))
    same = hashes(args.folder / "whole") == hashes(args.folder / "killed")
    busy = [s for s in of_workers if s > 0.1 * max(of_workers)]  # not what Python starts beside the workers
    passed = code == 0 and memory < 4000 and len(busy) >= psutil.cpu_count()
    report(args, passed and same and not orphans and kills == args.kills,
           mb=round(size), seconds=round(whole_s, 1), mb_per_s=round(size / whole_s, 1), peak_mb=round(memory),
           cpu_seconds=[round(s, 1) for s in (next(iter(seconds.values())), *busy)],
           cores=round(sum(seconds.values()) / whole_s, 2),
           mb_per_cpu_second_of_a_worker=round(size / sum(busy), 1), kills=kills, starts=starts, orphans=orphans,
           same_bytes=same)


if __name__ == "__main__":
    main()
