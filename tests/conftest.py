"""What all tests share: a machine without GPUs, a small data set, and the training script with small settings."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
# For this process and for every one that it starts: before torch is imported
os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1")
sys.path.insert(0, str(ROOT))

import numpy as np
import pytest

from runtime.bins import write_dataset

CHARS = "\n abcdefghijklmnopqrstuvwxyz"  # 28 characters: their embedding is padded to 64 rows
SMALL = ("--init_from=scratch", "--device=cpu", "--dtype=float32", "--n_layer=2", "--n_head=2", "--n_embd=32",
         "--block_size=32", "--batch_size=2", "--gradient_accumulation_steps=2", "--learning_rate=1e-3",
         "--max_iters=4", "--eval_interval=2", "--eval_iters=2")

STAGES = {0: "config/ds/zero0.json", 1: "config/ds/zero1.json", 2: "ds_config_zero2.json", 3: "ds_config_zero3.json"}
EIGHT = ("--max_iters=8", "--lr_decay_iters=8", "--warmup_iters=2", "--dropout=0.1", "--keep_last=10")


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def command_line(script, *args, ranks=1, launcher="torchrun"):
    """The command by which 'python', 'torchrun' or 'deepspeed' starts a script."""
    by = {
        "python": [],
        "torchrun": ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}", f"--master_port={free_port()}"],
        "runtime.launch": ["-m", "runtime.launch", "--standalone", f"--nproc_per_node={ranks}"],
        "deepspeed": ["-m", "deepspeed.launcher.runner", f"--num_gpus={ranks}", f"--master_port={free_port()}"],
    }[launcher]
    return [sys.executable, *by, str(script), *map(str, args)]


def launch(script, *args, ranks=1, launcher="torchrun", timeout=300, **env):
    """Run a Python script by 'python', 'torchrun' or 'deepspeed', as a user would; -> subprocess.CompletedProcess.

    In a process group of its own, all of which ends with the time-out: a launcher that is killed orphans its ranks.
    """
    command = command_line(script, *args, ranks=ranks, launcher=launcher)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
                          env={**os.environ, **env}, start_new_session=True) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 9)
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def planted(folder, code):
    """A script in `folder` that runs `code`, in which a test plants its fault, and then train_deepspeed.py."""
    script = Path(folder) / "planted.py"
    script.write_text(f"""import os, runpy, sys
sys.path.insert(0, {str(ROOT)!r})
{code}
sys.argv[0] = {str(ROOT / "train_deepspeed.py")!r}
runpy.run_path(sys.argv[0], run_name="__main__")
""")
    return script


def wait_until(condition, seconds=60, every=0.05):
    """Return the first true value of condition(), or the last one after so many seconds."""
    deadline = time.monotonic() + seconds
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(every)
    return value


def read_history(out_dir):
    """The records of out_dir/history.jsonl, in order; none where there is no such file."""
    path = Path(out_dir) / "history.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def write_characters(folder):
    """Write 18,000 and 2,000 characters that a model can learn from: a walk over words, always the same."""
    words = [word + " " for word in "the cat sat on a mat and saw how seven foxes jump over quiet lazy dogs".split()]
    steps = np.random.default_rng(0).integers(1, 4, 6000).cumsum()
    text = "".join(words[step % len(words)] + "\n" * (step % 7 == 0) for step in steps.tolist())[:20_000]
    ids = [CHARS.index(char) for char in text]
    write_dataset(folder, ids[:18_000], ids[18_000:], {"kind": "char", "chars": CHARS}, len(CHARS),
                  {"name": "a test", "sha256": "0" * 64, "bytes": len(text)})


@pytest.fixture(scope="session")
def characters(tmp_path_factory):
    """A folder with a data set of characters."""
    folder = tmp_path_factory.mktemp("characters")
    write_characters(folder)
    return folder


@pytest.fixture(scope="session")
def train(characters, tmp_path_factory):
    """train("--max_iters=6", ranks=2, launcher="torchrun", out_dir=...) runs train_deepspeed.py on SMALL and these.

    The result has returncode, stdout, stderr, out_dir, history (all records), losses {iter: loss} of the steps and
    evals {iter: (train_loss, val_loss)}, the numbers in full precision.
    """

    def run(*args, ranks=1, launcher="python", out_dir=None, **options):
        out_dir = Path(out_dir or tmp_path_factory.mktemp("run") / "out")
        done = launch(ROOT / "train_deepspeed.py", *SMALL, f"--dataset={characters}", f"--out_dir={out_dir}", *args,
                      ranks=ranks, launcher=launcher, **options)
        history = read_history(out_dir)
        return SimpleNamespace(
            returncode=done.returncode, stdout=done.stdout, stderr=done.stderr, out_dir=out_dir, history=history,
            losses={r["iter"]: r["loss"] for r in history if "loss" in r},
            evals={r["iter"]: (r["train_loss"], r["val_loss"]) for r in history if "val_loss" in r})

    return run


@pytest.fixture
def disk_calls(monkeypatch):
    """The calls that make files durable, in order: ("fsync", path), ("rename", new path) and ("replace", new path)."""
    calls = []

    def recorded(name, path_of):
        function = getattr(os, name)

        def call(*args, **kwargs):
            calls.append((name, str(path_of(*args))))
            return function(*args, **kwargs)

        monkeypatch.setattr(os, name, call)

    recorded("fsync", lambda fd: os.readlink(f"/proc/self/fd/{fd}"))
    for name in ("rename", "replace"):
        recorded(name, lambda old, new: new)
    return calls


def stage(n):
    return f"--deepspeed_config={STAGES[n]}"


def done(run):
    assert run.returncode == 0, run.stdout + run.stderr
    return run


@pytest.fixture(scope="session")
def whole(train):
    """whole(n): 8 iterations on 2 ranks at stage n, in float32 and with dropout, an evaluation and a tag every 2."""
    runs = {}

    def run(n):
        if n not in runs:
            runs[n] = done(train(*EIGHT, stage(n), ranks=2, launcher="torchrun"))
        return runs[n]

    return run
