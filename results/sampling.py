"""Measure the speed of sampling on this machine, beside transformers' generate(): print it and write it as JSON.

    python results/sampling.py --model=gpt2-xl --batch=1 --json=x1_sample_1.json
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch
from torch.utils.benchmark import Timer, timer

from model import GPT, GPTConfig
from runtime.git import git_commit
from runtime.hardware import machine_record
from runtime.kernels.decode import decode_step_for
from runtime.pretrained import PRETRAINED


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=shape, default="gpt2-xl", metavar="|".join([*PRETRAINED, "LAYERS,HEADS,WIDTH"]))
    parser.add_argument("--batch", type=int, default=1, help="batch size")
    parser.add_argument("--tokens", type=int, default=200, help="tokens per sample")
    parser.add_argument("--repeats", type=int, default=10, help="number of samples to measure")
    parser.add_argument("--json", required=True, help="output file")
    args = parser.parse_args()
    record = {"command": " ".join(sys.argv), "commit": git_commit(),
              "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()), **sample(args)}
    Path(args.json).write_text(json.dumps(record, indent=1))


def summarize(values):
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "count": len(values)}


def shape(model):
    """Return the GPTConfig of a GPT-2's name, or of layers,heads,width. argparse reports a ValueError."""
    layers, heads, width = PRETRAINED.get(model) or map(int, model.split(","))
    return GPTConfig(n_layer=layers, n_head=heads, n_embd=width)


def sample(args):
    """Measure sampling: random weights, a prompt of 16 tokens, top-k 200; the first token is timed on its own."""
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
    name, generate = transformers_generate(config, prompt, dtype)
    other = record["baseline"] = {"name": name, **measure(generate)}
    other["ratio"] = speed / other["tokens_per_s"]["median"]
    print(f"{name}: {other['tokens_per_s']['median']:,.1f} tokens/s; ours are {other['ratio']:.2f} times as many")
    return record


def transformers_generate(config, prompt, dtype):
    """Return (name, generate) of transformers' GPT2LMHeadModel with random weights: generate(n) samples n tokens after
    the prompt (B, T), with top-k 200."""
    import transformers

    shape = transformers.GPT2Config(n_layer=config.n_layer, n_head=config.n_head, n_embd=config.n_embd)
    with prompt.device:
        model = transformers.GPT2LMHeadModel(shape).to(dtype).eval()

    def generate(n):
        model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=n, min_new_tokens=n,
                       do_sample=True, top_k=200, pad_token_id=0)

    return f"transformers {transformers.__version__} generate()", generate


if __name__ == "__main__":
    main()
