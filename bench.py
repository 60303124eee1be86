"""Measure the speed of training on this machine: print the figures and write them as JSON.

    python bench.py --gpus=4 config/xl_shakespeare.py --batch_size=8    step time, memory, time to the first step
    python bench.py --baseline=hf config/xl_shakespeare.py              also transformers' GPT-2 with DeepSpeed
    python bench.py --baseline=pytorch config/xl_shakespeare.py         also a GPT in plain PyTorch, with DDP
    python bench.py --baseline=fsdp2 --gpus=2 config/xl_shakespeare.py  also a GPT in PyTorch's FSDP2

All other arguments go to train_deepspeed.py. Speed does not depend on the weights: if you don't have GPT-2's, add
--init_from=scratch --n_layer=48 --n_head=25 --n_embd=1600."""

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from configurator import settings_of_script
from runtime.files import ROOT, write_atomic
from runtime.hardware import git_commit
from runtime.monitor.history import read_history
from runtime.output import exit_with_error
from runtime.paths import expand_path

SCRIPT, LAUNCHER, BASELINES = ROOT / "train_deepspeed.py", ROOT / "launch_deepspeed.py", ROOT / "examples/baselines.py"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=1, help="number of processes, also on a CPU")
    parser.add_argument("--warmup", type=int, default=4, help="number of steps before those measured")
    parser.add_argument("--repeats", type=int, default=10, help="number of steps to measure")
    parser.add_argument("--baseline", choices=("hf", "pytorch", "fsdp2"), help="also measure a baseline")
    parser.add_argument("--json", default="bench.json", type=expand_path, help="output file (default: bench.json)")
    args, argv = parser.parse_known_args()
    if min(args.gpus, args.warmup, args.repeats) < 1:
        parser.error("--gpus, --warmup and --repeats must be at least 1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # removes temporary folders
    if os.path.isdir(args.json) or not os.access(os.path.dirname(os.path.abspath(args.json)), os.W_OK):
        parser.error(f"--json={args.json} can't be written: choose a file in a folder that exists")
    head = {"command": " ".join(["bench.py", *sys.argv[1:]]), "commit": git_commit(),
            "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime())}
    for record in measure(args, argv):  # first without the baseline, which may fail
        content = json.dumps(head | record, indent=1)
        if args.json == parser.get_default("json"):
            write_atomic(args.json, content)  # a link of others at this place is replaced
        else:
            Path(args.json).write_text(content)
        print(f"written to {args.json}")


def summarize(values):
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "count": len(values)}


def run_ranks(args, out_dir, *command):
    """Run a script in args.gpus processes and return its output. If they fail, print it and exit."""
    launcher = [sys.executable, LAUNCHER, "--standalone", f"--nproc_per_node={args.gpus}"]
    with subprocess.Popen([*launcher, *command, f"--out_dir={out_dir}"], stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True) as process:
        try:
            output, _ = process.communicate()
        finally:  # subprocess.run would kill the launcher, and leave ranks that have not joined yet
            process.terminate()
            process.wait()
    if process.returncode:
        print(output[-6000:], file=sys.stderr)
        raise SystemExit(process.returncode)
    return output


def measure(args, argv):
    """Measure the steps of train_deepspeed.py and yield the figures, then also those of the baseline, if any."""
    settings = settings_of_script(SCRIPT, argv)  # exits if a setting is wrong
    if settings.dry_run or settings.target_gpu:
        exit_with_error("bench.py measures on this machine: drop --dry_run and --target_gpu, or give them to "
                        "train_deepspeed.py, which estimates")
    if args.baseline and (settings.lora_rank or settings.optimizer == "muon"):
        exit_with_error(f"--baseline={args.baseline} trains all weights with AdamW: drop it, or add --lora_rank=0 "
                        "--optimizer=adamw")
    argv = [*argv, f"--max_iters={args.warmup + args.repeats}", "--eval_interval=1000000000", "--eval_iters=1",
            "--keep_last=0", "--log_interval=1", "--max_epochs=None", "--eval_epochs=None", "--dry_run=False",
            "--eval_only=False"]
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder:
        output = run_ranks(args, folder, SCRIPT, *argv)
        run = json.loads(Path(folder, "settings.json").read_text())
        history = [r for r in read_history(folder) if "ms" in r]
        counted, s = history[args.warmup :], run["settings"]
        record = {key: run[key] for key in ("hardware", "versions", "settings", "world_size")} | {
            "ms": summarize([r["ms"] for r in counted]), "history": history,
            "tokens_per_s": statistics.median(r["tokens_per_s"] for r in counted),
            "mfu": counted[0]["mfu"] and statistics.median(r["mfu"] for r in counted),
            "peak_gb": max(r["memory"] for r in history) / 1e9, "first_step_s": history[0]["first_step_s"],
            "stage": int(re.search(r"ZeRO-(\d) \(", output)[1])}
        mfu = "n/a" if record["mfu"] is None else f"{record['mfu']:.1%}"
        print(f"{record['ms']['median']:,.1f} ms per step, {record['tokens_per_s']:,.0f} tokens/s, MFU {mfu}, peak "
              f"{record['peak_gb']:.1f} GB, first step after {record['first_step_s']:.0f} s")
        yield record
        if args.baseline:
            run_ranks(args, folder, BASELINES, args.baseline, *argv, f"--batch_size={s['batch_size']}",
                      f"--gradient_accumulation_steps={s['gradient_accumulation_steps']}")
            other = record["baseline"] = json.loads(Path(folder, "baseline.json").read_text())
            other["ms"] = summarize(other["ms"][args.warmup :])
            other["ratio"] = other["ms"]["median"] / record["ms"]["median"]
            print(f"{other['name']}: {other['ms']['median']:,.1f} ms per step, {other['ratio']:.2f} times ours")
            yield record


if __name__ == "__main__":
    main()
