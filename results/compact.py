"""Measure compact optimizer state beside fp32 state, on all GPUs of this machine.

    python results/compact.py losses FILE.json --config=config/train_gpt2.py --dataset=TEXT --iters=600
    python results/compact.py speed FILE.json --splits=8x4,4x8,1x32
    python results/compact.py fits FILE.json --gigabytes=22.5 -- --init_from=FOLDER

losses: trains with each optimizer and seed, and compares the last validation losses.
speed: times GPT-2 XL from random weights, with gradient checkpointing, per micro-batch x
accumulation. fits: runs the 24 GB preset with PyTorch limited to so much of the GPU, and measures
the process's memory up to the first step; without --init_from it makes random weights.

Each run's figures are written at once, and no run is begun after --seconds. The code has to be in a
commit, which the record names. Options after -- go to train_deepspeed.py.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from runtime.git import git_commit
from runtime.monitor.history import read_history

XL = (
    "config/xl_shakespeare.py",
    "--init_from=scratch",
    "--n_layer=48",
    "--n_head=25",
    "--n_embd=1600",
)
WAYS = {"fp32": "--compact_optimizer=False", "compact": "--compact_optimizer=True"}
LIMITED = """import atexit, pathlib, resource, runpy, sys, torch
def write_peak():
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pathlib.Path({peak!r}).write_text(str(kilobytes))
atexit.register(write_peak)
size = torch.cuda.get_device_properties(0).total_memory
torch.cuda.set_per_process_memory_fraction({bytes} / size)
sys.argv = [{script!r}, *sys.argv[1:]]
sys.path.insert(0, str(pathlib.Path({script!r}).parent))
runpy.run_path({script!r}, run_name="__main__")
"""


def run(command: list[str], deadline: float) -> str:
    """Run a command until the deadline at most, and return its output. Raises SystemExit."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        output, _ = process.communicate(timeout=deadline - time.monotonic())
    finally:  # a GPU that a run still holds would fail the next one
        process.terminate()
        process.wait()
    if process.returncode:
        raise SystemExit(output[-6000:])
    return output


def losses(args: argparse.Namespace, record: dict, deadline: float) -> None:
    """Add {optimizer: {seed: {way: validation losses}}} to the record."""
    for seed in args.seeds.split(","):
        for optimizer in args.optimizers.split(","):
            for way, option in WAYS.items():
                if time.monotonic() > deadline:
                    return
                with tempfile.TemporaryDirectory() as folder:
                    settings = [
                        args.config,
                        f"--dataset={args.dataset}",
                        f"--max_iters={args.iters}",
                    ]
                    settings += [
                        f"--seed={seed}",
                        f"--optimizer={optimizer}",
                        option,
                        "--keep_last=0",
                    ]
                    settings += ["--dtype=bfloat16", f"--eval_interval={args.iters // 4}"]
                    settings += [f"--out_dir={folder}", *args.more]
                    run([sys.executable, str(ROOT / "train_deepspeed.py"), *settings], deadline)
                    history = read_history(folder)
                found = {r["iter"]: r["val_loss"] for r in history if "val_loss" in r}
                record["runs"].setdefault(optimizer, {}).setdefault(seed, {})[way] = found
                save(args.file, record)
                print(optimizer, seed, way, found, flush=True)


def speed(args: argparse.Namespace, record: dict, deadline: float) -> None:
    """Add {split: {way: bench.py's figures}} to the record."""
    for split in args.splits.split(","):
        micro, accumulation = split.split("x")
        for way, option in WAYS.items():
            if time.monotonic() > deadline:
                return
            with tempfile.TemporaryDirectory() as folder:
                file = f"{folder}/bench.json"
                settings = [*XL, f"--batch_size={micro}", option, "--gradient_checkpointing=True"]
                settings += [f"--gradient_accumulation_steps={accumulation}", *args.more]
                bench = [sys.executable, str(ROOT / "bench.py"), f"--json={file}"]
                run([*bench, *settings], deadline)
                measured = json.loads(Path(file).read_text())
            figures = {key: measured[key] for key in ("ms", "peak_gb", "hardware", "versions")}
            record["runs"].setdefault(split, {})[way] = figures
            save(args.file, record)
            print(split, way, figures["ms"], figures["peak_gb"], flush=True)


def fits(args: argparse.Namespace, record: dict, deadline: float) -> None:
    """Add whether the 24 GB preset ends with so much memory, with its peaks, to the record."""
    config, *shape = XL
    if any(option.startswith("--init_from=") for option in args.more):
        shape = []
    with tempfile.TemporaryDirectory() as folder:
        peak_file = Path(folder, "peak")
        script = Path(folder, "limited.py")
        limited = LIMITED.format(
            bytes=args.gigabytes * 1e9,
            script=str(ROOT / "train_deepspeed.py"),
            peak=str(peak_file),
        )
        script.write_text(limited)

        # Nothing is saved: a save takes as much host memory as there is
        settings = [config, "config/presets/24gb.py", *shape, "--keep_last=0"]
        settings += [f"--out_dir={folder}/out", *args.more]
        run([sys.executable, str(script), *settings], deadline)
        steps = [r for r in read_history(f"{folder}/out") if "ms" in r]
        host_gb = int(peak_file.read_text()) * 1024 / 1e9
    record["runs"] = {
        "gigabytes": args.gigabytes,
        "peak_gb": max(step["memory"] for step in steps) / 1e9,
        "host_gb": host_gb,
        "ms": [step["ms"] for step in steps],
        "losses": [step["loss"] for step in steps],
    }
    save(args.file, record)
    print(record["runs"])


def save(file: str, record: dict) -> None:
    Path(file).write_text(json.dumps(record, indent=1) + "\n")


def main() -> None:
    before, _, after = " ".join(sys.argv[1:]).partition(" -- ")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("losses", "speed", "fits"))
    parser.add_argument("file")
    parser.add_argument("--config", default="config/train_gpt2.py")
    parser.add_argument("--dataset", default="shakespeare")
    parser.add_argument("--iters", type=int, default=600)
    parser.add_argument("--seeds", default="1337,1338")
    parser.add_argument("--optimizers", default="adamw,muon")
    parser.add_argument("--splits", default="8x4,4x8,1x32")
    parser.add_argument("--gigabytes", type=float, default=22.5)
    parser.add_argument("--seconds", type=float, default=570)
    args = parser.parse_args(before.split())
    args.more = after.split()

    changed = subprocess.run(
        ["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    if changed:
        raise SystemExit("commit your changes first: a record names the commit that it measured")
    record = {
        "what": f"compact optimizer state: {args.what}",
        "command": " ".join(["results/compact.py", *sys.argv[1:]]),
        "commit": git_commit(),
        "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        "runs": {},
    }
    deadline = time.monotonic() + args.seconds
    {"losses": losses, "speed": speed, "fits": fits}[args.what](args, record, deadline)


if __name__ == "__main__":
    main()
