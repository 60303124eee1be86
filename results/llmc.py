"""Time llm.c beside this code: GPT-2 from random weights with AdamW in bfloat16, on one GPU.

    make -C llm.c train_gpt2cu USE_CUDNN=1 NO_MULTI_GPU=1 NO_USE_MPI=1
    python results/llmc.py FILE.json --binary=llm.c/train_gpt2cu --source="llm.c f1e2ace, cuDNN 9.10" \\
        --sizes=d12:60x1,d48:16x2 --gelu=0,1,2

A size is a model of llm.c (d12 is 124M, d48 is XL) with micro-batch x accumulation, and --gelu has
the values of llm.c's -ge, which fuses GELU into the matmuls. Ours is bench.py with the same shapes.
Both train on data/shakespeare without gradient checkpointing, and neither evaluates, samples nor
saves between the steps that count. Milliseconds are each program's own: llm.c's are those between
CUDA events.

Each run's figures are written at once, and no run is begun after --seconds. A FILE.json that is there
is added to, if it has the same llm.c and commit.
"""

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np

from results.compact import run, save
from runtime.git import git_commit

BLOCK_SIZE = 1024
SHAPES = {"d12": (12, 12, 768), "d48": (48, 25, 1600)}  # layers, heads, width
WARMUP = 10  # steps at the start that don't count
STEPS = 30
TOKENS = ROOT / "data/shakespeare/train.bin"
# The header of llm.c's files of tokens, dev/data/data_common.py: 256 int32
MAGIC = 20240520
VERSION = 1
HEADER_SIZE = 256
# As llm.c's train_gpt2.cu prints a step, and the memory of the whole GPU before the first one
STEP = re.compile(r"^step +\d+/\d+ \| loss ([\d.]+) .*\| lr \S+ \| ([\d.]+) ms \|", re.MULTILINE)
MEMORY = re.compile(r"^device memory usage: (\d+) MiB / ", re.MULTILINE)
MANAGED = "WARNING: Fell back to cudaMallocManaged"


def write_tokens(file: Path) -> None:
    """Write data/shakespeare as llm.c's file of tokens. Raises SystemExit without the data."""
    if not TOKENS.exists():
        raise SystemExit("make the tokens first: python data/shakespeare/prepare.py")
    tokens = np.fromfile(TOKENS, dtype=np.uint16)
    header = np.zeros(HEADER_SIZE, dtype=np.int32)
    header[:3] = MAGIC, VERSION, len(tokens)
    file.write_bytes(header.tobytes() + tokens.tobytes())


def read_output(output: str, steps: int, warmup: int) -> dict:
    """Return the figures in llm.c's output. Raises SystemExit if they aren't those of all steps."""
    found = STEP.findall(output)
    memory = MEMORY.search(output)
    if len(found) != steps or memory is None:
        raise SystemExit(f"{output[-6000:]}\nllm.c printed {len(found)} steps, not {steps}")
    if MANAGED in output:
        raise SystemExit("llm.c has put optimizer state into host memory: choose a smaller size")
    losses = [float(loss) for loss, _ in found]
    counted = [float(ms) for _, ms in found[warmup:]]
    return {
        "ms": {
            "median": statistics.median(counted),
            "min": min(counted),
            "max": max(counted),
            "count": len(counted),
        },
        "gpu_gb_in_use": int(memory[1]) * 2**20 / 1e9,
        "losses": losses,
    }


def time_llmc(
    binary: str, model: str, micro: int, accumulation: int, gelu: str, deadline: float
) -> dict:
    """Return llm.c's options and figures."""
    options = {
        "-e": model,  # random weights
        "-b": micro,
        "-t": BLOCK_SIZE,
        "-d": micro * accumulation * BLOCK_SIZE,
        "-x": STEPS,
        "-l": "3e-5",
        "-c": "0.1",
        "-r": 0,  # recompute nothing
        "-ge": gelu,
        "-v": STEPS,  # an evaluation before the first step and one after the last
        "-m": 1,  # each of one micro-batch
        "-s": 0,  # no samples
    }
    pairs = [f"{name} {value}" for name, value in options.items()]
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder, "tokens.bin")
        write_tokens(tokens)
        files = ["-i", str(tokens), "-j", str(tokens)]
        output = run([binary, *files, *" ".join(pairs).split()], deadline)
    command = " ".join(["train_gpt2cu", *pairs])
    return {"command": command, **read_output(output, STEPS, WARMUP)}


def time_ours(model: str, micro: int, accumulation: int, deadline: float) -> dict:
    """Return bench.py's options and figures for the same shapes."""
    n_layer, n_head, n_embd = SHAPES[model]
    options = [
        "--init_from=scratch",
        f"--n_layer={n_layer}",
        f"--n_head={n_head}",
        f"--n_embd={n_embd}",
        f"--block_size={BLOCK_SIZE}",
        "--dataset=shakespeare",
        f"--batch_size={micro}",
        f"--gradient_accumulation_steps={accumulation}",
        "--optimizer=adamw",
        "--learning_rate=3e-5",
        "--weight_decay=0.1",
        "--dtype=bfloat16",
        f"--warmup={WARMUP}",
        f"--repeats={STEPS - WARMUP}",
    ]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "bench.json")
        run([sys.executable, str(ROOT / "bench.py"), f"--json={file}", *options], deadline)
        measured = json.loads(file.read_text())
    return {
        "command": " ".join(["bench.py", *options]),
        **{key: measured[key] for key in ("ms", "peak_gb", "hardware", "versions")},
        "losses": [step["loss"] for step in measured["history"]],
    }


def begin_record(file: str, source: str) -> dict:
    """Return the record to add runs to: the file's, if there is one.

    Raises SystemExit if the file's runs are of another llm.c or commit.
    """
    record = {
        "what": "llm.c beside this code, one after the other on one GPU",
        "command": [" ".join(["results/llmc.py", *sys.argv[1:]])],
        "llm.c": source,
        "commit": git_commit(),
        "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        "runs": {},
    }
    if not Path(file).exists():
        return record

    # One record has runs of one code only
    before = json.loads(Path(file).read_text())
    for key in ("what", "llm.c", "commit"):
        if before.get(key) != record[key]:
            raise SystemExit(f"{file} has another {key!r}, {before.get(key)!r}: choose another file")
    record["command"] = before["command"] + record["command"]
    record["runs"] = before["runs"]
    return record


def read_size(size: str) -> tuple[str, int, int]:
    """Return the model, micro-batch and accumulation of d12:60x1. argparse reports a ValueError."""
    model, split = size.split(":")
    micro, accumulation = map(int, split.split("x"))
    if model not in SHAPES:
        raise ValueError(model)
    return model, micro, accumulation


def read_sizes(sizes: str) -> list[tuple[str, int, int]]:
    return [read_size(size) for size in sizes.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("--binary", required=True, help="llm.c's train_gpt2cu")
    parser.add_argument("--source", required=True, help="llm.c's commit, and how it was built")
    parser.add_argument("--sizes", type=read_sizes, default="d12:60x1,d48:16x2,d48:8x4")
    parser.add_argument("--gelu", default="0,1,2")
    parser.add_argument("--seconds", type=float, default=570)
    args = parser.parse_args()

    deadline = time.monotonic() + args.seconds
    record = begin_record(args.file, args.source)
    for model, micro, accumulation in args.sizes:
        runs = record["runs"].setdefault(f"{model} {micro}x{accumulation}", {})
        for way in ("ours", *args.gelu.split(",")):
            if time.monotonic() > deadline:
                return
            if way == "ours":
                figures = time_ours(model, micro, accumulation, deadline)
            else:
                figures = time_llmc(args.binary, model, micro, accumulation, way, deadline)
                way = f"llm.c -ge {way}"
            runs[way] = figures
            save(args.file, record)
            print(model, f"{micro}x{accumulation}", way, figures["ms"], flush=True)


if __name__ == "__main__":
    main()
