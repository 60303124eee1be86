"""One rank of test_any_graph.py: graph_worker.py FOLDER WAY...

Trains the GPT of FOLDER/model.py in each of these ways of graph_training.py, in an engine of its
own. Rank 0 writes FOLDER/WAY.pt: losses and gradient norms of the steps, and the last weights."""

import os
import sys
import warnings
from pathlib import Path

sys.path[:0] = [sys.argv[1], *(str(Path(__file__).resolve().parents[n]) for n in (2, 1))]
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import graph_training
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param
from graph_training import WAYS
from zero_training import initialize, paths, set_rates

import model as edited
from runtime.cluster.ranks import shut_down
from runtime.data.loader import BatchSizes
from runtime.engine.engine import Engine
from runtime.engine.setup import gather_whole_modules
from runtime.output import exit_on_error

LINEAR = torch.nn.functional.linear


def train(
    stage: int,
    accumulation: int = 1,
    zero: dict | None = None,
    local: bool = False,
    recompute: bool = False,
    with_lora: bool = False,
    peek: bool = False,
) -> dict:
    """Train as the script does. Return what graph_training.train_plainly() returns.

    accumulation: micro-steps. zero: more of the JSON's zero_optimization. local: each rank sums the
    gradients of its micro-steps first. recompute: the activations, in backward. peek: make a forward
    without a backward before each micro-step.
    """
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    micro = graph_training.SEQUENCES // accumulation // ranks
    batch = BatchSizes(micro, accumulation, ranks, graph_training.T)
    torch.nn.functional.linear = LINEAR  # which stage 3 replaces for good
    model = graph_training.fresh_model(edited, with_lora)
    model.gradient_checkpointing = recompute
    if stage == 3:
        gather_whole_modules(model)
    deepspeeds = initialize(
        model,
        groups=model.parameter_groups(graph_training.DECAY),
        content={"zero_optimization": {"stage": stage, **(zero or {})}},
        batch=batch,
        clip=graph_training.CLIP,
        dtype="float32",
        lr=0.0,
        **graph_training.ADAM,
    )
    engine = Engine(deepspeeds, paths(deepspeeds, model, local))

    losses = []
    norms = []
    for step in range(graph_training.STEPS):
        model.step = step
        set_rates(deepspeeds.optimizer, graph_training.learning_rate(step))
        total = torch.zeros(())
        sequences = graph_training.data(step).view(ranks, accumulation, micro, -1)
        for own in sequences[rank]:
            if peek:
                with torch.no_grad():
                    model(own[:, :-1], own[:, 1:])
            total += engine.micro_step(own[:, :-1], own[:, 1:])
        norms.append(engine.step().grad_norm)
        dist.all_reduce(total)
        losses.append(total.item() / accumulation / ranks)

    weights = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            weights[name] = safe_get_full_fp32_param(p).detach().clone()
    deepspeeds.destroy()
    return {"losses": losses, "norms": norms, "weights": weights}


def main(folder: str, *ways: str) -> None:
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)  # DeepSpeed's old names
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled at start
    deepspeed.utils.logger.setLevel("ERROR")
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    for way in ways:
        result = train(**WAYS[way])
        if dist.get_rank() == 0:
            unfinished = Path(folder, "unfinished")
            torch.save(result, unfinished)
            unfinished.rename(Path(folder, f"{way}.pt"))
    shut_down()


if __name__ == "__main__":
    with exit_on_error("interrupted"):  # as the script: one line, exit code 2
        main(*sys.argv[1:])
