"""Measure the speed of training on this machine: print the figures and write them as JSON.

    python bench.py --gpus=4 config/xl_shakespeare.py --batch_size=8 --gradient_accumulation_steps=4
    python bench.py --baseline=hf config/xl_shakespeare.py              also transformers' GPT-2
    python bench.py --baseline=hf_compiled config/xl_shakespeare.py     the same, compiled
    python bench.py --baseline=pytorch config/xl_shakespeare.py         also plain PyTorch
    python bench.py --baseline=fsdp2 --gpus=2 config/xl_shakespeare.py  also PyTorch's FSDP2

The figures are the step time, tokens/s, MFU, peak memory and the time to the first step. The
baselines are transformers' GPT-2 with DeepSpeed, and a GPT in plain PyTorch, with DDP or in FSDP2.

All other arguments go to train_deepspeed.py. Speed does not depend on the weights: if you don't
have GPT-2's, add --init_from=scratch --n_layer=48 --n_head=25 --n_embd=1600."""

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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from configurator import settings_of_script
from runtime.files import ROOT, write_atomic
from runtime.git import git_commit
from runtime.monitor.history import read_history
from runtime.output import exit_with_error
from runtime.paths import expand_path
from runtime.version import version_line

SCRIPT = ROOT / "train_deepspeed.py"
LAUNCHER = ROOT / "launch_deepspeed.py"
BASELINES = ROOT / "examples/baselines.py"
# Only the steps count: no evaluation but the first, and nothing is saved
MEASURED = (
    "--eval_interval=1000000000",
    "--eval_iters=1",
    "--keep_last=0",
    "--log_interval=1",
    "--max_epochs=None",
    "--eval_epochs=None",
    "--dry_run=False",
    "--eval_only=False",
)


def argument_parser() -> argparse.ArgumentParser:
    """Return the parser of bench.py's own options."""
    # What isn't listed here goes to train_deepspeed.py
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--version", action="version", version=version_line())
    add("--gpus", type=int, default=1, help="number of processes, also on a CPU")
    add("--warmup", type=int, default=4, help="number of steps before those measured")
    add("--repeats", type=int, default=10, help="number of steps to measure")
    baselines = ("hf", "hf_compiled", "pytorch", "fsdp2")
    add("--baseline", choices=baselines, help="also measure a baseline")
    add(
        "--json",
        default="bench.json",
        type=expand_path,
        help="output file (default: bench.json)",
    )
    return parser


def main() -> None:
    parser = argument_parser()
    args, argv = parser.parse_known_args()
    if min(args.gpus, args.warmup, args.repeats) < 1:
        parser.error("--gpus, --warmup and --repeats must be at least 1")

    # A measurement takes minutes, so see first whether its record can be written
    folder = os.path.dirname(os.path.abspath(args.json))
    if os.path.isdir(args.json) or not os.access(folder, os.W_OK):
        parser.error(
            f"--json={args.json} can't be written: choose a file in a folder that exists"
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # removes temporary folders

    # What each record begins with
    head = {
        "command": " ".join(["bench.py", *sys.argv[1:]]),
        "commit": git_commit(),
        "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
    }
    # First without the baseline, which may fail
    for record in measure(args, argv):
        content = json.dumps(head | record, indent=1)
        if args.json == parser.get_default("json"):
            write_atomic(args.json, content)  # a link of others at this place is replaced
        else:
            Path(args.json).write_text(content)
        print(f"written to {args.json}")


def summarize(values: list[float]) -> dict[str, float]:
    """Return the median, the range and the number of values."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "count": len(values),
    }


def run_ranks(args: argparse.Namespace, out_dir: str, *command: str | os.PathLike) -> str:
    """Run a script in args.gpus processes and return its output.

    If they fail, print it and exit.
    """
    # Processes of their own, so that each measurement begins with an empty GPU
    launcher = [sys.executable, LAUNCHER, "--standalone", f"--nproc_per_node={args.gpus}"]
    with subprocess.Popen(
        [*map(str, launcher), *command, f"--out_dir={out_dir}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            output, _ = process.communicate()
        # At Ctrl-C, subprocess.run would kill the launcher, and leave ranks that have not joined
        finally:
            process.terminate()
            process.wait()
    if process.returncode:
        print(output[-6000:], file=sys.stderr)
        raise SystemExit(process.returncode)
    return output


def measure(args: argparse.Namespace, argv: list[str]) -> Iterator[dict[str, Any]]:
    """Measure the steps of train_deepspeed.py and yield the record.

    Then also measure the baseline, if there is one, and yield the record with it.
    """
    check_settings(args, argv)
    argv = [*argv, f"--max_iters={args.warmup + args.repeats}", *MEASURED]
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder:
        # Ours
        output = run_ranks(args, folder, SCRIPT, *argv)
        record = record_of_run(folder, output, args.warmup)
        print_record(record)
        yield record

        # The baseline
        if args.baseline:
            record["baseline"] = measure_baseline(args, argv, folder, record)
            yield record


def check_settings(args: argparse.Namespace, argv: list[str]) -> None:
    """Exit if a setting is wrong, or can't be measured here."""
    # The script's own check, before any process is started
    settings = settings_of_script(str(SCRIPT), argv)
    if settings.dry_run or settings.target_gpu:
        exit_with_error(
            "bench.py measures on this machine: drop --dry_run and --target_gpu, or give them to "
            "train_deepspeed.py, which estimates"
        )
    if args.baseline and (settings.lora_rank or settings.optimizer == "muon"):
        exit_with_error(
            f"--baseline={args.baseline} trains all weights with AdamW: drop it, or add "
            "--lora_rank=0 --optimizer=adamw"
        )
    if settings.batch_ramp or settings.length_ramp:
        exit_with_error(
            "bench.py measures steps of one size: add --batch_ramp=None --length_ramp=None"
        )


def record_of_run(folder: str, output: str, warmup: int) -> dict[str, Any]:
    """Return the figures of a run.

    folder: its out_dir. output: what it has printed. warmup: the steps that don't count.
    """
    # The run's own records
    run = json.loads(Path(folder, "settings.json").read_text())
    steps = [record for record in read_history(folder) if "ms" in record]
    counted = steps[warmup:]
    # Without the peak of the GPU, there is no MFU
    mfu = None
    if counted[0]["mfu"]:
        mfu = statistics.median(step["mfu"] for step in counted)
    stage = re.search(r"ZeRO-(\d) \(", output)
    assert stage is not None  # each plan names it
    return {
        "hardware": run["hardware"],
        "versions": run["versions"],
        "settings": run["settings"],
        "world_size": run["world_size"],
        "ms": summarize([step["ms"] for step in counted]),
        "history": steps,
        "tokens_per_s": statistics.median(step["tokens_per_s"] for step in counted),
        "mfu": mfu,
        "peak_gb": max(step["memory"] for step in steps) / 1e9,
        "first_step_s": steps[0]["first_step_s"],
        "stage": int(stage[1]),
    }


def print_record(record: dict[str, Any]) -> None:
    """Print the figures of a run in one line."""
    mfu = "n/a"
    if record["mfu"] is not None:
        mfu = f"{record['mfu']:.1%}"
    print(
        f"{record['ms']['median']:,.1f} ms per step, {record['tokens_per_s']:,.0f} tokens/s, "
        f"MFU {mfu}, peak {record['peak_gb']:.1f} GB, first step after "
        f"{record['first_step_s']:.0f} s"
    )


def measure_baseline(
    args: argparse.Namespace, argv: list[str], folder: str, record: dict[str, Any]
) -> dict[str, Any]:
    """Measure the same steps of a baseline. Print and return its figures.

    argv: train_deepspeed.py's arguments. folder: for its files. record: our figures.
    """
    # The same batch, which --batch_size=auto may have chosen
    settings = record["settings"]
    run_ranks(
        args,
        folder,
        BASELINES,
        args.baseline,
        *argv,
        f"--batch_size={settings['batch_size']}",
        f"--gradient_accumulation_steps={settings['gradient_accumulation_steps']}",
    )

    # How it compares: above 1, ours is faster
    other = json.loads(Path(folder, "baseline.json").read_text())
    other["ms"] = summarize(other["ms"][args.warmup :])
    other["ratio"] = other["ms"]["median"] / record["ms"]["median"]
    print(
        f"{other['name']}: {other['ms']['median']:,.1f} ms per step, {other['ratio']:.2f} times "
        "ours"
    )
    return other


if __name__ == "__main__":
    main()
