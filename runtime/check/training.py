"""Train a tiny model with ZeRO and in plain PyTorch, over the same micro-batches.

Each rank of ZeRO has a model of its own, so a plain one stands for each rank: what a forward writes
into buffers stays on its rank.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor, nn

from runtime.check.tiny import T, Tiny, gradients, set_seed, tokens
from runtime.cluster.ranks import RANK
from runtime.data.loader import BatchSizes
from runtime.engine import ds_config, setup
from runtime.engine.engine import Engine
from runtime.engine.fast_paths import FastPaths, decide, inspect_model
from runtime.hardware import Execution

RANKS = 2
ACCUMULATION = 2  # micro-steps
MICRO = 2  # sequences of a micro-batch
CLIP = 1.0
STEPS = 2  # before a checkpoint
CPU = Execution("cpu", "float32", False, 0)
FILES = {2: "ds_config_zero2.json", 3: "ds_config_zero3.json"}
LINEAR = torch.nn.functional.linear

MakeOptimizer = Callable[[nn.Module, Mapping], torch.optim.Optimizer]


@dataclass
class Trained:
    """What training has made. weights: fp32, by name. losses: of the steps, over all ranks.

    grads: of each step, only in plain PyTorch.
    """

    losses: list[float]
    weights: dict[str, Tensor]
    grads: list[dict[str, Tensor]]


def micro_batch(step: int, micro_step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return (x, y), and seed what the model may draw in this micro-step."""
    # Each micro-batch of the run has a number, whichever rank takes it
    number = (step * ACCUMULATION * RANKS + micro_step) * RANKS + rank
    set_seed(number)
    sequences = tokens(seed=number, rows=MICRO, length=T + 1)
    return sequences[:, :-1], sequences[:, 1:]


def gradient_descent(model: nn.Module, config: Mapping) -> torch.optim.Optimizer:
    """Return SGD with a rate of 1: a step subtracts the gradient."""
    return torch.optim.SGD(model.parameter_groups(0.0), lr=1.0)


def json_of(stage: int, ranks: int, accumulation: int, clip: float) -> dict[str, Any]:
    """Return the configuration of DeepSpeed, from the JSON of this project."""
    # Of the same sizes as the micro-batches above
    batch = BatchSizes(MICRO, accumulation, ranks, T)
    config, _ = ds_config.complete_config(FILES[stage], batch, clip, "float32")
    return config


def start_engine(
    tiny: Tiny, config: dict, ranks: int, make_optimizer: MakeOptimizer, fast: bool
) -> Engine:
    """Return an engine as the training script makes it. fast: with the fast paths that fit."""
    torch.nn.functional.linear = LINEAR  # which stage 3 replaces for good

    model = tiny.stirred()
    stage = config["zero_optimization"]["stage"]
    paths = FastPaths()
    if fast:
        paths = decide(inspect_model(model), CPU, config, ranks)
    setup.compile_blocks(model, paths, CPU)
    if stage == 3:
        setup.gather_whole_modules(model)
    optimizer = make_optimizer(model, config)
    return Engine(setup.initialize(model, optimizer, config), paths)


def train_step(engine: Engine, step: int, ranks: int, accumulation: int) -> float:
    """Make a step on this rank's micro-batches. Return its loss on this rank.

    The micro-batches of a step are the same on any number of ranks.
    """
    total = 0.0
    for i in range(accumulation):
        if ranks == 1:  # those of all ranks
            micro_step, rank = divmod(i, RANKS)
        else:
            micro_step, rank = i, RANK
        total += engine.micro_step(*micro_batch(step, micro_step, rank)).item()
    engine.step()
    return total / accumulation


def weights_of(engine: Engine) -> dict[str, Tensor]:
    """Return the fp32 weights, whole. All ranks call this."""
    weights = {}
    for name, param in engine.module.named_parameters():
        if param.requires_grad:
            weights[name] = safe_get_full_fp32_param(param).detach().clone()
    return weights


class PlainTraining:
    """The same training in plain PyTorch. clip: 0 for none."""

    def __init__(self, tiny: Tiny, make_optimizer: MakeOptimizer, clip: float) -> None:
        # A model per rank, whose buffers are its own. The optimizer steps the first
        self.replicas = [tiny.stirred() for _ in range(RANKS)]
        self.model = self.replicas[0]
        self.optimizer = make_optimizer(self.model, json_of(2, 1, 1, clip))
        self.clip = clip
        self.trained = Trained([], {}, [])

    def resume_on_one_rank(self) -> None:
        """Go on as a checkpoint does on one rank: with the buffers of rank 0."""
        self.replicas = [self.model]

    def step(self, number: int) -> None:
        """Make a step over the micro-batches of all ranks."""
        total = 0.0

        # Gradients of all micro-batches, by name
        sums: dict[str, Tensor] = {}
        for micro_step in range(ACCUMULATION):
            for rank in range(RANKS):
                model = self.replicas[rank % len(self.replicas)]
                loss = model(*micro_batch(number, micro_step, rank))
                total += loss.item()
                for name, grad in gradients(model, loss).items():
                    sums[name] = sums.get(name, 0) + grad
        count = ACCUMULATION * RANKS

        # The mean of all, and the step
        params = dict(self.model.named_parameters())
        grads = {name: grad / count for name, grad in sums.items()}
        for name, grad in grads.items():
            params[name].grad = grad.clone()

        # As DeepSpeed clips: by the norm of all gradients together
        if self.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.trained.losses.append(total / count)
        self.trained.grads.append(grads)
        self.trained.weights = {
            name: p.detach().clone() for name, p in params.items() if p.requires_grad
        }
        # The other ranks' models have the same weights
        for replica in self.replicas[1:]:
            with torch.no_grad():
                for param, own in zip(replica.parameters(), self.model.parameters(), strict=True):
                    param.copy_(own)

    def result(self) -> Trained:
        """Return what the steps so far have made."""
        return copy.deepcopy(self.trained)
