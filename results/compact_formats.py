"""Compare formats of the optimizer's moments on a CPU: what runtime/engine/compact.py was chosen by.

    python results/compact_formats.py FILE.json --optimizer=adamw --steps=300 --seeds=1,2,3

Trains the model of config/shakespeare_char_cpu.py in float32 with each way to keep the moments, and
prints the validation loss of each seed. The weights are exact in all of them. Prepare the text
first, with `python data/shakespeare_char/prepare.py`.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from model import GPT, GPTConfig
from runtime.engine import compact
from runtime.engine.clip import Clip
from runtime.engine.compact_adamw import rates_of, step_chunk
from runtime.engine.muon import MOMENTUM, normalize, orthogonalize, plain_product

MODEL = {"block_size": 64, "vocab_size": 65, "n_layer": 4, "n_head": 4, "n_embd": 128}
BATCH = 24  # sequences per step
WARMUP = 50
ADAMW_RATE = {"adamw": 2e-3, "muon": 3e-3}
MUON_RATE = 0.03
DECAY = 0.1
WINDOWS = 960  # of the validation text, the same for all


class Moment32:
    """A moment in float32, with the interface of compact.Moment8."""

    def __init__(self, n: int) -> None:
        self.values = torch.zeros(n)

    def read(self, start: int, end: int) -> torch.Tensor:
        return self.values[start:end].clone()

    def write(self, start: int, values: torch.Tensor, noise: torch.Tensor | None) -> None:
        self.values[start : start + values.numel()] = values


class Nearest(compact.Moment8):
    """An 8-bit moment that is rounded to the nearest."""

    def write(self, start: int, values: torch.Tensor, noise: torch.Tensor | None) -> None:
        super().write(start, values, None)


CPU = torch.device("cpu")
SIGNED = compact.EXP_AVG_MANTISSA
POSITIVE = compact.EXP_AVG_SQ_MANTISSA

# {name: the stores of (exp_avg, exp_avg_sq, Muon's momentum)}
WAYS = {
    "float32": (Moment32, Moment32, Moment32),
    "8 bits": (
        lambda n: compact.Moment8(n, SIGNED, CPU),
        lambda n: compact.Moment8(n, POSITIVE, CPU),
        lambda n: compact.Moment8(n, SIGNED, CPU),
    ),
    "8 bits to the nearest": (
        lambda n: Nearest(n, SIGNED, CPU),
        lambda n: Nearest(n, POSITIVE, CPU),
        lambda n: Nearest(n, SIGNED, CPU),
    ),
    "bfloat16, 8 bits": (
        lambda n: compact.Moment16(n, CPU),
        lambda n: compact.Moment8(n, POSITIVE, CPU),
        lambda n: compact.Moment16(n, CPU),
    ),
    "bfloat16": (
        lambda n: compact.Moment16(n, CPU),
        lambda n: compact.Moment16(n, CPU),
        lambda n: compact.Moment16(n, CPU),
    ),
    "8 bits, Muon's in bfloat16": (
        lambda n: compact.Moment8(n, SIGNED, CPU),
        lambda n: compact.Moment8(n, POSITIVE, CPU),
        lambda n: compact.Moment16(n, CPU),
    ),
}


class Group:
    """Parameters that are stepped together, as a flat compact state."""

    def __init__(self, params: list, parts: list[int] | None, decay: float, way: tuple) -> None:
        self.params = params
        self.parts = parts  # of each matrix, for Muon
        self.options = {"weight_decay": decay, "eps": 1e-8}
        flat = torch.cat([p.detach().flatten() for p in params])
        half, remainder = compact.split_weight(flat)
        first, second, momentum = way
        if parts is None:
            moments = {"exp_avg": first(len(flat)), "exp_avg_sq": second(len(flat))}
        else:
            moments = {"exp_avg": momentum(len(flat))}
        self.state = compact.CompactState(half, remainder, moments)

    def step(self, step: int, factor: float, lr: float, betas: tuple[float, float]) -> None:
        """Step the parameters. factor: of clipping."""
        grads = torch.cat([p.grad.flatten() for p in self.params])
        options = {**self.options, "lr": lr, "betas": betas}
        count = torch.tensor(float(step))
        clip = Clip(torch.tensor(0.0), factor, math.inf, math.inf)
        seed = compact.seed_of(count)
        if self.parts is None:
            step_chunk(self.state, options, 0, grads, rates_of(options, count, clip), seed)
        else:
            self.step_muon(grads * factor, lr, seed)
        weights = self.state.read("weight", 0, len(grads))
        offset = 0
        for p in self.params:
            p.data.copy_(weights[offset : offset + p.numel()].view(p.shape))
            offset += p.numel()

    def step_muon(self, grads: torch.Tensor, lr: float, seed: torch.Tensor) -> None:
        """Step matrices by Muon."""
        n = len(grads)
        momentum = self.state.read("exp_avg", 0, n).lerp(grads, 1 - MOMENTUM)
        self.state.write("exp_avg", 0, momentum, compact.noise_of(seed, 0, n))
        direction = grads.lerp(momentum, MOMENTUM)
        weights = self.state.read("weight", 0, n) * (1 - lr * DECAY)
        offset = 0
        for p, parts in zip(self.params, self.parts, strict=True):
            rows, columns = p.shape[0] // parts, p.shape[1]
            own = slice(offset, offset + p.numel())
            matrices = normalize(direction[own].view(parts, rows, columns))
            update = orthogonalize(matrices, plain_product).flatten()
            weights[own] -= lr * max(1, rows / columns) ** 0.5 * update
            offset += p.numel()
        self.state.write("weight", 0, weights)


def groups_of(model: GPT, optimizer: str, way: tuple) -> list[Group]:
    """Return the groups of a model."""
    parts = {}
    if optimizer == "muon":
        for block in model.muon_matrices():
            parts.update(dict(block))
    groups = []
    for group in model.parameter_groups(DECAY):
        params = [p for p in group["params"] if p not in parts]
        groups.append(Group(params, None, group["weight_decay"], way))
    if parts:
        groups.append(Group(list(parts), list(parts.values()), DECAY, way))
    return groups


def windows(tokens: np.ndarray, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (x, y) of the windows from these starts on."""
    size = MODEL["block_size"]
    rows = [torch.from_numpy(tokens[i : i + size + 1].astype(np.int64)) for i in starts.tolist()]
    both = torch.stack(rows)
    return both[:, :-1], both[:, 1:]


def train(optimizer: str, way: tuple, seed: int, steps: int, beta2: float) -> float:
    """Return the validation loss after some steps."""
    folder = ROOT / "data" / "shakespeare_char"
    text = np.memmap(folder / "train.bin", dtype=np.uint16, mode="r")
    validation = np.memmap(folder / "val.bin", dtype=np.uint16, mode="r")
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**MODEL))
    groups = groups_of(model, optimizer, way)
    for step in range(steps):
        x, y = windows(text, torch.randint(len(text) - 65, (BATCH,)))
        model.zero_grad()
        model(x, y).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf)
        factor = min(1.0, 1.0 / (norm.item() + 1e-6))
        rate = min((step + 1) / WARMUP, (steps - step) / (steps - WARMUP))
        for group in groups:
            peak = ADAMW_RATE[optimizer] if group.parts is None else MUON_RATE
            group.step(step, factor, rate * peak, (0.9, beta2))
    starts = torch.linspace(0, len(validation) - 66, WINDOWS).long()
    with torch.no_grad():
        losses = [model(*windows(validation, part)).item() for part in starts.split(96)]
    return sum(losses) / len(losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--beta2", type=float, default=0.95)
    parser.add_argument("--ways", default=",".join(range_of_ways()))
    args = parser.parse_args()
    torch.set_num_threads(1)
    names = list(WAYS)
    seeds = [int(seed) for seed in args.seeds.split(",")]
    losses: dict[str, list[float]] = {}
    began = time.monotonic()
    for seed in seeds:
        for number in args.ways.split(","):
            name = names[int(number)]
            loss = train(args.optimizer, WAYS[name], seed, args.steps, args.beta2)
            losses.setdefault(name, []).append(loss)
            print(f"{args.optimizer}, seed {seed}, {name}: {loss:.4f}", flush=True)
            record = {
                "optimizer": args.optimizer,
                "steps": args.steps,
                "beta2": args.beta2,
                "seeds": seeds,
                "seconds": round(time.monotonic() - began),
                "validation_loss": losses,
            }
            Path(args.file).write_text(json.dumps(record, indent=1) + "\n")


def range_of_ways() -> list[str]:
    """Return the numbers of the ways, as text."""
    return [str(number) for number in range(len(WAYS))]


if __name__ == "__main__":
    main()
