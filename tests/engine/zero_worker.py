"""One rank of test_zero.py: torchrun --nproc_per_node=N zero_worker.py OUT.json GROUP

Trains a tiny GPT for a few steps in each way of a group of zero_ways.py, and in plain PyTorch over
the same sequences, as "plain". Rank 0 writes {name of the way: result}. A result has, after each
step:

  norms, seen   the gradient norm, as DeepSpeed publishes it and as guards see it
  applied       the number of ranks that have applied the step
  scales        the loss scale in float16

and of the whole training:

  furthest      {other way: the largest difference of all weights}
  apart         {other way: the distance of the weights, in units of the way that it has come}
  moved_by_poison   the largest change of the weights in the step with a bad gradient
  keys_moved    the largest change of the keys' biases, whose exact gradient is 0
  is_ours       whether our gradients and step were taken
  released      how many parameters a rank doesn't hold after the last step
  sample, wanted_sample   of the model in training, and of a plain one with the same weights
  evaluated, wanted_losses   losses of targets by the engine, and by a plain model
  stale         the largest difference of the weights and their float16 copies, after that
"""

import json
import os
import sys
import warnings
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[n]) for n in (2, 1)]

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from zero_training import ADAM, initialize, paths, set_rates, weights
from zero_ways import CLIP, GROUPS, Group, Way

from model import GPT, Block, GPTConfig
from runtime.cluster.ranks import all_reduce_sum, shut_down
from runtime.data.loader import BatchSizes
from runtime.engine import offload
from runtime.engine.engine import Engine
from runtime.kernels import fused as fused_blocks
from runtime.sample.generate import TEMPERATURE, TOP_K, sample_while_training

SEQUENCES = 12  # of a step, over all ranks
MICRO_STEPS = 3
T = 16
VOCAB = 61
LEARNING_RATES = (1e-2, 5e-3, 2e-3, 1e-2, 5e-3)  # set anew each step, as the script does
PROMPT = [1, 2, 3]  # of a sample after the first step
LINEAR = torch.nn.functional.linear
offload.PIECE = 5000  # elements: several pieces of a partition, the last of which is shorter


def fresh_model(layers: int) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(block_size=T, vocab_size=VOCAB, n_layer=layers, n_head=2, n_embd=32))


def data(step: int, tokens: int) -> torch.Tensor:
    """Return the sequences of a step, (SEQUENCES, tokens + 1)."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCAB, (SEQUENCES, T + 1), generator=generator)[:, : tokens + 1]


# In plain PyTorch


def train_plainly(group: Group, clip: float) -> dict:
    """Train over the whole batch. Return {"norms", "weights"}."""
    model = fresh_model(group.layers)
    optimizer = torch.optim.AdamW(model.parameter_groups(0.1), **ADAM)
    norms = []
    for step in range(group.steps):
        set_rates(optimizer, LEARNING_RATES[step])
        optimizer.zero_grad()
        sequences = data(step, group.tokens)
        model(sequences[:, :-1], sequences[:, 1:]).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))
        norms.append(norm.item())
        optimizer.step()
    trained = {name: param.detach() for name, param in model.named_parameters()}
    return {"norms": norms, "weights": trained}


def plain_model(way: Way, layers: int, trained: dict[str, torch.Tensor]) -> GPT:
    """Return a plain model with these weights, in the precision of a way."""
    model = fresh_model(layers).to(getattr(torch, way.dtype)).eval()
    for name, param in model.named_parameters():
        weight = trained[name]
        if way.kernels and way.ours:  # Triton's interpreter truncates to bfloat16
            weight = (weight.view(torch.int32) & -(2**16)).view(torch.float32)
        param.data.copy_(weight)
    return model


def plain_sample(model: GPT) -> list[int]:
    """Return what sample_while_training is to return."""
    model.crop_vocab_size(VOCAB // 2)
    generator = torch.Generator().manual_seed(7)
    text = model.generate(torch.tensor([PROMPT]), 10, TEMPERATURE, TOP_K, generator=generator)
    return text[0].tolist()


# In a way of zero_ways.py


def build(way: Way, layers: int):
    """Return DeepSpeed's engine, made as the script makes it, and the fused blocks or None."""
    world_size = dist.get_world_size()
    micro_batch = SEQUENCES // MICRO_STEPS // world_size
    batch = BatchSizes(micro_batch, MICRO_STEPS * way.planned, world_size, T)
    torch.nn.functional.linear = LINEAR  # which stage 3 replaces for good
    model = fresh_model(layers)
    if way.compiled:
        model.compile_blocks(backend="aot_eager")
    if way.kernels == "closed":  # each block takes and returns a tensor, as its hook wants
        model.transformer.h[0].register_forward_hook(lambda module, given, made: None)
    fused = None
    if way.kernels:
        fused = fused_blocks.use_fused_blocks(model, copies=way.stage < 3)
    if way.stage == 3:
        deepspeed.utils.set_z3_leaf_modules(model, [Block])
    content = {**way.config, "zero_optimization": {"stage": way.stage, **way.zero}}
    engine = initialize(
        model,
        model.parameter_groups(0.1),
        content,
        batch,
        way.clip,
        way.dtype,
        compiled=way.compiled,
        masked=way.masked,
        fused=fused,
        **ADAM,
    )
    engine.module.gradient_checkpointing = way.recomputed
    return engine, fused


class Poison:
    """Makes one element of one gradient a bad value, while it is on."""

    def __init__(self, way: Way, model: GPT) -> None:
        self.value = float(way.poison or 0)
        self.is_on = False
        # Where products add to the sums, autograd sees the gradients of the embeddings alone
        parts = model.transformer
        param = parts.wpe.weight if way.kernels else parts.h[0].ln_2.bias
        param.register_hook(self.spoil)

    def spoil(self, grad: torch.Tensor) -> torch.Tensor:
        if self.is_on:
            grad = grad.clone()
            grad[5] = self.value
        return grad


def check_loss_scale(way: Way, deepspeeds, tokens: int) -> None:
    """Check that the kernels' float16 sees each target's gradient times 16 to 32. If few tokens are
    targets, then at least 1 to 2. tokens: of each sequence."""
    targets = SEQUENCES // dist.get_world_size() * tokens
    per_target = deepspeeds.optimizer.loss_scale / targets
    least = 1 if way.masked else 16
    assert least < per_target <= 2 * least


def train(way: Way, group: Group) -> dict:
    """Train as the script does. Return the result of the way, with its "weights"."""
    deepspeeds, fused = build(way, group.layers)
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    chosen = paths(
        deepspeeds, deepspeeds.module, way.local, kernels=bool(way.kernels), own=way.forced
    )
    engine = Engine(deepspeeds, chosen, fused, masked=way.masked)
    if way.kernels:
        check_loss_scale(way, deepspeeds, tokens=T)  # of the settings
        # Triton's interpreter truncates weights to bfloat16, so they aren't the optimizer's, rounded
        engine.check_values = lambda: torch.tensor(False)
    if engine.our_step is not None:
        assert engine.our_step.use_kernel == bool(way.kernels)
    poison = Poison(way, deepspeeds.module)

    result = {"norms": [], "seen": [], "applied": [], "scales": []}
    result["is_ours"] = engine.our_step is not None
    result["moved_by_poison"] = None
    steps = [(step, False) for step in range(group.steps)]
    if way.poison:
        steps.insert(1, (1, True))
    for step, is_bad in steps:
        before = weights(deepspeeds) if is_bad else None
        set_rates(deepspeeds.optimizer, LEARNING_RATES[step])
        by_rank = data(step, group.tokens).reshape(world_size, MICRO_STEPS, -1, group.tokens + 1)
        for micro_step, sequences in enumerate(by_rank[rank]):
            poison.is_on = is_bad and rank == world_size - 1 and micro_step == 1
            engine.micro_step(sequences[:, :-1], sequences[:, 1:])
        if way.kernels:  # the micro-batches were smaller than by the settings
            check_loss_scale(way, deepspeeds, group.tokens)
        done = engine.step()

        norm = deepspeeds.get_global_grad_norm()
        result["norms"].append(None if norm is None else float(norm))
        result["seen"].append(done.grad_norm)
        result["applied"].append(all_reduce_sum(done.applied)[0])
        if way.dtype == "float16":
            result["scales"].append(done.loss_scale)
        if is_bad:
            result["moved_by_poison"] = furthest(weights(deepspeeds), before)
        if step == 0:  # what follows is to be as without the sample
            model = plain_model(way, group.layers, weights(deepspeeds))
            result["wanted_sample"] = plain_sample(model)
            result["sample"] = sample_while_training(
                deepspeeds.module, VOCAB // 2, PROMPT, 10, 7, lambda: False
            )

    module = deepspeeds.module
    statuses = [getattr(param, "ds_status", None) for param in module.parameters()]
    result["released"] = statuses.count(ZeroParamStatus.NOT_AVAILABLE)
    result["weights"] = weights(deepspeeds)
    result |= evaluate(way, group, engine, result["weights"])
    keys = []
    for name, param in result["weights"].items():
        if "c_attn.bias" in name:
            _, of_keys, _ = param.chunk(3)
            keys.append(of_keys.abs().max().item())
    result["keys_moved"] = max(keys)
    deepspeeds.destroy()
    return result


@torch.no_grad()
def evaluate(way: Way, group: Group, engine: Engine, trained: dict[str, torch.Tensor]) -> dict:
    """Return the losses of the first targets by the engine, and by a plain model."""
    sequences = data(100, group.tokens)[:1]
    x = sequences[:, :-1]
    y = sequences[:, 1:]
    engine.module.eval()
    losses = engine.evaluate(x, y)
    engine.module.train()
    wanted = plain_model(way, group.layers, trained)(x, y, "none")
    stale = 0.0
    if engine.fused:
        for copied, layer in zip(engine.fused.copies, engine.fused.layers, strict=False):
            stale = max(stale, (copied - layer.weight.half()).abs().max().item())
    return {
        "evaluated": losses.flatten().tolist(),
        "wanted_losses": wanted.flatten().tolist(),
        "stale": stale,
    }


# How far the weights of two ways are from each other


def furthest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Return the largest difference between two sets of weights, on any rank."""
    assert a.keys() == b.keys()
    mine = torch.stack([(a[name].float() - b[name].float()).abs().max() for name in a]).max()
    dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    return mine.item()


def apart(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], layers: int) -> float:
    """Return the distance between two sets of weights, in units of the way that b has come."""
    start = dict(fresh_model(layers).named_parameters())
    way = sum((b[name] - start[name]).square().sum() for name in b)
    distance = sum((a[name] - b[name]).square().sum() for name in b)
    return (distance / way).sqrt().item()


def main(out: str, name: str) -> None:
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)  # DeepSpeed uses them
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled at start
    deepspeed.utils.logger.setLevel("ERROR")
    get_accelerator().is_fp16_supported = lambda: True  # slow on CPU, but right
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    group = GROUPS[name]
    results = {
        "plain": train_plainly(group, CLIP),
        "plain unclipped": train_plainly(group, clip=0.0),
    }
    for way in group.ways:
        results[way.name] = train(way, group)

    trained = {way: result.pop("weights") for way, result in results.items()}
    for way, result in results.items():
        own = trained[way]
        result["furthest"] = {other: furthest(own, trained[other]) for other in trained}
        result["apart"] = {other: apart(own, trained[other], group.layers) for other in trained}
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(results, indent=1))
    shut_down()


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    main(*sys.argv[1:])
