"""Time the parts of a Muon step on one GPU, for GPT-2 small and XL: print a table and write it as JSON.

    python results/muon_parts.py h200_x1_muon_parts.json
    python results/muon_parts.py OUT.json --models=2,2,64 --device=cpu    a trial without a GPU

whole: Muon.step() of all matrices of the blocks. The other rows are its parts, over all batches: of orthogonalize(),
that with our half products, and that with PyTorch's whole ones.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch
from torch.utils.benchmark import Timer

from model import GPT, GPTConfig
from runtime.engine import muon
from runtime.engine.fused_adamw import Partition
from runtime.hardware import git_commit, machine_record


def measure(shape, device):
    """Return the batches of a model's matrices, and {part: ms}."""
    layers, heads, width = shape
    with torch.device("meta"):
        model = GPT(GPTConfig(n_layer=layers, n_head=heads, n_embd=width))
    params = muon.split_matrices(model.parameter_groups(0.1), model, 10, 1)[-1]["params"]
    places = list(zip(params, itertools.accumulate((p.numel() for p in params), initial=0)))
    size, use_kernels = sum(p.numel() for p in params), device == "cuda"
    muon.dist.get_rank = lambda group: 0  # there is no process group
    stepper = muon.Muon(places, size, None, use_kernels)
    master = torch.nn.Parameter(0.02 * torch.randn(size, device=device))
    half = master.data.to(torch.bfloat16 if use_kernels else torch.float32)
    grads, momentum = torch.randn_like(master.data), torch.zeros_like(master.data)
    p = Partition(master, grads, half, {"lr": 0.0, "weight_decay": 0.1})
    norm, one, applied = (torch.ones((), device=device) for _ in range(3))
    pieces = [(slice(start, end), (-1, rows, columns)) for start, end, rows, columns in stepper.batches]
    directions = [stepper.next_direction(grads[own], momentum[own], one, applied > 0) for own, _ in pieces]
    normed = [stepper.normalize(d.view(view)) for d, (_, view) in zip(directions, pieces)]
    parts = {
        "whole": lambda: stepper.step(p, momentum, norm, 1.0, 1e9),
        "next_direction": lambda: [stepper.next_direction(grads[own], momentum[own], one, applied > 0)
                                   for own, _ in pieces],
        "normalize": lambda: [stepper.normalize(d.view(view)) for d, (_, view) in zip(directions, pieces)],
        "orthogonalize, half products": lambda: [muon.orthogonalize(x, stepper.product) for x in normed],
        "orthogonalize, whole products": lambda: [muon.orthogonalize(x, muon.plain_product) for x in normed],
        "apply_update": lambda: [stepper.apply_update(master.data[own], half[own], x.flatten(), norm * 0, norm * 0)
                                 for x, (own, _) in zip(normed, pieces)]}
    ms = {}
    for name, part in parts.items():
        part(), part()  # compiles
        ms[name] = 1000 * Timer("part()", globals={"part": part}, num_threads=torch.get_num_threads()).timeit(5).median
    return {"matrices": len(params), "batches": [list(batch) for batch in stepper.batches], "ms": ms}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", help="output file")
    parser.add_argument("--models", nargs="+", default=["12,12,768", "48,25,1600"], metavar="LAYERS,HEADS,WIDTH")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    record = {"command": " ".join(sys.argv), "commit": git_commit(), **machine_record(args.device), "models": {}}
    for model in args.models:
        record["models"][model] = measured = measure(tuple(map(int, model.split(","))), args.device)
        print(model, *(f"{name:>32} {ms:8.2f} ms" for name, ms in measured["ms"].items()), sep="\n", flush=True)
    Path(args.json).write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
