"""Measure what examples/animals90/README.md shows in its table, and print the table.

    python examples/animals90/measure/table.py measure    on one GPU or two, in 5 to 10 minutes
    python examples/animals90/measure/table.py table      the table, from results/*_x1_animals90.json and x2

Measure with no other load on the GPUs. The pictures are generated. A row holds its command and the last epoch's record
in training_history.json. An archive without .git needs the environment variable COMMIT.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[1]
RESULTS = EXAMPLE.parents[1] / "results"
PICTURES = {"small": (22, 2), "medium": (65, 14), "full": (650, 139)}  # of each of 90 classes: to train on, to validate
FAST = ("seconds", "images_per_s", "it_per_s", "memory_gb")
UNITS = {"seconds": "{:.1f} s per epoch", "images_per_s": "{:,.0f} pictures/s", "it_per_s": "{:.1f} it/s",
         "memory_gb": "{:.2f} GB", "waited_s": "{:.1f} s waiting", "val_acc": "{:.1f}% validation accuracy"}
MEMORY = [f"1 GPU, {size}, {how}" for how in ("plain, float32", "fp16") for size in (16, 32, 64)]
TABLE = (  # setting, the guides' figures, GPUs, rows, keys
    ("2 GPUs, 64 each, fp16", "25 s per epoch, 10 GB", 2, ["2 GPUs, 64, fp16"], FAST),
    ("2 GPUs, 128 each, fp16", "22 s, 20 GB", 2, ["2 GPUs, 128, fp16"], FAST),
    ("1 GPU, 128, fp16", "40 s, 20 GB", 1, ["1 GPU, 128, fp16"], FAST),
    ("2 GPUs, 64 each, plain PyTorch, fp16", "60 it/s, 14 GB, against 70 it/s and 10 GB", 2,
     ["2 GPUs, 64, plain, fp16"], FAST),
    ("2 GPUs, 64 each, plain PyTorch, float32", "", 2, ["2 GPUs, 64, plain, float32"], FAST),
    ("1 GPU, 16, 32, 64: plain PyTorch, float32", "1.8 GB, 3.2 GB, out of memory (2 GB GPU)", 1, MEMORY[:3],
     ["memory_gb"]),
    ("1 GPU, 16, 32, 64: ZeRO-2, fp16", "1.2 GB, 2.0 GB, 3.5 GB", 1, MEMORY[3:], ["memory_gb"]),
    ("1 GPU, 64, fp16, a tenth of the pictures", "", 1, ["16 workers"], ["memory_gb", "seconds"]),
    ("the same with `--offload_optimizer`", "less memory", 1, ["offload"], ["memory_gb", "seconds"]),
    ("the same with `activation_checkpointing`", "30% less memory, 15 to 20% slower", 1, ["recomputed"],
     ["memory_gb", "seconds"]),
    ("the same with 2, 8, 16 workers", '"8 to 12 workers"', 1, ["2 workers", "8 workers", "16 workers"], ["waited_s"]),
    ("1 GPU, 128, fp16 and float32, 10 epochs", "", 1, ["10 epochs, fp16", "10 epochs, float32"], ["val_acc"]),
)


class Measurement:
    """Runs the example in a temporary folder, and writes each row to a file as soon as it is there."""

    def __init__(self, to, limit_s):
        import torch

        self.gpus, self.cores = torch.cuda.device_count(), len(os.sched_getaffinity(0))
        name = torch.cuda.get_device_name()
        self.path = Path(to, f"{name.split()[1].lower()}_x{self.gpus}_animals90.json")
        self.end, self.work = time.time() + limit_s, Path(tempfile.mkdtemp())
        git = ["git", "-C", RESULTS, "rev-parse", "HEAD"]
        commit = os.environ.get("COMMIT") or subprocess.check_output(git, text=True).strip()
        self.result = {"what": "what examples/animals90/README.md shows in its table",
                       "hardware": f"{self.gpus} x {name}, {self.cores} cores", "torch": torch.__version__,
                       "commit": commit, "rows": {}}

    def prepare(self, pictures):
        """Generate the pictures."""
        start, (train, val) = time.time(), PICTURES[pictures]
        subprocess.run([sys.executable, EXAMPLE / "prepare.py", "--made_up", "--classes=90", f"--train={train}",
                        f"--val={val}", "--size=224", f"--to={self.work / pictures}"], check=True)
        self.result[f"prepared_{pictures}_s"] = round(time.time() - start, 1)

    def run(self, name, pictures, options, epochs=2, config=None):
        """Train, and record the last epoch. config: DeepSpeed's JSON, if it is another one. Rows that are called plain
        run plain.py."""
        cwd = self.work / name.replace(" ", "_").replace(",", "")
        cwd.mkdir()
        if config:
            (cwd / "ds.json").write_text(json.dumps(config))
            options += " --config ds.json"
        folders = [f"--{split}_dir={self.work / pictures / split}" for split in ("train", "val")]
        command = [EXAMPLE / "launch_deepspeed.py", "--num_gpus", self.gpus, "--save_interval", 1000]
        if "plain" in name:
            command = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.gpus}",
                       EXAMPLE / "measure" / "plain.py"]
        command += [*shlex.split(options), "--pretrained", "none", "--epochs", epochs, *folders]
        try:
            subprocess.run([sys.executable, *map(str, command)], cwd=cwd, capture_output=True, text=True, check=True,
                           timeout=max(1, self.end - time.time()))
            found = json.loads((cwd / "logs" / "training_history.json").read_text())["epochs"]
            row = {**found[-1], "val_acc_by_epoch": [epoch["val_acc"] for epoch in found]}
        except subprocess.SubprocessError as error:
            row = {"failed": f"{error}: {error.stderr or ''}"[-6000:]}  # torchrun adds its own traceback
        start = f"python launch_deepspeed.py --num_gpus {self.gpus}"
        if "plain" in name:
            start = f"torchrun --nproc_per_node={self.gpus} examples/animals90/measure/plain.py"
        row |= {"command": f"{start} {options}", "json": config}
        self.result["rows"][name] = row
        self.path.write_text(json.dumps(self.result, indent=1) + "\n")
        print(f"{name}: " + (row.get("failed") or cell(row, [*FAST, "waited_s", "val_acc"])), flush=True)


def on_two_gpus(m):
    workers = f"--num_workers {m.cores // 2}"
    m.prepare("full")
    for size in (64, 128):
        m.run(f"2 GPUs, {size}, fp16", "full", f"--fp16 --batch_size {size} {workers}")
    for dtype in ("fp16", "float32"):
        options = f"--batch_size 64 {workers}" + " --fp16" * (dtype == "fp16")
        m.run(f"2 GPUs, 64, plain, {dtype}", "full", options)


def on_one_gpu(m):
    with ThreadPoolExecutor() as pool:  # the pictures, while DeepSpeed's CPU Adam is compiled
        build = "from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()"
        pool.submit(subprocess.run, [sys.executable, "-c", build], capture_output=True)
        for pictures in PICTURES:
            m.prepare(pictures)
    recompute = json.loads((EXAMPLE / "ds_config_rtx5090.json").read_text()) | {"activation_checkpointing": {}}
    workers = f"--num_workers {min(16, m.cores)}"
    m.run("1 GPU, 128, fp16", "full", f"--fp16 --batch_size 128 {workers}")
    with ThreadPoolExecutor() as pool:  # memory and accuracy don't depend on the speed: these share the GPU
        for name in MEMORY:
            options = f"--batch_size {name.split(', ')[1]} --num_workers 1" + " --fp16" * ("plain" not in name)
            pool.submit(m.run, name, "small", options)
    with ThreadPoolExecutor() as pool:
        for dtype in ("fp16", "float32"):
            options = f"--batch_size 128 --num_workers {m.cores // 3}" + " --fp16" * (dtype == "fp16")
            pool.submit(m.run, f"10 epochs, {dtype}", "full", options, epochs=10)
    common = "--fp16 --batch_size 64 --num_workers"
    m.run("16 workers", "medium", f"{common} 16")
    m.run("recomputed", "medium", f"{common} 16", config=recompute)
    m.run("offload", "medium", f"{common} 16 --offload_optimizer")
    m.run("8 workers", "medium", f"{common} 8")
    m.run("2 workers", "medium", f"{common} 2")


def cell(row, keys):
    """Return a row's figures as text."""
    return ", ".join(UNITS[key].format(row[key]) for key in keys)


def table(folder=RESULTS):
    """Return README's table: the guides' figures, and what the files in `folder` have."""
    lines = ["| setting | guides | measured |", "|---|---|---|"]
    for setting, guides, gpus, names, keys in TABLE:
        path = next(Path(folder).glob(f"*_x{gpus}_animals90.json"), None)
        rows = json.loads(path.read_text())["rows"] if path else {}
        measured = [cell(rows[name], keys) for name in names if "seconds" in rows.get(name, ())]
        text = "; ".join(measured) if len(measured) == len(names) else "not measured yet"
        lines.append(f"| {setting} | {guides} | {text} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["measure", "table"])
    parser.add_argument("--to", default=RESULTS, help="folder for the file (default: %(default)s)")
    parser.add_argument("--limit_s", type=float, default=3600, help="seconds, after which rows are left out")
    args = parser.parse_args()
    if args.what == "measure":
        measurement = Measurement(args.to, args.limit_s)
        (on_two_gpus if measurement.gpus > 1 else on_one_gpu)(measurement)
    print(table(args.to))
