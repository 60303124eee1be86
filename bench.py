"""Measure the speed on this machine. Each command prints its figures and writes them as JSON.

    python bench.py train --gpus=4 config/xl_shakespeare.py --batch_size=8    step time, memory, time to the first step
    python bench.py train --baseline=hf config/xl_shakespeare.py              also transformers' GPT-2 with DeepSpeed
    python bench.py train --baseline=pytorch config/xl_shakespeare.py         also a GPT in plain PyTorch, with DDP
    python bench.py train --baseline=fsdp2 --gpus=2 config/xl_shakespeare.py  also a GPT in PyTorch's FSDP2
    python bench.py sample --model=gpt2-xl --batch=1 --baseline=hf            tokens/s, also of transformers' generate()

All other arguments go to train_deepspeed.py. Speed does not depend on the weights: if you don't have GPT-2's, add
--init_from=scratch --n_layer=48 --n_head=25 --n_embd=1600.
"""

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from configurator import settings_of_script
from runtime.files import ROOT

SCRIPT, LAUNCHER, BASELINES = ROOT / "train_deepspeed.py", ROOT / "launch_deepspeed.py", ROOT / "examples/baselines.py"

import torch
from torch.utils.benchmark import Timer, timer

from model import GPT, GPTConfig
from runtime.hardware import git_commit, machine_record
from runtime.monitor.history import read_history
from runtime.output import exit_with_error
from runtime.weights import PRETRAINED


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_subparsers(dest="what", required=True)
    training = what.add_parser("train", help="measure training: see train --help")
    sampling = what.add_parser("sample", help="measure sampling: see sample --help")
    for command, baselines in (training, ("hf", "pytorch", "fsdp2")), (sampling, ("hf",)):
        command.add_argument("--baseline", choices=baselines, help="also measure a baseline")
        command.add_argument("--json", default="bench.json", help="output file (default: bench.json)")
        command.add_argument("--repeats", type=int, default=10, help="number of steps or samples to measure")
    training.add_argument("--gpus", type=int, default=1, help="number of processes, also on a CPU")
    training.add_argument("--warmup", type=int, default=4, help="number of steps before those measured")
    sampling.add_argument("--model", type=shape, default="gpt2-xl", help="what to measure",
                          metavar="|".join([*PRETRAINED, "LAYERS,HEADS,WIDTH"]))
    sampling.add_argument("--batch", type=int, default=1, help="batch size")
    sampling.add_argument("--tokens", type=int, default=200, help="tokens per sample")
    args, argv = parser.parse_known_args()
    for name, value in vars(args).items():
        if type(value) is int and value < 1:
            parser.error(f"--{name}={value} must be at least 1")
    if args.what == "sample" and argv:
        parser.error(f"sample has no {' '.join(argv)}: see bench.py sample --help")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # removes temporary folders
    if os.path.isdir(args.json) or not os.access(os.path.dirname(os.path.abspath(args.json)), os.W_OK):
        parser.error(f"--json={args.json} can't be written: choose a file in a folder that exists")
    measured = sample(args) if args.what == "sample" else train(args, argv)
    record = {"command": " ".join(["bench.py", *sys.argv[1:]]), "commit": git_commit(), **measured}
    Path(args.json).write_text(json.dumps(record, indent=1))
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


def train(args, argv):
    """Measure the steps of train_deepspeed.py, then the steps of the baseline."""
    lora_rank = settings_of_script(SCRIPT, argv).lora_rank  # exits if a setting is wrong
    if lora_rank and args.baseline:
        exit_with_error(f"--baseline={args.baseline} trains all weights: drop it, or --lora_rank={lora_rank}")
    argv = [*argv, f"--max_iters={args.warmup + args.repeats}", "--eval_interval=1000000000", "--eval_iters=1",
            "--keep_last=0", "--log_interval=1"]
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
        if args.baseline:
            run_ranks(args, folder, BASELINES, args.baseline, *argv, f"--batch_size={s['batch_size']}",
                      f"--gradient_accumulation_steps={s['gradient_accumulation_steps']}")
            other = record["baseline"] = json.loads(Path(folder, "baseline.json").read_text())
            other["ms"] = summarize(other["ms"][args.warmup :])
            other["ratio"] = other["ms"]["median"] / record["ms"]["median"]
            print(f"{other['name']}: {other['ms']['median']:,.1f} ms per step, {other['ratio']:.2f} times ours")
    return record


def shape(model):
    """Return the GPTConfig of a GPT-2's name, or of layers,heads,width. argparse reports a ValueError."""
    layers, heads, width = PRETRAINED.get(model) or map(int, model.split(","))
    return GPTConfig(n_layer=layers, n_head=heads, n_embd=width)


def sample(args):
    """Measure sampling: random weights, a prompt of 16 tokens, top-k 200; the first token is timed on its own."""
    from examples.baselines import transformers_generate
    from runtime.kernels.decode import decode_step_for

    device, config = "cuda" if torch.cuda.is_available() else "cpu", args.model
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    with torch.device(device):
        model = GPT(config).to(dtype).eval()
    prompt = torch.randint(50257, (args.batch, 16), device=device)

    def measure(generate):
        """Return the speed of args.repeats samples, after a warmup, and the time of their first tokens."""
        rates, first_ms = [], []
        for _ in range(args.repeats + 1):
            start = timer()  # waits for the GPU first
            generate(1)
            middle = timer()
            generate(args.tokens)
            first_ms.append(1000 * (middle - start))
            rates.append(args.batch * args.tokens / (timer() - middle))
        return {"tokens_per_s": summarize(rates[1:]), "first_token_ms": summarize(first_ms[1:])}

    ours = measure(lambda n: model.generate(prompt, n, top_k=200, custom_step=decode_step_for(model),
                                            generator=torch.Generator(device).manual_seed(0)))
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    a = torch.empty(2**30 if device == "cuda" else 2**27, dtype=torch.uint8, device=device)
    copy = Timer("b.copy_(a)", globals={"a": a, "b": torch.empty_like(a)}, num_threads=torch.get_num_threads())
    rate = 2 * a.numel() / copy.timeit(5).mean  # bytes per second, read and written
    speed = ours["tokens_per_s"]["median"]
    record = {**machine_record(device), "shape": [config.n_layer, config.n_head, config.n_embd], "batch": args.batch,
              "tokens": args.tokens, **ours, "weights_gb": weights / 1e9, "copy_gb_per_s": rate / 1e9,
              "share_of_limit": speed / (rate / weights * args.batch)}
    print(f"{speed:,.1f} tokens/s, {record['share_of_limit']:.1%} of the bandwidth limit, first token after "
          f"{ours['first_token_ms']['median']:.1f} ms")
    if args.baseline:
        del model
        name, generate = transformers_generate(config, prompt, dtype)
        other = record["baseline"] = {"name": name, **measure(generate)}
        other["ratio"] = speed / other["tokens_per_s"]["median"]
        print(f"{name}: {other['tokens_per_s']['median']:,.1f} tokens/s; ours are {other['ratio']:.2f} times as many")
    return record


if __name__ == "__main__":
    main()
