"""How fast is it here? Each command measures, prints a table and writes JSON.

    python bench.py train --gpus=4 config/xl_shakespeare.py --batch_size=8    a step, its parts, memory, first step
    python bench.py train --gpus=4 --peer=hf config/xl_shakespeare.py         and transformers' GPT-2 on the same work
    python bench.py train --peer=plain config/xl_shakespeare.py               or a GPT in PyTorch alone, compiled whole
    python bench.py sample --model=gpt2-xl --batch=1 --peer=hf                tokens a second, against generate()
    python bench.py data config/xl_shakespeare.py                             reading batches, without training
    python bench.py checkpoint --gpus=4 config/xl_shakespeare.py              saving, checking, going on
    python bench.py table                                                     README's table, from results/

--json=FILE names the file (bench.json), --repeats=N what is measured (10 steps after 4; 5 texts). What is not ours goes
to train_deepspeed.py. Speed does not depend on the weights: give --init_from=scratch with a shape where there are none.
"""

import argparse
import contextlib
import glob
import json
import os
import re
import runpy
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

from configurator import freeze, settings_of_script
from runtime.engine import ds_config
from runtime.monitor.history import read_history
from runtime.monitor.runlog import git_commit, machine_record

ROOT = os.path.dirname(os.path.abspath(__file__))
SCRIPT = os.path.join(ROOT, "train_deepspeed.py")
WARM_UP = 4  # steps that don't count


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["train", "sample", "data", "checkpoint", "table", "inside", "peer"])
    parser.add_argument("--gpus", type=int, default=1, help="processes; on a machine without GPUs as well")
    parser.add_argument("--peer", choices=["hf", "plain"], help="the same work by transformers under DeepSpeed, or by "
                        "PyTorch alone, compiled whole (train)")
    parser.add_argument("--json", default="bench.json")
    parser.add_argument("--repeats", type=int, help="at least 5")
    parser.add_argument("--model", help="sample: gpt2-xl, ..., or layers,heads,width")
    parser.add_argument("--batch", type=int, default=1, help="sample: texts at a time")
    parser.add_argument("--tokens", type=int, default=200, help="sample: tokens of each text")
    args, settings = parser.parse_known_args()
    args.repeats = max(5, args.repeats or (10 if args.what == "train" else 5))
    if args.gpus < 1:
        parser.error(f"--gpus={args.gpus} must be at least 1")
    if not os.path.isdir(os.path.dirname(os.path.abspath(args.json))):
        parser.error(f"--json={args.json}: there is no such folder")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what lies in a folder of ours goes
    run = {"train": train, "sample": sample, "data": data, "checkpoint": checkpoint, "inside": inside, "peer": peer,
           "table": lambda *_: write_table()}
    if args.what in ("inside", "peer", "table"):  # the processes that train() starts, and what measures nothing
        run[args.what](args, settings)
        return
    if args.what != "sample":
        s = vars(settings_of_script(SCRIPT, settings))  # a mistake among them ends here
        for name in ("dry_run", "eval_only"):
            if s[name]:
                parser.error(f"--{name}=True leaves nothing to measure: remove it")
    found = run[args.what](args, settings)
    record = {"command": " ".join(["bench.py", *sys.argv[1:]]), "commit": git_commit(), **found}
    with open(args.json, "w", encoding="utf-8") as f:
        json.dump(record, f, indent=1)
    print(f"written to {args.json}")


def spread(values):
    """Median, least and most of some measurements."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values), "count": len(values)}


def start(what, args, settings, out_dir, **env):
    """Run this script as `what` in args.gpus processes; what it said. Ends the program if it fails."""
    ranks = f"--nproc_per_node={args.gpus}"
    command = [sys.executable, "-m", "runtime.launch", "--standalone", ranks, os.path.join(ROOT, "bench.py"), what]
    path = os.pathsep.join([ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run([*command, *settings, f"--out_dir={out_dir}"], stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, env={**os.environ, **env, "PYTHONPATH": path})
    if done.returncode:
        print(done.stdout[-6000:], file=sys.stderr)
        raise SystemExit(done.returncode)
    return done.stdout


@contextlib.contextmanager
def host_memory_taken():
    """A list that grows, ten times a second, by the bytes that this machine's available memory has shrunk since; files
    that are only cached don't count."""
    import psutil

    taken, done, free = [0], threading.Event(), psutil.virtual_memory().available

    def look():
        while not done.wait(0.1):
            taken.append(free - psutil.virtual_memory().available)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield taken
    finally:
        done.set()
        thread.join()


def train(args, settings):
    """Steps of train_deepspeed.py, with their parts; the peer's beside them."""
    folder = tempfile.mkdtemp(prefix="bench-")
    try:
        steps = WARM_UP + args.repeats
        never = [f"--max_iters={steps}", "--eval_interval=1000000000", "--eval_iters=1", "--keep_last=0",
                 "--log_interval=1"]
        parts_file = os.path.join(folder, "parts.json")
        with host_memory_taken() as host:
            words = start("inside", args, [*settings, *never], os.path.join(folder, "out"), BENCH_PARTS=parts_file)
        with open(os.path.join(folder, "out", "settings.json"), encoding="utf-8") as f:
            record = json.load(f)
        with open(parts_file, encoding="utf-8") as f:
            parts = json.load(f)
        records = [r for r in read_history(os.path.join(folder, "out")) if "ms" in r]
        counted = records[WARM_UP:]
        ms = spread([r["ms"] for r in counted])
        first = re.search(r"first step ([\d.]+) s", words)
        found = {key: record[key] for key in ("hardware", "versions", "settings", "world_size")}
        found |= {"ms": ms, "tokens_per_s": counted[0]["tokens_per_s"] * counted[0]["ms"] / ms["median"],
                  "mfu": counted[0]["mfu"] and counted[0]["mfu"] * counted[0]["ms"] / ms["median"],
                  "peak_gb": max(r["memory"] for r in records) / 1e9, "host_gb": max(host) / 1e9,
                  "first_step_s": float(first[1]),
                  "parts_ms": {"data": statistics.median(r["data_ms"] for r in counted), **parts},
                  "history": records}
        s = record["settings"]
        found["stage"] = ds_config.read_json(ds_config.find(s["deepspeed_config"]))["zero_optimization"]["stage"]
        print(f"{record['world_size']} x {record['hardware']}, {s['batch_size']} x {s['gradient_accumulation_steps']}, "
              f"{s['deepspeed_config']}: {ms['median']:.1f} ms ({ms['least']:.1f} to {ms['most']:.1f}), "
              f"{found['tokens_per_s']:,.0f} tokens/s, "
              + (f"{100 * found['mfu']:.1f}% MFU, " if found["mfu"] else "")
              + f"{found['peak_gb']:.1f} GB, {found['host_gb']:.1f} GB on the host, first step after "
              f"{found['first_step_s']:.1f} s", flush=True)
        for name, part in found["parts_ms"].items():
            print(f"  {name:<10} {part:9.2f} ms  {100 * part / ms['median']:5.1f}%")
        if args.peer:
            theirs_file = os.path.join(folder, "peer.json")
            start("peer", args, [f"--peer={args.peer}", *settings, *never, f"--batch_size={s['batch_size']}",
                                 f"--gradient_accumulation_steps={s['gradient_accumulation_steps']}"],
                  os.path.join(folder, "peer"), BENCH_PARTS=theirs_file)
            with open(theirs_file, encoding="utf-8") as f:
                theirs = json.load(f)
            found["peer"] = {**theirs, "ms": spread(theirs["ms"])}
            found["peer"]["ratio"] = found["peer"]["ms"]["median"] / ms["median"]
            print(f"{theirs['name']}: {found['peer']['ms']['median']:.1f} ms, {theirs['peak_gb']:.1f} GB: "
                  f"{found['peer']['ratio']:.2f} times ours")
        return found
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Stopwatch:
    """Sums of the time between marks of the same name, by CUDA events or the clock of the CPU."""

    def __init__(self):
        import torch

        self.cuda, self.spans = torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu", []

    def mark(self):
        import torch

        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def timed(self, name, function):
        """The function, its calls timed."""
        import torch

        def call(*args, **kwargs):
            if self.cuda and torch.cuda.is_current_stream_capturing():  # what is recorded is timed when it is replayed
                return function(*args, **kwargs)
            begin = self.mark()
            result = function(*args, **kwargs)
            self.spans.append((name, begin, self.mark()))
            return result
        return call

    def sums(self):
        """{name: milliseconds}."""
        if self.cuda:
            import torch

            torch.cuda.synchronize()
        total = {}
        for name, begin, end in self.spans:
            total[name] = total.get(name, 0.0) + (begin.elapsed_time(end) if self.cuda else 1000 * (end - begin))
        return total


def inside(_, settings):
    """train_deepspeed.py itself, its engine's calls timed. 'reduction' runs beside backward and within step; where
    micro-steps are recorded, their own part of it is within 'forward and backward'."""
    import deepspeed
    import torch
    import torch.distributed as dist

    watch, steps, initialize = Stopwatch(), [], deepspeed.initialize
    torch.cuda.CUDAGraph.replay = watch.timed("forward and backward", torch.cuda.CUDAGraph.replay)

    def watched(*args, **kwargs):
        engine, *rest = initialize(*args, **kwargs)
        engine.backward = watch.timed("backward", engine.backward)
        forward, step = engine.forward, watch.timed("optimizer", engine.step)
        timed_forward = watch.timed("forward", forward)
        engine.forward = lambda *a, **k: (timed_forward if torch.is_grad_enabled() else forward)(*a, **k)
        for name in ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor", "reduce"):
            setattr(dist, name, watch.timed("reduction", getattr(dist, name)))

        def counted_step():
            boundary = engine.is_gradient_accumulation_boundary()
            step()
            if boundary:
                steps.append(len(watch.spans))
        engine.step = counted_step
        return engine, *rest

    deepspeed.initialize = watched
    sys.argv = [SCRIPT, *settings]
    runpy.run_path(sys.argv[0], run_name="__main__")
    if int(os.environ.get("RANK", 0)) == 0:
        watch.spans = watch.spans[steps[WARM_UP - 1]:]
        with open(os.environ["BENCH_PARTS"], "w", encoding="utf-8") as f:
            json.dump({name: ms / (len(steps) - WARM_UP) for name, ms in watch.sums().items()}, f)


def peer(args, settings):
    """The same steps, with the same tokens, by another: see transformers_steps and plain_steps."""
    from runtime.cluster.ranks import print0, ranks_from_environment, shut_down

    s = vars(settings_of_script(SCRIPT, settings))
    ranks = ranks_from_environment()
    import torch

    if not torch.cuda.is_available() or s["device"] == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from runtime.plan.run_plan import plan_run

    plan = plan_run(freeze(s), ranks)
    import deepspeed

    from runtime.data.dataset import open_tokens
    from runtime.data.loader import train_batches
    from runtime.hardware import peak_memory

    cuda = plan.hardware.device == "cuda"
    device = torch.device("cuda", ranks.local_rank) if cuda else torch.device("cpu")
    if plan.hardware.device == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.logger.setLevel("WARNING")
    deepspeed.init_distributed(dist_backend={"cuda": "nccl", "cpu": "gloo"}[plan.hardware.device], verbose=False)
    torch.manual_seed(s["seed"])
    name, micro_step = {"hf": transformers_steps, "plain": plain_steps}[args.peer](plan, s, device)
    sources = [(open_tokens(one, "train"), one.share) for one in plan.datasets]
    batches, times = train_batches(sources, 0, ranks.rank, ranks.world_size, s, plan.data["vocab_size"], device), []
    for _ in range(s["max_iters"]):
        began, total = time.perf_counter(), 0.0
        for number in range(s["gradient_accumulation_steps"]):
            total += micro_step(*next(batches), number + 1 == s["gradient_accumulation_steps"])
        total.item()  # waits for the step
        times.append(1000 * (time.perf_counter() - began))
        print0(f"peer: {times[-1]:.1f} ms, loss {total.item() / s['gradient_accumulation_steps']:.4f}")
    if ranks.rank == 0:
        with open(os.environ["BENCH_PARTS"], "w", encoding="utf-8") as f:
            json.dump({"name": name, "ms": times[WARM_UP:], "peak_gb": peak_memory(device) / 1e9}, f)
    shut_down()


def transformers_steps(plan, s, device):
    """(name, micro_step): transformers' GPT2LMHeadModel under deepspeed.initialize, with the same JSON."""
    import deepspeed
    import torch
    import transformers

    from runtime.cluster.ranks import silence_stdout

    shape = transformers.GPT2Config(n_layer=plan.model.n_layer, n_head=plan.model.n_head, n_embd=plan.model.n_embd,
                                    n_positions=plan.model.block_size, vocab_size=plan.model.vocab_size,
                                    resid_pdrop=s["dropout"], embd_pdrop=s["dropout"], attn_pdrop=s["dropout"],
                                    use_cache=False)
    with device:
        model = transformers.GPT2LMHeadModel(shape)
    model.train()
    if s["gradient_checkpointing"]:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=s["learning_rate"], fused=plan.hardware.device == "cuda")
    plan.ds_config["zero_optimization"].pop("memory_efficient_linear", None)
    with silence_stdout():
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=plan.ds_config)

    def micro_step(x, y, last):
        loss = engine(x, labels=x).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return f"transformers {transformers.__version__} GPT2LMHeadModel with DeepSpeed", micro_step


def plain_steps(plan, s, device):
    """(name, micro_step): a GPT in PyTorch alone, as nanoGPT trains it: float32 parameters, autocast, compiled whole,
    the loss over all logits at once, fused AdamW; DistributedDataParallel over several GPUs."""
    import torch
    from torch.nn.functional import cross_entropy

    from model import GPT

    with device:
        model = GPT(plan.model)
    model.gradient_checkpointing = s["gradient_checkpointing"]
    optimizer = torch.optim.AdamW(model.parameter_groups(s["weight_decay"]), lr=s["learning_rate"],
                                  fused=plan.hardware.device == "cuda")
    whole = torch.compile(model) if plan.hardware.compile else model
    several = torch.distributed.get_world_size() > 1
    if several:
        whole = torch.nn.parallel.DistributedDataParallel(whole)
    dtype = plan.hardware.torch_dtype

    def micro_step(x, y, last):
        if several:
            whole.require_backward_grad_sync = last
        with torch.autocast(plan.hardware.device, dtype, enabled=dtype != torch.float32):
            logits = whole(x)
            loss = cross_entropy(logits.flatten(0, 1), y.flatten())
        (loss / s["gradient_accumulation_steps"]).backward()
        if last:
            torch.nn.utils.clip_grad_norm_(model.parameters(), s["grad_clip"])
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return "PyTorch alone, compiled whole", micro_step


def shape_of(model):
    """(layers, heads, width) of a name or of three numbers."""
    from runtime.weights import PRETRAINED

    try:
        layers, heads, width = PRETRAINED.get(model) or map(int, model.split(","))
        if width % heads == 0 and min(layers, heads, width) > 0:
            return layers, heads, width
    except (ValueError, ZeroDivisionError):
        pass
    raise SystemExit(f"--model={model} is neither one of {', '.join(PRETRAINED)} nor layers,heads,width, the width a "
                     "multiple of the heads")


def copy_rate(device):
    """Bytes a second that a copy within the device's memory reads and writes."""
    import torch

    a = torch.empty(2**30 if device == "cuda" else 2**27, dtype=torch.uint8, device=device)
    b, times = torch.empty_like(a), []
    for _ in range(6):
        began = clock(device)
        b.copy_(a)
        times.append(clock(device) - began)
    return 2 * a.numel() / min(times)


def clock(device):
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def sample(args, settings):
    """Random weights of a shape, a prompt of 16 tokens, choosing among 200; the time of the first token apart."""
    import torch

    from model import GPT, GPTConfig
    from runtime.kernels.decode import decode_step_for

    if settings:
        raise SystemExit(f"bench.py sample does not know {' '.join(settings)}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    layers, heads, width = shape_of(args.model or "gpt2-xl")
    torch.manual_seed(0)
    with torch.device(device):
        model = GPT(GPTConfig(n_layer=layers, n_head=heads, n_embd=width)).to(dtype).eval()
    prompt = torch.randint(50257, (args.batch, 16), device=device)

    def measure(generate):
        """Seconds of texts after one that does not count, and of their first token alone."""
        whole, first = [], []
        for number in range(args.repeats + 1):
            began = clock(device)
            generate(1)
            middle = clock(device)
            generate(args.tokens)
            first, whole = (first + [middle - began], whole + [clock(device) - middle]) if number else (first, whole)
        return {"tokens_per_s": spread([args.batch * args.tokens / t for t in whole]),
                "first_token_ms": spread([1000 * t for t in first])}

    ours = measure(lambda n: model.generate(prompt, n, top_k=200, custom_step=decode_step_for(model, args.batch)))
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    rate = copy_rate(device)
    found = {**machine_record(device), "shape": [layers, heads, width], "batch": args.batch, "tokens": args.tokens,
             **ours, "weights_gb": weights / 1e9, "copy_gb_per_s": rate / 1e9,
             "share_of_limit": ours["tokens_per_s"]["median"] / (rate / weights * args.batch)}
    print(f"batch {args.batch}: {ours['tokens_per_s']['median']:,.1f} tokens/s, "
          f"{100 * found['share_of_limit']:.0f}% of what reading {weights / 1e9:.2f} GB a token allows; first token "
          f"after {ours['first_token_ms']['median']:.1f} ms", flush=True)
    if args.peer:
        del model
        import transformers

        with torch.device(device):
            theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=layers, n_head=heads, n_embd=width))
        theirs = theirs.to(dtype).eval()
        peers = measure(lambda n: theirs.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=n,
                                                  min_new_tokens=n, do_sample=True, top_k=200, pad_token_id=0))
        found["peer"] = {"name": "transformers generate()", "versions": transformers.__version__, **peers,
                         "ratio": ours["tokens_per_s"]["median"] / peers["tokens_per_s"]["median"]}
        print(f"transformers: {peers['tokens_per_s']['median']:,.1f} tokens/s, first token after "
              f"{peers['first_token_ms']['median']:.1f} ms; ours is {found['peer']['ratio']:.2f} times as fast")
    return found


def data(args, settings):
    """Batches read, shuffled and pinned as in training, with nobody who trains on them."""
    import torch

    from runtime.data.dataset import DatasetError, open_datasets, open_tokens
    from runtime.data.loader import train_batches

    s = vars(settings_of_script(SCRIPT, settings))
    if s["batch_size"] == "auto":
        raise SystemExit("bench.py data needs a --batch_size that is a number: only training knows what fits")
    try:
        found, meta = open_datasets(s["dataset"], ROOT, s["block_size"])
    except (DatasetError, ValueError) as error:
        raise SystemExit(str(error)) from None
    sources = [(open_tokens(one, "train"), one.share) for one in found]
    device = "cuda" if torch.cuda.is_available() and s["device"] != "cpu" else "cpu"
    batches, times = train_batches(sources, 0, 0, 1, s, meta["vocab_size"], device), []
    for _ in range(WARM_UP + args.repeats):
        began = clock(device)
        for _ in range(s["gradient_accumulation_steps"]):
            next(batches)
        times.append(1000 * (clock(device) - began))
    ms = spread(times[WARM_UP:])
    step = s["batch_size"] * s["gradient_accumulation_steps"] * s["block_size"]
    print(f"{s['dataset']}: {ms['median']:.2f} ms ({ms['least']:.2f} to {ms['most']:.2f}) for {step:,} tokens, "
          f"{step / ms['median'] * 1000:,.0f} tokens/s")
    return {**machine_record(device), "ms": ms, "tokens_a_step": step}


def checkpoint(args, settings):
    """Five tags saved in the background, then a resume."""
    folder = tempfile.mkdtemp(prefix="bench-", dir=os.getcwd())
    try:
        out_dir, pace = os.path.join(folder, "out"), max(1, args.repeats // 5)
        options = [*settings, f"--eval_interval={pace}", "--eval_iters=1", "--keep_last=1", "--lr_decay_iters=100"]
        parts = {"BENCH_PARTS": os.path.join(folder, "parts.json")}
        words = start("inside", args, [*options, f"--max_iters={5 * pace}"], out_dir, **parts)
        again = start("inside", args, [*options, f"--max_iters={5 * pace + WARM_UP + 1}", "--init_from=resume"],
                      out_dir, **parts)
        saves = re.findall(r"saved \w+ in ([\d.]+) s: ([\d.]+ .B), ([\d.]+) GB/s; .* waited ([\d.]+) s", words)
        with open(os.path.join(out_dir, "settings.json"), encoding="utf-8") as f:
            record = json.load(f)
        found = {key: record[key] for key in ("hardware", "versions", "settings", "world_size")}
        found |= {"save_s": spread([float(s[0]) for s in saves]),
                  "tag": saves[0][1], "gb_per_s": spread([float(s[2]) for s in saves]),
                  "stood_still_s": spread([float(s[3]) for s in saves]), "first_stood_still_s": float(saves[0][3]),
                  "checked_s": float(re.search(r"checked in ([\d.]+) s", again)[1]),
                  "loaded_s": float(re.search(r"loaded in ([\d.]+) s", again)[1])}
        print(f"a tag of {found['tag']}: saved in {found['save_s']['median']:.1f} s "
              f"({found['gb_per_s']['median']:.2f} GB/s), training waited "
              f"{found['stood_still_s']['median']:.2f} s (at the first {found['first_stood_still_s']:.2f}), checked in "
              f"{found['checked_s']:.1f} s, loaded in {found['loaded_s']:.1f} s")
        return found
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def shape_name(s):
    """What the table calls a run's model."""
    from runtime.weights import PRETRAINED

    shape = tuple(s[name] for name in ("n_layer", "n_head", "n_embd"))
    named = {shape: name for name, shape in PRETRAINED.items()}.get(shape, s["init_from"])
    return (named if named in PRETRAINED else " x ".join(map(str, shape))) + (", fp8" if s.get("fp8") else "")


def table():
    """The steps in results/ as Markdown: one row for each JSON that `train` has written."""
    rows = []
    for path in sorted(glob.glob(os.path.join(ROOT, "results", "*_bench_*.json"))):
        with open(path, encoding="utf-8") as f:
            run = json.load(f)
        s, ms, peer = run["settings"], run["ms"], run.get("peer")
        shape = shape_name(s)
        stage = str(run["stage"]) if "stage" in run else re.search(r"zero(\d)", s["deepspeed_config"])[1]
        cells = [str(run["world_size"]), shape, stage, f"{s['batch_size']} x {s['gradient_accumulation_steps']}",
                 f"{ms['median']:,.0f} ({ms['least']:,.0f}, {ms['most']:,.0f})", f"{run['tokens_per_s']:,.0f}",
                 f"{100 * run['mfu']:.1f}%" if run["mfu"] else "n/a", f"{run['peak_gb']:.1f}",
                 f"{run['first_step_s']:.0f}",
                 f"{peer['name'].split()[0]} {peer['ms']['median']:,.0f}, {peer['ratio']:.2f} times" if peer else "",
                 f"`{os.path.basename(path)}`"]
        rows.append((run["world_size"], shape, stage, -s["batch_size"], "| " + " | ".join(cells) + " |"))
    names = ["GPUs", "model", "ZeRO", "micro x accumulation", "ms a step (least, most)", "tokens/s", "MFU", "peak GB",
             "first step s", "a peer's ms in the same run", "from results/"]
    return "\n".join([f"| {' | '.join(names)} |", "|" + "---|" * len(names), *(row[-1] for row in sorted(rows))])


def write_table():
    """Put table() between its marks in README.md."""
    readme, made = os.path.join(ROOT, "README.md"), table()
    with open(readme, encoding="utf-8") as f:
        before, begin, rest = f.read().partition("<!-- bench.py table -->\n")
    _, end, after = rest.partition("<!-- end -->")
    with open(readme, "w", encoding="utf-8") as f:
        f.write(f"{before}{begin}{made}\n{end}{after}")


if __name__ == "__main__":
    main()
