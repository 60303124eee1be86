"""One rank of test_zero.py: torchrun --nproc_per_node=N zero_worker.py OUT.json

Trains a tiny GPT for a few steps in every way of the table below, each in an engine of its own, and in plain PyTorch
over the same sequences. Rank 0 writes for each way the norms, what was applied, the loss scales, and how far the
weights ended from those of others: the largest difference of all, and the distance in units of the way gone."""

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
from zero_training import ADAM, RELEASED, initialize, paths, set_rates, weights

from model import GPT, Block, GPTConfig
from runtime.cluster.ranks import all_reduce_sum, shut_down
from runtime.data.loader import BatchSizes
from runtime.engine import offload
from runtime.engine.engine import CHECKED_STEPS, Engine
from runtime.kernels import fused as fused_blocks
from runtime.sample.generate import TEMPERATURE, TOP_K, sample_while_training

SEQUENCES, ACCUMULATION, T, VOCAB = 12, 3, 16, 61  # of a step, over all ranks; micro-steps; tokens; vocabulary
PROMPT = [1, 2, 3]  # of a sample after the first step
LEARNING_RATES = (1e-2, 5e-3, 2e-3, 1e-2, 5e-3)  # set anew each step, as the script does
CLIP = 0.3  # norms are 0.5 to 0.8
BUCKETS = {"reduce_bucket_size": 2500, "allgather_bucket_size": 2500}  # c_attn has 3,072 elements, c_fc 4,096
# As config/ds/zero2_offload.json and zero3_offload.json, but with PyTorch's AdamW, which needs no compiler
OFFLOAD_2 = {**BUCKETS, "overlap_comm": True, "offload_optimizer": {"device": "cpu", "pin_memory": False}}
OFFLOAD_3 = {**RELEASED, "overlap_comm": False, "sub_group_size": 5000, "memory_efficient_linear": False,
             "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu", "pin_memory": False}}
LINEAR = torch.nn.functional.linear
offload.PIECE = 5000  # elements: several pieces of a partition, the last of which is shorter
# The scale doubles after every second good step; without clipping, which would hide a gradient that is too small
FP16 = {"config": {"fp16": {"initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}},
        "clip": 0.0, "steps": 5}
DEEP = {"layers": 5}
SMALL = {"layers": 2, "steps": 2, "tokens": 4}  # for kernels in Triton's interpreter, where a row takes milliseconds

# name: (stage, dtype, options of train)
WAYS = {
    **{f"float32 stage {stage}": (stage, "float32", {}) for stage in (2, 3)},
    "float32 stage 2 inf": (2, "float32", {"poison": "inf"}),
    "float32 stage 2 buckets": (2, "float32", {"zero": BUCKETS}),
    "float32 own": (2, "float32", {"short": False}),
    "float32 stage 3 released": (3, "float32", {"zero": RELEASED}),
    "float32 stage 3 recomputed": (3, "float32", {"checkpointing": True}),
    # dynamo and autograd as with inductor, which would need a compiler
    "float32 stage 3 compiled": (3, "float32", {"compiled": True}),
    "float32 stage 3 compiled recomputed": (3, "float32", {"zero": RELEASED, "compiled": True, "checkpointing": True}),
    "float32 stage 2 offload": (2, "float32", {"zero": OFFLOAD_2, "config": {
        "zero_force_ds_cpu_optimizer": False, "steps_per_print": 1}}),
    "float32 stage 2 offload inf": (2, "float32", {"zero": OFFLOAD_2, "poison": "inf", "config": {
        "zero_force_ds_cpu_optimizer": False}}),
    "float32 zero3 offload": (3, "float32", {"zero": OFFLOAD_3, "config": {"zero_force_ds_cpu_optimizer": False}}),
    "bfloat16 stage 2": (2, "bfloat16", {}),
    "bfloat16 stage 3": (3, "bfloat16", {}),
    "bfloat16 stage 3 released": (3, "bfloat16", {"zero": RELEASED}),
    "bfloat16 stage 2 buckets": (2, "bfloat16", {"zero": BUCKETS}),
    "bfloat16 stage 2 buckets inf": (2, "bfloat16", {"zero": BUCKETS, "poison": "inf"}),
    "bfloat16 stage 2 buckets nan": (2, "bfloat16", {"zero": BUCKETS, "poison": "nan"}),
    "bfloat16 stage 2 local": (2, "bfloat16", {"local": True}),
    "bfloat16 stage 2 local inf": (2, "bfloat16", {"local": True, "poison": "inf"}),
    "bfloat16 stage 2 local offload": (2, "bfloat16", {"local": True, "zero": OFFLOAD_2, "config": {
        "zero_force_ds_cpu_optimizer": False}}),
    "bfloat16 own": (2, "bfloat16", {"zero": BUCKETS, "short": False}),
    "bfloat16 stage 2 unclipped": (2, "bfloat16", {"clip": 0.0}),
    "bfloat16 own unclipped": (2, "bfloat16", {"zero": BUCKETS, "short": False, "clip": 0.0}),
    **{f"float16 stage {stage}": (stage, "float16", FP16) for stage in (2, 3)},
    **{f"float16 stage {stage} inf": (stage, "float16", {**FP16, "poison": "inf"}) for stage in (2, 3)},
    "float16 stage 2 static": (2, "float16", {**FP16, "config": {"fp16": {"loss_scale": 128}}}),
    # c_attn, c_proj, c_fc and c_proj have 12,288 elements: 2 and 3 of the 5 blocks stay gathered
    "deep stage 3": (3, "float32", {**DEEP, "zero": {"stage3_max_live_parameters": 0}}),
    "deep stage 3 three": (3, "float32", {**DEEP, "zero": {"stage3_max_live_parameters": 3 * 12288},
                                          "checkpointing": True}),
    "small fused nan": (2, "bfloat16", {**SMALL, "fused": True, "poison": "nan"}),
    "small fused local": (2, "bfloat16", {**SMALL, "fused": True, "local": True}),
    "small fused stage 3": (3, "bfloat16", {**SMALL, "fused": True, "masked": True}),
    "small fused own": (3, "bfloat16", {**SMALL, "fused": True, "short": False, "zero": RELEASED}),
    "small fused closed stage 3": (3, "bfloat16", {**SMALL, "fused": "closed"}),
    "small fused closed own": (3, "bfloat16", {**SMALL, "fused": "closed", "short": False, "zero": RELEASED}),
    "small fused stage 3 local": (3, "bfloat16", {**SMALL, "fused": True, "local": True, "checkpointing": True})}


def fresh_model(layers=2):
    torch.manual_seed(0)
    return GPT(GPTConfig(block_size=T, vocab_size=VOCAB, n_layer=layers, n_head=2, n_embd=32))


def data(step):
    """The sequences of a step, (SEQUENCES, T + 1)."""
    return torch.randint(VOCAB, (SEQUENCES, T + 1), generator=torch.Generator().manual_seed(step))


def plain(steps=3, clip=CLIP, layers=2, tokens=T):
    """The same training in plain PyTorch, over the whole batch: {"norms", "weights"}."""
    model, norms = fresh_model(layers), []
    optimizer = torch.optim.AdamW(model.parameter_groups(0.1), **ADAM)
    for step in range(steps):
        set_rates(optimizer, LEARNING_RATES[step])
        optimizer.zero_grad()
        sequences = data(step)[:, :tokens + 1]
        model(sequences[:, :-1], sequences[:, 1:]).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf")).item())
        optimizer.step()
    return {"norms": norms, "weights": {n: p.detach() for n, p in model.named_parameters()}}


def build(stage, dtype, zero, config, clip, compiled, fused, layers, masked):
    """DeepSpeed's engine, made as the script makes it."""
    batch = BatchSizes(SEQUENCES // ACCUMULATION // dist.get_world_size(), ACCUMULATION, dist.get_world_size(), T)
    torch.nn.functional.linear = LINEAR  # which stage 3 replaces for good
    model = fresh_model(layers)
    if compiled:
        model.compile_blocks(backend="aot_eager")
    if fused == "closed":  # each block takes and returns a tensor, as its hook wants
        model.transformer.h[0].register_forward_hook(lambda module, given, made: None)
    blocks = fused_blocks.use_fused_blocks(model, copies=dtype == "bfloat16" and stage < 3) if fused else None
    if stage == 3:
        deepspeed.utils.set_z3_leaf_modules(model, [Block])
    content = {**config, "zero_optimization": {"stage": stage, **zero}}
    groups = model.parameter_groups(0.1)
    return initialize(model, groups, content, batch, clip, dtype, compiled, masked, blocks, **ADAM), blocks


def plain_sample(weights, dtype, truncated):
    """What sample_while_training is to return: the text of a plain model with these weights, in this dtype."""
    model = fresh_model(sum(name.endswith("ln_1.weight") for name in weights)).to(getattr(torch, dtype)).eval()
    for name, p in model.named_parameters():
        # Triton's interpreter does not round to bfloat16
        p.data.copy_((weights[name].view(torch.int32) & -(2**16)).view(torch.float32) if truncated else weights[name])
    model.crop_vocab_size(VOCAB // 2)
    return model.generate(torch.tensor([PROMPT]), 10, TEMPERATURE, TOP_K,
                          generator=torch.Generator().manual_seed(7))[0].tolist()


def train(stage, dtype, zero=None, config=None, clip=CLIP, steps=3, short=True, poison=None,
          checkpointing=False, compiled=False, fused=False, layers=2, tokens=T, local=False, masked=False):
    """Train as the script does. poison: between the first step and the second there is one in which one element of
    one gradient, on the last rank, in the middle micro-step, is that. local: each rank sums its micro-steps first."""
    deepspeeds, blocks = build(stage, dtype, zero or {}, config or {}, clip, compiled, fused, layers, masked)
    deepspeeds.module.gradient_checkpointing = checkpointing
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # own: DeepSpeed's, to compare
    chosen = paths(deepspeeds, deepspeeds.module, local, kernels=bool(fused), own=not short)
    engine = Engine(deepspeeds, chosen, blocks)
    if fused:
        engine.steps = CHECKED_STEPS  # Triton's interpreter truncates weights to bfloat16
    shortened = engine.our_step is not None
    assert not shortened or engine.our_step.use_kernel == bool(fused)
    # The kernels' float16 sees each target's gradient times 16 to 32, or if few tokens are targets, at least 1 to 2
    assert not fused or 1 < deepspeeds.optimizer.loss_scale / (SEQUENCES // world_size * T) / (16 - 15 * masked) <= 2
    poisoned = False

    def spoil(grad):
        if poisoned:
            grad = grad.clone()
            grad[5] = float(poison)
        return grad

    # Where products add to the sums, autograd sees the gradients of the embeddings alone
    parts = deepspeeds.module.transformer
    (parts.wpe.weight if fused else parts.h[0].ln_2.bias).register_hook(spoil)
    result = {"norms": [], "seen": [], "applied": [], "scales": [], "shortened": shortened,
              "moved_by_poison": None}
    plan = [(step, False) for step in range(steps)]
    if poison:
        plan.insert(1, (1, True))
    for step, bad in plan:
        before = weights(deepspeeds) if bad else None
        set_rates(deepspeeds.optimizer, LEARNING_RATES[step])
        mine = data(step)[:, :tokens + 1].reshape(world_size, ACCUMULATION, -1, tokens + 1)[rank]
        for micro_step, sequences in enumerate(mine):
            poisoned = bad and rank == world_size - 1 and micro_step == 1
            engine.micro_step(sequences[:, :-1], sequences[:, 1:])
        done = engine.step()
        norm = deepspeeds.get_global_grad_norm()
        result["norms"].append(None if norm is None else float(norm))
        result["seen"].append(done.grad_norm)
        result["applied"].append(all_reduce_sum(done.applied)[0])
        if dtype == "float16":
            result["scales"].append(done.loss_scale)
        if step == 0:  # what follows is to be as without it
            result["sample"] = sample_while_training(deepspeeds.module, VOCAB // 2, PROMPT, 10, 7, lambda: False)
            result["wanted_sample"] = plain_sample(weights(deepspeeds), dtype, fused and short)
        if bad:
            result["moved_by_poison"] = furthest(weights(deepspeeds), before)
    result["released"] = sum(getattr(p, "ds_status", None) == ZeroParamStatus.NOT_AVAILABLE
                             for p in deepspeeds.module.parameters())
    if fused and stage == 2:  # an evaluation has the present weights
        engine.evaluate(sequences[:, :-1], sequences[:, 1:])
        assert all(torch.equal(copy, layer.weight.half()) for copy, layer in zip(blocks.copies, blocks.layers))
    result["weights"] = weights(deepspeeds)
    keys = [p[p.numel() // 3 : -(p.numel() // 3)] for name, p in result["weights"].items() if "c_attn.bias" in name]
    result["keys_moved"] = max(p.abs().max().item() for p in keys)  # from 0
    deepspeeds.destroy()
    return result


def furthest(a, b):
    """The largest difference between two sets of weights, on any rank."""
    assert a.keys() == b.keys()
    mine = torch.stack([(a[name].float() - b[name].float()).abs().max() for name in a]).max()
    dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    return mine.item()


def apart(a, b):
    """The distance between two sets of weights, in units of the way that b has come from the start."""
    layers = sum(name.endswith("ln_1.weight") for name in b)
    way = sum((b[name] - p).square().sum() for name, p in fresh_model(layers).named_parameters())
    return (sum((a[name] - b[name]).square().sum() for name in b) / way).sqrt().item()


def main(out):
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)  # names that DeepSpeed still uses
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled at start
    deepspeed.utils.logger.setLevel("ERROR")
    get_accelerator().is_fp16_supported = lambda: True  # slow on CPU, but right
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    every = {"plain": plain(), "plain unclipped": plain(steps=FP16["steps"], clip=0.0), "small plain": plain(**SMALL),
             "deep plain": plain(**DEEP)}
    for name, (stage, dtype, options) in WAYS.items():
        every[name] = train(stage, dtype, **options)
    report = {}
    for name, result in every.items():
        kind = name.split()[0]
        kinds = (kind, kind if kind in ("small", "deep") else "plain")
        others = [other for other in every if other.split()[0] in kinds]
        mine = result["weights"]
        report[name] = {**result, "furthest": {other: furthest(mine, every[other]["weights"]) for other in others},
                        "apart": {other: apart(mine, every[other]["weights"]) for other in others}, "weights": None}
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(report, indent=1))
    shut_down()


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    main(sys.argv[1])
