"""Race nanoGPT's recipe in plain PyTorch against ours: from scratch on one GPU, the same tokens and validation windows.

    python results/race.py baseline nanogpt.json SETTINGS --learning_rate=1e-3 --max_iters=2000
    python results/race.py ours muon.json SETTINGS --optimizer=muon --max_iters=850
    python results/race.py table race.json nanogpt*.json muon*.json

A long baseline may run in parts: with RACE_SECONDS=500 in the environment, it stops after
so many and writes nanogpt.json.part. The same command resumes it. The curve is that of a run in one piece.

SETTINGS are those of train_deepspeed.py, the same for both, such as config/train_gpt2.py --dataset=packages. The first
two commands write [step, seconds of training, validation loss] of each evaluation. Seconds are those of the optimizer
steps: the start, compilation and evaluations don't count, for neither. The last command tells how long each of our runs
takes to the final loss of each baseline of its GPU, seed and text, and writes all runs to one file. It reads such files
too.
results/long_run.py has the commands for the text.

nanoGPT's recipe: float32 weights under autocast, the whole model compiled, fused AdamW with weight decay 0.1 and betas
0.9 and 0.95, gradients clipped at 1, and a cosine from learning_rate to a tenth of it.
"""

import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch
from torch.nn.functional import cross_entropy

from configurator import settings_of_script
from model import GPT
from runtime.data.dataset import read_meta
from runtime.data.folders import dataset_dir
from runtime.git import git_commit
from runtime.hardware import machine_record
from runtime.monitor.history import read_history

SCRIPT = ROOT / "train_deepspeed.py"


def learning_rate(s, it):
    """nanoGPT's: linear warmup, then a cosine to a tenth."""
    if it < s.warmup_iters:
        return s.learning_rate * (it + 1) / (s.warmup_iters + 1)
    progress = (it - s.warmup_iters) / (s.max_iters - s.warmup_iters)
    return s.learning_rate * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))


def curve_of(ms, losses):
    """Return [[step, seconds of training, validation loss]] of {step: ms} and {step: validation loss}."""
    ms = ms | dict.fromkeys(range(1, 6), ms[6])  # compilation and the capture of a CUDA graph
    return [[step, round(sum(ms[it + 1] for it in range(step)) / 1000, 3), loss] for step, loss in losses.items()]


def baseline(argv, part):
    """Train by nanoGPT's recipe. Return curve_of() it, and the machine. part: the file of a run in parts, a Path."""
    began = time.monotonic()
    s = settings_of_script(SCRIPT, argv)
    if s.max_iters < 6 or os.environ.get("WORLD_SIZE", "1") != "1":
        sys.exit("the race needs one process, and --max_iters of at least 6")
    if s.batch_ramp or s.length_ramp:
        sys.exit("the baseline has steps of one size: leave out batch_ramp and length_ramp")
    if not torch.cuda.is_available() or s.device == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # before deepspeed is imported
    from runtime.cluster.join import join_process_group
    from runtime.cluster.ranks import ranks_from_environment
    from runtime.data.loader import TrainBatches, eval_batches, switch_threads_quickly
    from runtime.plan.run_plan import plan_run

    ranks = ranks_from_environment()
    join_process_group(s.device, s.backend)
    plan = plan_run(s, ranks)
    device, vocab_size = torch.device(plan.execution.device), plan.data["vocab_size"]
    dtype = plan.execution.torch_dtype
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(s.seed)
    with device:
        model = GPT(plan.model)
    net = torch.compile(model) if plan.execution.compile else model
    optimizer = torch.optim.AdamW(model.parameter_groups(0.1), lr=s.learning_rate, betas=(0.9, 0.95), fused=True)
    autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)

    def loss_of(x, y, reduction="mean"):
        with autocast:
            return cross_entropy(net(x).float().flatten(0, 1), y.flatten(), ignore_index=-1, reduction=reduction)

    @torch.no_grad()
    def evaluate():
        model.eval()
        total, count = 0.0, 0
        for x, y in eval_batches(plan.sequences["val"][0], plan.eval_windows, plan.batch, 0, vocab_size, device):
            total += loss_of(x, y, "sum").double().item()
            count += int((y >= 0).sum())
        model.train()
        return total / count

    # From the beginning, or where the last part ended
    done, ms, losses = 0, {}, {}
    if part.exists():
        state = torch.load(part, map_location=device, weights_only=True)
        if state["argv"] != argv:
            sys.exit(f"{part} is of other settings: delete it, or name another file")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done, ms, losses = state["done"], state["ms"], state["losses"]
    else:
        losses[0] = evaluate()

    switch_threads_quickly()
    position = done * plan.batch.sequences
    batches = TrainBatches([(plan.sequences["train"][0], 1)], position, plan.batch, 0, s.seed, vocab_size, device)
    for it in range(done, s.max_iters):
        start = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(s, it)
        for x, y in batches.next_step(s.gradient_accumulation_steps):
            (loss_of(x, y) / s.gradient_accumulation_steps).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize()
        ms[it + 1] = 1000 * (time.perf_counter() - start)
        if done and it == done + 5:  # compiled anew: see curve_of()
            ms |= dict.fromkeys(range(done + 1, done + 6), ms[it + 1])
        if (it + 1) % s.eval_interval == 0 or it + 1 == s.max_iters:
            losses[it + 1] = evaluate()
            print(it + 1, f"{ms[it + 1]:.1f} ms, val loss {losses[it + 1]:.4f}", flush=True)
        if time.monotonic() - began > float(os.environ.get("RACE_SECONDS", "inf")) and it + 1 < s.max_iters:
            torch.save({"argv": argv, "model": model.state_dict(), "optimizer": optimizer.state_dict(),
                        "done": it + 1, "ms": ms, "losses": losses}, part)
            sys.exit(f"stopped after step {it + 1}: the same command resumes it")
    torch.distributed.destroy_process_group()
    part.unlink(missing_ok=True)
    return curve_of(ms, losses), machine_record(device)


def ours(argv):
    """Train by train_deepspeed.py. Return what baseline() does."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, SCRIPT, *argv, "--log_interval=1", "--keep_last=0", f"--out_dir={folder}/out"],
                       check=True)
        history, run = read_history(f"{folder}/out"), json.loads(Path(folder, "out/settings.json").read_text())
    for record in history:
        if record.get("val_loss", 0.0) is None:
            sys.exit(f"the run has diverged: its validation loss at iteration {record['iter']} isn't finite")
    ms, losses = ({record["iter"]: record[key] for record in history if key in record} for key in ("ms", "val_loss"))
    return curve_of(ms, losses), {key: run[key] for key in ("hardware", "versions")}


def seconds_to(curve, loss):
    """The time of the first evaluation at or below a loss, or None."""
    return next((seconds for _, seconds, val_loss in curve if val_loss <= loss), None)


def group_of(run):
    """Return what two runs share that can be compared: (GPU, seed, SHA-256 of the text). Old runs have no text."""
    return run["hardware"], run["seed"], run.get("text", "")


def best_baselines(runs):
    """Return {group_of(run): the baseline with the lowest final loss}."""
    best = {}
    for run in runs:
        if run["way"] != "baseline":
            continue
        group = group_of(run)
        if group not in best or run["curve"][-1][2] < best[group]["curve"][-1][2]:
            best[group] = run
    return best


def label(run):
    """Return what tells a run from the others."""
    s = settings_of_script(SCRIPT, run["argv"])
    has_muon = run["way"] == "ours" and s.optimizer == "muon"
    optimizer = f"muon {s.muon_learning_rate:g}, " * has_muon + f"adamw {s.learning_rate:g}"
    recipe = run["way"] + ", cosine" * (run["way"] == "ours" and s.lr_schedule == "cosine") + ", fp8" * s.fp8
    return f"{recipe}, {optimizer}, {s.max_iters} steps, seed {s.seed}", s.seed


def table(path, paths):
    """Print the runs, and compare each of ours with the baselines of its group. Write all to one file."""
    files = [json.loads(Path(path).read_text()) for path in paths]
    runs = [run for file in files for run in file.get("runs", [file])]
    for run in runs:
        run["label"], run["seed"] = label(run)
    for run in runs:
        steps, seconds, loss = run["curve"][-1]
        print(f"{run['label']:<60} {loss:.4f} after {steps} steps, {seconds:.1f} s")
        for base in runs:
            if base["way"] != "baseline" or run["way"] != "ours" or group_of(base) != group_of(run):
                continue
            if reached := seconds_to(run["curve"], base["curve"][-1][2]):
                ratio = run.setdefault("ratios", {})[base["label"]] = round(reached / base["curve"][-1][1], 3)
                print(f"    the final loss of {base['label']}: after {reached:.1f} s, {ratio} of its time")
    rows = re.sub(r"\[\s+([\d., ]+?)\s+\]", r"[\1]", re.sub(r",\s+(?=\d)", ", ", json.dumps({"runs": runs}, indent=1)))
    Path(path).write_text(rows + "\n")


def main():
    way, path, *argv = sys.argv[1:] if len(sys.argv) > 3 else ("", "")
    if way not in ("baseline", "ours", "table"):
        sys.exit(__doc__)
    if way == "table":
        return table(path, argv)
    text = read_meta(dataset_dir(settings_of_script(SCRIPT, argv).dataset))["files"]["train.bin"]["sha256"]
    curve, machine = baseline(argv, Path(path + ".part")) if way == "baseline" else ours(argv)
    Path(path).write_text(json.dumps({
        "way": way, "argv": argv, "command": " ".join(sys.argv), "commit": git_commit(), "text": text,
        "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()), **machine, "curve": curve}))


if __name__ == "__main__":
    main()
