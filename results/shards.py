"""Measure data/prepare.py on token shards beside cp and sha256sum, and write results/cpu_shards.json.

    python results/shards.py FOLDER        needs 6 GB there, which it frees again

Both begin with shards that aren't in the page cache, and flush what they write.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
SHARDS, TOKENS, ROUNDS = 10, 100_000_000, 7


def write_shards(folder):
    folder.mkdir(parents=True)
    rng, header = np.random.default_rng(0), np.zeros(256, "<i4")
    header[:3] = 20240520, 1, TOKENS
    for number in range(SHARDS):
        with open(folder / f"made_{'train' if number else 'val'}_{number:06}.bin", "wb") as file:
            file.write(header.tobytes())
            for _ in range(100):  # a process that is started from here begins with the memory of this one
                file.write(rng.integers(0, 50257, TOKENS // 100, dtype=np.uint16).tobytes())


def measure(command, shards):
    """Return (seconds, most resident MB of a process) of a shell command."""
    os.sync()
    for file in shards.iterdir():
        with open(file, "rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    began = time.perf_counter()
    process = subprocess.Popen(["bash", "-euc", command], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, command
    return time.perf_counter() - began, usage.ru_maxrss * 1024 / 1e6


def main():
    folder = Path(sys.argv[1]).resolve() / "measure_shards"
    shards = folder / "shards"
    write_shards(shards)
    size = sum(file.stat().st_size for file in shards.iterdir())
    commands = {"prepare": f"exec {sys.executable} {ROOT}/data/prepare.py {shards} --name={folder}/out --overwrite",
                "cp and sha256sum": f"mkdir -p {folder}/copy; cp {shards}/* {folder}/copy; sync {folder}/copy/*;"
                                    f"sha256sum {folder}/copy/*"}
    runs = {name: [] for name in commands}
    for _ in range(ROUNDS):
        for name, command in commands.items():
            runs[name].append(measure(command, shards))
            shutil.rmtree(folder / "out", ignore_errors=True)
            shutil.rmtree(folder / "copy", ignore_errors=True)
    shutil.rmtree(folder)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    result = {"command": "python results/shards.py FOLDER", "commit": commit, "hardware": "2 CPU cores",
              "what": "data/prepare.py on 10 shards of llm.c's format, beside cp, sync and sha256sum of them, in turns",
              "bytes": size, "load_average": os.getloadavg()[2], "cases": {name: {
                  "seconds": [round(seconds, 2) for seconds, _ in measured],
                  "median_s": round(sorted(measured)[ROUNDS // 2][0], 2),
                  "median_mb_per_s": round(size / 1e6 / sorted(measured)[ROUNDS // 2][0]),
                  "peak_mb": round(max(peak for _, peak in measured))} for name, measured in runs.items()}}
    del result["cases"]["cp and sha256sum"]["peak_mb"]  # less than this process has
    text = json.dumps(result, indent=1)
    Path(__file__).with_name("cpu_shards.json").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
