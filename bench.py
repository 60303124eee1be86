"""How fast is it here? Each command measures, prints a table and writes JSON.

    python bench.py train --gpus=4 config/xl_shakespeare.py --batch_size=8    a step, its parts, memory, first step
    python bench.py train --gpus=4 --peer=hf config/xl_shakespeare.py         and transformers' GPT-2 on the same work
    python bench.py train --peer=plain config/xl_shakespeare.py               or a GPT in PyTorch alone, compiled whole
    python bench.py sample --model=gpt2-xl --batch=1 --peer=hf                tokens per second, against generate()
    python bench.py data config/xl_shakespeare.py                             reading batches, without training
    python bench.py checkpoint --gpus=4 config/xl_shakespeare.py              saving, checking, resuming
    python bench.py table                                                     README's table, from results/

--json=FILE names the file (bench.json), --repeats=N what is measured (10 steps after 4; 5 texts). Other arguments go
to train_deepspeed.py. Speed does not depend on the weights: give --init_from=scratch with a shape where there are none.
"""

import argparse
import contextlib
import glob
import json
import os
import re
import runpy
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from configurator import settings_of_script
from model import GPT, GPTConfig
from runtime.engine import ds_config
from runtime.monitor.health import timestamp
from runtime.monitor.history import read_history
from runtime.monitor.runlog import git_commit, machine_record
from runtime.weights import PRETRAINED

ROOT = os.path.dirname(os.path.abspath(__file__))
SCRIPT = os.path.join(ROOT, "train_deepspeed.py")
WARM_UP = 4  # steps that don't count


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = {run.__name__: run for run in (train, sample, data, checkpoint, table, instrumented, peer)}
    parser.add_argument("what", choices=commands)
    parser.add_argument("--gpus", type=int, default=1, help="processes; on a machine without GPUs as well")
    parser.add_argument("--peer", choices=["hf", "plain"], help="the same work by transformers under DeepSpeed, or by "
                        "PyTorch alone, compiled whole (train)")
    parser.add_argument("--json", default="bench.json")
    parser.add_argument("--repeats", type=int, help="at least 5")
    parser.add_argument("--model", help="sample: gpt2-xl, ..., or layers,heads,width")
    parser.add_argument("--batch", type=int, default=1, help="sample: batch size")
    parser.add_argument("--tokens", type=int, default=200, help="sample: tokens of each text")
    args, argv = parser.parse_known_args()
    args.repeats = max(5, args.repeats or (10 if args.what == "train" else 5))
    if args.gpus < 1:
        parser.error(f"--gpus={args.gpus} must be at least 1")
    if not os.path.isdir(os.path.dirname(os.path.abspath(args.json))):
        parser.error(f"--json={args.json}: there is no such folder")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # removes temporary folders
    if args.what in ("instrumented", "peer", "table"):  # the processes that train() starts, and what measures nothing
        commands[args.what](args, argv)
        return
    if args.what != "sample":
        settings = settings_of_script(SCRIPT, argv)  # a mistake among them ends here
        for name in ("dry_run", "eval_only"):
            if getattr(settings, name):
                parser.error(f"--{name}=True leaves nothing to measure: remove it")
    record = commands[args.what](args, argv)
    write_json(args.json, {"command": " ".join(["bench.py", *sys.argv[1:]]), "commit": git_commit(), **record})
    print(f"written to {args.json}")


def read_json(*path):
    return json.loads(Path(*path).read_text(encoding="utf-8"))


def write_json(path, record):
    Path(path).write_text(json.dumps(record, indent=1), encoding="utf-8")


def summarize(values):
    """Return the median, least and most of some measurements, and their count."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values), "count": len(values)}


def run_ranks(what, args, argv, out_dir, **env):
    """Run this script as `what` in args.gpus processes; returns their output. Ends the program if they fail."""
    command = [sys.executable, "-m", "runtime.launch", "--standalone", f"--nproc_per_node={args.gpus}",
               os.path.join(ROOT, "bench.py"), what, *argv, f"--out_dir={out_dir}"]
    path = os.pathsep.join([ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          env={**os.environ, **env, "PYTHONPATH": path})
    if done.returncode:
        print(done.stdout[-6000:], file=sys.stderr)
        raise SystemExit(done.returncode)
    return done.stdout


def provenance(out_dir):
    """Return the part of a run's settings.json that its measurements depend on."""
    record = read_json(out_dir, "settings.json")
    return {key: record[key] for key in ("hardware", "versions", "settings", "world_size")}


@contextlib.contextmanager
def host_memory_samples():
    """A list that grows, ten times a second, by the bytes that this machine's available memory has shrunk since the
    start. Cached files don't count."""
    taken, done, free = [0], threading.Event(), psutil.virtual_memory().available

    def sample_memory():
        while not done.wait(0.1):
            taken.append(free - psutil.virtual_memory().available)

    thread = threading.Thread(target=sample_memory, daemon=True)
    thread.start()
    try:
        yield taken
    finally:
        done.set()
        thread.join()


def train(args, argv):
    """Measure steps of train_deepspeed.py and their parts, and then the peer's steps."""
    no_side_work = [f"--max_iters={WARM_UP + args.repeats}", "--eval_interval=1000000000", "--eval_iters=1",
                    "--keep_last=0", "--log_interval=1"]
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder:
        out_dir, parts_file, peer_file = (os.path.join(folder, name) for name in ("out", "parts.json", "peer.json"))
        with host_memory_samples() as host:
            output = run_ranks("instrumented", args, [*argv, *no_side_work], out_dir, BENCH_PARTS=parts_file)
        records = [r for r in read_history(out_dir) if "ms" in r]
        counted = records[WARM_UP:]
        ms = summarize([r["ms"] for r in counted])
        record = provenance(out_dir) | {
            "ms": ms, "tokens_per_s": counted[0]["tokens_per_s"] * counted[0]["ms"] / ms["median"],
            "mfu": counted[0]["mfu"] and counted[0]["mfu"] * counted[0]["ms"] / ms["median"],
            "peak_gb": max(r["memory"] for r in records) / 1e9, "host_gb": max(host) / 1e9,
            "first_step_s": float(re.search(r"first step ([\d.]+) s", output)[1]),
            "parts_ms": {"data": statistics.median(r["data_ms"] for r in counted), **read_json(parts_file)},
            "history": records}
        s = record["settings"]
        record["stage"] = ds_config.read_json(ds_config.find(s["deepspeed_config"]))["zero_optimization"]["stage"]
        print(f"{record['world_size']} x {record['hardware']}, {s['batch_size']} x {s['gradient_accumulation_steps']}, "
              f"{s['deepspeed_config']}: {ms['median']:.1f} ms ({ms['least']:.1f} to {ms['most']:.1f}), "
              f"{record['tokens_per_s']:,.0f} tokens/s, "
              + (f"{100 * record['mfu']:.1f}% MFU, " if record["mfu"] else "")
              + f"{record['peak_gb']:.1f} GB, {record['host_gb']:.1f} GB on the host, first step after "
              f"{record['first_step_s']:.1f} s", flush=True)
        for name, part in record["parts_ms"].items():
            print(f"  {name:<10} {part:9.2f} ms  {100 * part / ms['median']:5.1f}%")
        if args.peer:
            run_ranks("peer", args, [f"--peer={args.peer}", *argv, *no_side_work, f"--batch_size={s['batch_size']}",
                                     f"--gradient_accumulation_steps={s['gradient_accumulation_steps']}"],
                      os.path.join(folder, "peer"), BENCH_PARTS=peer_file)
            other = read_json(peer_file)
            other["ms"] = summarize(other["ms"])
            other["ratio"] = other["ms"]["median"] / ms["median"]
            record["peer"] = other
            print(f"{other['name']}: {other['ms']['median']:.1f} ms, {other['peak_gb']:.1f} GB: {other['ratio']:.2f} "
                  "times ours")
        return record


class Stopwatch:
    """Sums of the time between marks of the same name, by CUDA events or the clock of the CPU."""

    def __init__(self):
        self.cuda, self.spans = torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu", []

    def timed(self, name, function):
        """The function, its calls timed."""
        def call(*args, **kwargs):
            if self.cuda and torch.cuda.is_current_stream_capturing():  # a captured call is timed at each replay
                return function(*args, **kwargs)
            start = timestamp(self.cuda)
            result = function(*args, **kwargs)
            self.spans.append((name, start, timestamp(self.cuda)))
            return result
        return call

    def sums(self):
        """{name: milliseconds}."""
        if self.cuda:
            torch.cuda.synchronize()
        total = {}
        for name, start, end in self.spans:
            total[name] = total.get(name, 0.0) + (start.elapsed_time(end) if self.cuda else 1000 * (end - start))
        return total


def instrumented(_, argv):
    """Run train_deepspeed.py, its engine's calls timed. 'reduction' overlaps with backward and is part of step; where
    micro-steps are a CUDA graph, its part there is in 'forward and backward'."""
    import deepspeed

    watch, steps, initialize = Stopwatch(), [], deepspeed.initialize
    torch.cuda.CUDAGraph.replay = watch.timed("forward and backward", torch.cuda.CUDAGraph.replay)

    def initialize_timed(*args, **kwargs):
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

    deepspeed.initialize = initialize_timed
    sys.argv = [SCRIPT, *argv]
    runpy.run_path(sys.argv[0], run_name="__main__")
    if int(os.environ.get("RANK", 0)) == 0:
        watch.spans = watch.spans[steps[WARM_UP - 1]:]
        write_json(os.environ["BENCH_PARTS"], {name: ms / (len(steps) - WARM_UP) for name, ms in watch.sums().items()})


def peer(args, argv):
    """The same steps, with the same tokens, by another: see transformers_steps and plain_steps."""
    s = settings_of_script(SCRIPT, argv)
    if not torch.cuda.is_available() or s.device == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # before deepspeed is imported
    from runtime.cluster.ranks import print0, ranks_from_environment, shut_down
    from runtime.data.dataset import open_tokens
    from runtime.data.loader import train_batches
    from runtime.engine.setup import setup_device
    from runtime.hardware import peak_memory
    from runtime.plan.run_plan import plan_run

    ranks = ranks_from_environment()
    plan = plan_run(s, ranks)
    device = setup_device(plan.hardware, ranks.local_rank, plan.ds_config)
    torch.manual_seed(s.seed)
    name, micro_step = {"hf": transformers_steps, "plain": plain_steps}[args.peer](plan, s, device)
    mixture = [(open_tokens(one, "train"), one.share) for one in plan.datasets]
    batches = train_batches(mixture, 0, ranks.rank, ranks.world_size, vars(s), plan.data["vocab_size"], device)
    times = []
    for _ in range(s.max_iters):
        start, total = time.perf_counter(), 0.0
        for number in range(s.gradient_accumulation_steps):
            total += micro_step(*next(batches), number + 1 == s.gradient_accumulation_steps)
        total.item()  # waits for the step
        times.append(1000 * (time.perf_counter() - start))
        print0(f"peer: {times[-1]:.1f} ms, loss {total.item() / s.gradient_accumulation_steps:.4f}")
    if ranks.rank == 0:
        write_json(os.environ["BENCH_PARTS"],
                   {"name": name, "ms": times[WARM_UP:], "peak_gb": peak_memory(device) / 1e9})
    shut_down()


def transformers_steps(plan, s, device):
    """(name, micro_step): transformers' GPT2LMHeadModel under deepspeed.initialize, with the same JSON."""
    import deepspeed
    import transformers

    from runtime.cluster.ranks import silence_stdout

    shape = transformers.GPT2Config(n_layer=plan.model.n_layer, n_head=plan.model.n_head, n_embd=plan.model.n_embd,
                                    n_positions=plan.model.block_size, vocab_size=plan.model.vocab_size,
                                    resid_pdrop=s.dropout, embd_pdrop=s.dropout, attn_pdrop=s.dropout, use_cache=False)
    with device:
        model = transformers.GPT2LMHeadModel(shape)
    model.train()
    if s.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=s.learning_rate, fused=plan.hardware.device == "cuda")
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
    from torch.nn.functional import cross_entropy

    with device:
        model = GPT(plan.model)
    model.gradient_checkpointing = s.gradient_checkpointing
    optimizer = torch.optim.AdamW(model.parameter_groups(s.weight_decay), lr=s.learning_rate,
                                  fused=plan.hardware.device == "cuda")
    wrapped = torch.compile(model) if plan.hardware.compile else model
    several = dist.get_world_size() > 1
    if several:
        wrapped = torch.nn.parallel.DistributedDataParallel(wrapped)
    dtype = plan.hardware.torch_dtype

    def micro_step(x, y, last):
        if several:
            wrapped.require_backward_grad_sync = last
        with torch.autocast(plan.hardware.device, dtype, enabled=dtype != torch.float32):
            logits = wrapped(x)
            loss = cross_entropy(logits.flatten(0, 1), y.flatten())
        (loss / s.gradient_accumulation_steps).backward()
        if last:
            torch.nn.utils.clip_grad_norm_(model.parameters(), s.grad_clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return "PyTorch alone, compiled whole", micro_step


def shape_of(model):
    """(layers, heads, width) of a name or of three numbers."""
    numbers = re.fullmatch(r"(\d+),(\d+),(\d+)", model)
    shape = PRETRAINED.get(model) or numbers and tuple(map(int, numbers.groups()))
    if shape and all(shape) and shape[2] % shape[1] == 0:
        return shape
    raise SystemExit(f"--model={model} is neither one of {', '.join(PRETRAINED)} nor layers,heads,width, the width a "
                     "multiple of the heads")


def copy_rate(device):
    """Bytes per second that a copy within the device's memory reads and writes."""
    a = torch.empty(2**30 if device == "cuda" else 2**27, dtype=torch.uint8, device=device)
    b, times = torch.empty_like(a), []
    for _ in range(6):
        start = clock(device)
        b.copy_(a)
        times.append(clock(device) - start)
    return 2 * a.numel() / min(times)


def clock(device):
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def sample(args, argv):
    """Random weights of a shape, a prompt of 16 tokens, top-k 200; the time of the first token apart."""
    from runtime.kernels.decode import decode_step_for

    if argv:
        raise SystemExit(f"bench.py sample does not know {' '.join(argv)}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    layers, heads, width = shape_of(args.model or "gpt2-xl")
    torch.manual_seed(0)
    with torch.device(device):
        model = GPT(GPTConfig(n_layer=layers, n_head=heads, n_embd=width)).to(dtype).eval()
    prompt = torch.randint(50257, (args.batch, 16), device=device)

    def measure(generate):
        """Time args.repeats texts, after one that does not count, and their first tokens."""
        rates, first_ms = [], []
        for _ in range(args.repeats + 1):
            start = clock(device)
            generate(1)
            middle = clock(device)
            generate(args.tokens)
            first_ms.append(1000 * (middle - start))
            rates.append(args.batch * args.tokens / (clock(device) - middle))
        return {"tokens_per_s": summarize(rates[1:]), "first_token_ms": summarize(first_ms[1:])}

    ours = measure(lambda n: model.generate(prompt, n, top_k=200, custom_step=decode_step_for(model, args.batch)))
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    rate = copy_rate(device)
    record = {**machine_record(device), "shape": [layers, heads, width], "batch": args.batch, "tokens": args.tokens,
              **ours, "weights_gb": weights / 1e9, "copy_gb_per_s": rate / 1e9,
              "share_of_limit": ours["tokens_per_s"]["median"] / (rate / weights * args.batch)}
    print(f"batch {args.batch}: {ours['tokens_per_s']['median']:,.1f} tokens/s, "
          f"{100 * record['share_of_limit']:.0f}% of what reading {weights / 1e9:.2f} GB per token allows; first token "
          f"after {ours['first_token_ms']['median']:.1f} ms", flush=True)
    if args.peer:
        del model
        import transformers

        with torch.device(device):
            other = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=layers, n_head=heads, n_embd=width))
        other = other.to(dtype).eval()
        theirs = measure(lambda n: other.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=n,
                                                  min_new_tokens=n, do_sample=True, top_k=200, pad_token_id=0))
        ratio = ours["tokens_per_s"]["median"] / theirs["tokens_per_s"]["median"]
        record["peer"] = {"name": "transformers generate()", "versions": transformers.__version__, **theirs,
                          "ratio": ratio}
        print(f"transformers: {theirs['tokens_per_s']['median']:,.1f} tokens/s, first token after "
              f"{theirs['first_token_ms']['median']:.1f} ms; ours is {ratio:.2f} times as fast")
    return record


def data(args, argv):
    """Batches read, shuffled and pinned as in training, without training."""
    from runtime.data.dataset import DatasetError, open_datasets, open_tokens
    from runtime.data.loader import train_batches

    s = settings_of_script(SCRIPT, argv)
    if s.batch_size == "auto":
        raise SystemExit("bench.py data needs a --batch_size that is a number: only training knows what fits")
    try:
        datasets, totals = open_datasets(s.dataset, ROOT, s.block_size)
    except (DatasetError, ValueError) as error:
        raise SystemExit(str(error)) from None
    mixture = [(open_tokens(one, "train"), one.share) for one in datasets]
    device = "cuda" if torch.cuda.is_available() and s.device != "cpu" else "cpu"
    batches, times = train_batches(mixture, 0, 0, 1, vars(s), totals["vocab_size"], device), []
    for _ in range(WARM_UP + args.repeats):
        start = clock(device)
        for _ in range(s.gradient_accumulation_steps):
            next(batches)
        times.append(1000 * (clock(device) - start))
    ms, tokens = summarize(times[WARM_UP:]), s.batch_size * s.gradient_accumulation_steps * s.block_size
    print(f"{s.dataset}: {ms['median']:.2f} ms ({ms['least']:.2f} to {ms['most']:.2f}) for {tokens:,} tokens, "
          f"{tokens / ms['median'] * 1000:,.0f} tokens/s")
    return {**machine_record(device), "ms": ms, "tokens_per_step": tokens}


def checkpoint(args, argv):
    """Five tags saved in the background, then a resume."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir=os.getcwd(), ignore_cleanup_errors=True) as folder:
        out_dir, interval = os.path.join(folder, "out"), max(1, args.repeats // 5)
        options = [*argv, f"--eval_interval={interval}", "--eval_iters=1", "--keep_last=1", "--lr_decay_iters=100"]
        parts = {"BENCH_PARTS": os.path.join(folder, "parts.json")}
        output = run_ranks("instrumented", args, [*options, f"--max_iters={5 * interval}"], out_dir, **parts)
        resumed = run_ranks("instrumented", args, [*options, f"--max_iters={5 * interval + WARM_UP + 1}",
                                                   "--init_from=resume"], out_dir, **parts)
        seconds, sizes, rates, blocked = zip(*re.findall(
            r"saved \w+ in ([\d.]+) s: ([\d.]+ .B), ([\d.]+) GB/s; .* waited ([\d.]+) s", output))
        record = provenance(out_dir) | {
            "save_s": summarize([*map(float, seconds)]), "tag": sizes[0], "gb_per_s": summarize([*map(float, rates)]),
            "blocked_s": summarize([*map(float, blocked)]), "first_blocked_s": float(blocked[0]),
            "checked_s": float(re.search(r"checked in ([\d.]+) s", resumed)[1]),
            "loaded_s": float(re.search(r"loaded in ([\d.]+) s", resumed)[1])}
        print(f"a tag of {record['tag']}: saved in {record['save_s']['median']:.1f} s "
              f"({record['gb_per_s']['median']:.2f} GB/s), training waited {record['blocked_s']['median']:.2f} s (at "
              f"the first {record['first_blocked_s']:.2f}), checked in {record['checked_s']:.1f} s, loaded in "
              f"{record['loaded_s']:.1f} s")
        return record


def format_table():
    """The steps in results/ as Markdown: one row for each JSON that `train` has written."""
    rows = []
    for path in sorted(glob.glob(os.path.join(ROOT, "results", "*_bench_*.json"))):
        run = read_json(path)
        s, ms, peer = run["settings"], run["ms"], run.get("peer")
        shape = tuple(s[name] for name in ("n_layer", "n_head", "n_embd"))
        model = {shape: name for name, shape in PRETRAINED.items()}.get(shape, s["init_from"])
        model = (model if model in PRETRAINED else " x ".join(map(str, shape))) + (", fp8" if s.get("fp8") else "")
        stage = str(run["stage"]) if "stage" in run else re.search(r"zero(\d)", s["deepspeed_config"])[1]
        cells = [str(run["world_size"]), model, stage, f"{s['batch_size']} x {s['gradient_accumulation_steps']}",
                 f"{ms['median']:,.0f} ({ms['least']:,.0f}, {ms['most']:,.0f})", f"{run['tokens_per_s']:,.0f}",
                 f"{100 * run['mfu']:.1f}%" if run["mfu"] else "n/a", f"{run['peak_gb']:.1f}",
                 f"{run['first_step_s']:.0f}",
                 f"{peer['name'].split()[0]} {peer['ms']['median']:,.0f}, {peer['ratio']:.2f} times" if peer else "",
                 f"`{os.path.basename(path)}`"]
        rows.append((run["world_size"], model, stage, -s["batch_size"], "| " + " | ".join(cells) + " |"))
    names = ["GPUs", "model", "ZeRO", "micro x accumulation", "ms per step (least, most)", "tokens/s", "MFU", "peak GB",
             "first step s", "a peer's ms in the same run", "from results/"]
    return "\n".join([f"| {' | '.join(names)} |", "|" + "---|" * len(names), *(row[-1] for row in sorted(rows))])


def table(*_):
    """Put format_table() between its marks in README.md."""
    readme, rows = Path(ROOT, "README.md"), format_table()
    before, begin, rest = readme.read_text(encoding="utf-8").partition("<!-- bench.py table -->\n")
    _, end, after = rest.partition("<!-- end -->")
    readme.write_text(f"{before}{begin}{rows}\n{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
