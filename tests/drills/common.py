"""What the drills share: a tiny training run to torment, its losses, and a report."""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psutil
from conftest import ROOT, SMALL, ForkedJob, command_line, patience, read_history, write_characters

from runtime.git import git_commit


def arguments(doc, **defaults):
    """The drill's options: these, and --seed, --folder (a temporary one if not given) and --json, a file to write."""
    parser = argparse.ArgumentParser(description=doc.split("\n")[0])
    for name, default in {**defaults, "seed": 0, "folder": "", "json": ""}.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    args = parser.parse_args()
    args.folder = Path(args.folder or tempfile.mkdtemp(prefix="drill-"))
    args.folder.mkdir(parents=True, exist_ok=True)
    args.data = args.folder / "characters"
    if not args.data.exists():
        write_characters(args.data)
    random.seed(args.seed)
    return args


def start(data, out_dir, *options, ranks=2, launcher="fork", log=None, config=(), script=None):
    """Start a training run on a config file perhaps, SMALL and these options; its output goes to log. script: one that
    stands for train_deepspeed.py. Returns a conftest.ForkedJob, or with another launcher a subprocess.Popen."""
    command = (script or ROOT / "train_deepspeed.py", *config, *SMALL, f"--dataset={data}", f"--out_dir={out_dir}",
               *options)
    log = log or f"{out_dir}.log"
    open(log, "w").close()
    if launcher == "fork":
        return ForkedJob(command, ranks, log, log)
    with open(log, "w") as output:
        return subprocess.Popen(command_line(*command, ranks=ranks, launcher=launcher), stdout=output,
                                stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True)


def run(data, out_dir, *options, expect=0, **how):
    """start() and wait; returns what it said. AssertionError unless it ends with the exit code `expect`."""
    job = start(data, out_dir, *options, **how)
    code, words = job.wait(patience(300)), Path(how.get("log") or f"{out_dir}.log").read_text()
    assert code == expect or expect is None, f"exit code {code}, not {expect}:\n{words[-3000:]}"
    return words


def losses(out_dir):
    """{iteration: loss} and {iteration: (train_loss, val_loss)} in full precision."""
    history = read_history(out_dir)
    return ({r["iter"]: r["loss"] for r in history if "loss" in r},
            {r["iter"]: (r["train_loss"], r["val_loss"]) for r in history if "val_loss" in r})


def naming(text):
    """The training processes whose command line names `text`."""
    found = []
    for process in psutil.process_iter(["cmdline", "pid", "status"]):
        command = " ".join(process.info["cmdline"] or [])
        if text in command and "train_deepspeed" in command and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def report(args, passed, **figures):
    """Print and perhaps write what the drill found; ends with 0 if it passed, else 1."""
    found = {"command": " ".join([os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]]), "commit": git_commit(),
             "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
             "hardware": f"{os.cpu_count()} CPU cores", "passed": passed, **figures}
    print(json.dumps(found, indent=1))
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n")
    print("PASSED" if passed else "FAILED", flush=True)
    raise SystemExit(not passed)
