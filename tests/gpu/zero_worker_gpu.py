"""One rank of test_gpu_zero.py: python launch_deepspeed.py --nproc_per_node=N zero_worker_gpu.py OUT.json

Trains a small GPT in every case of the table, each in an engine built as train_deepspeed.py builds it, and in plain
PyTorch over the same sequences. Rank 0 writes for each case the norms, the steps applied, the loss scales, which of our
paths it took, and how far its weights are from those of the other cases."""

import contextlib
import json
import math
import os
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[n]) for n in (2, 1)]

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from muon_reference import PlainMuon, by_singular_values
from zero_training import ADAM, initialize, paths, set_rates, weights
from zero_ways import RELEASED

from model import GPT, Block, GPTConfig
from runtime.cluster.join import join_process_group
from runtime.cluster.ranks import all_reduce_sum, shut_down
from runtime.data.loader import BatchSizes
from runtime.engine import offload
from runtime.engine.engine import Engine
from runtime.engine.muon import split_matrices
from runtime.kernels import fused as fused_blocks

SEQUENCES, ACCUMULATION, STEPS = 12, 3, 6  # per step over all ranks; micro-steps per step
CONFIG = GPTConfig(block_size=64, vocab_size=500, n_layer=2, n_head=4, n_embd=256)
RATES = (3e-3, 2e-3, 1e-3, 3e-3, 2e-3, 1e-3)  # set anew each step, as the script does
CLIP = 0.3  # norms are 0.6 to 1.9
BUCKETS = {"reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000}  # c_attn has 196,608 elements
# At a scale of 2^24 gradients overflow; from there it falls, and doubles after every second good step
FP16 = {"clip": 0.0, "fp16": {"initial_scale_power": 24, "loss_scale_window": 2, "hysteresis": 1}}
# ZeRO-3 has fewer buffers than blocks: two, and three
DEEP = {"layers": 5, "zero": {"stage3_max_live_parameters": 0}}
DEEP_3 = {"layers": 5, "zero": {"stage3_max_live_parameters": 3 * 12 * 256**2}}
MUON = {"layers": 5, "muon": 10.0}  # Muon's learning rate as a multiple of AdamW's
OFFLOAD = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
LINEAR = F.linear
offload.PIECE = 100_000  # elements: more than ten pieces

# name: (stage, dtype, options of train)
CASES = {
    **{f"float32 stage {stage}": (stage, "float32", {"blocks": "eager"}) for stage in (2, 3)},
    "float32 stage 2 kernels": (2, "float32", {}),
    "float32 stage 3 kernels": (3, "float32", {}),
    "float32 stage 3 released": (3, "float32", {"zero": RELEASED}),
    "bfloat16 stage 2": (2, "bfloat16", {}),
    "bfloat16 stage 2 local": (2, "bfloat16", {"local": True}),
    "bfloat16 stage 2 buckets": (2, "bfloat16", {"zero": BUCKETS}),
    "bfloat16 stage 2 uncaptured": (2, "bfloat16", {"captured": False}),
    "bfloat16 stage 2 offload": (2, "bfloat16", {"zero": OFFLOAD}),
    "bfloat16 stage 2 compiled": (2, "bfloat16", {"blocks": "compiled"}),
    "bfloat16 stage 2 own": (2, "bfloat16", {"own": True}),
    "bfloat16 stage 3": (3, "bfloat16", {}),
    "bfloat16 stage 3 local": (3, "bfloat16", {"local": True}),
    "bfloat16 stage 3 uncaptured": (3, "bfloat16", {"captured": False}),
    "bfloat16 stage 3 recomputed": (3, "bfloat16", {"recompute": True}),
    "bfloat16 stage 3 compiled": (3, "bfloat16", {"blocks": "compiled"}),
    "bfloat16 stage 3 released": (3, "bfloat16", {"zero": RELEASED}),
    "bfloat16 stage 3 own": (3, "bfloat16", {"own": True}),
    "deep stage 3": (3, "bfloat16", DEEP),
    "deep stage 3 local": (3, "bfloat16", {**DEEP_3, "local": True}),
    "deep stage 3 recomputed": (3, "bfloat16", {**DEEP_3, "recompute": True}),
    "deep stage 2 muon": (2, "bfloat16", MUON),
    "deep stage 2 muon local": (2, "bfloat16", {**MUON, "local": True}),
    **{f"float16 stage {stage}": (stage, "float16", FP16) for stage in (2, 3)},
    "float16 stage 2 offload": (2, "float16", {**FP16, "zero": OFFLOAD})}


def fresh_model(layers=2):
    torch.manual_seed(0)
    return GPT(replace(CONFIG, n_layer=layers)).cuda()


def data(step):
    """Return the sequences of a step, (SEQUENCES, T + 1)."""
    shape = (SEQUENCES, CONFIG.block_size + 1)
    return torch.randint(CONFIG.vocab_size, shape, generator=torch.Generator().manual_seed(step)).cuda()


def plain(clip, layers=2, muon=0.0):
    """Train in float32 with PyTorch alone, over the whole batch."""
    model, norms = fresh_model(layers), []
    optimizer = PlainMuon(model, 0.1, muon, **ADAM) if muon else torch.optim.AdamW(model.parameter_groups(0.1), **ADAM)
    for step in range(STEPS):
        set_rates(optimizer, RATES[step])
        model.zero_grad()
        logits = model(data(step)[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), data(step)[:, 1:].flatten()).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf")).item())
        optimizer.step()
    return {"norms": norms, "layers": layers, "weights": {n: p.detach() for n, p in model.named_parameters()}}


def build(stage, dtype, blocks, zero, clip, fp16, layers, muon):
    batch = BatchSizes(SEQUENCES // ACCUMULATION // dist.get_world_size(), ACCUMULATION, dist.get_world_size(), 4)
    zero = {"stage": stage, "reduce_bucket_size": 10**7, **zero}  # 0.04 GB instead of 2, in the memory that tests share
    content = {"zero_optimization": zero, "fp16": fp16, "zero_force_ds_cpu_optimizer": False}
    F.linear = LINEAR  # stage 3 replaces it for good
    model = fresh_model(layers)
    fused = None
    if blocks == "kernels":
        fused = fused_blocks.use_fused_blocks(model, copies=dtype == "bfloat16" and stage < 3)
    elif blocks == "compiled":
        model.compile_blocks()
    if stage == 3:
        deepspeed.utils.set_z3_leaf_modules(model, [Block])
    groups = model.parameter_groups(0.1)
    if muon:  # sorted as for one rank, so that two cut a matrix
        groups = split_matrices(groups, model, muon, world_size=1)
    return initialize(model, groups, content, batch, clip, dtype, blocks != "eager", fused=fused, **ADAM), fused


def train(stage, dtype, blocks="kernels", zero=None, clip=CLIP, fp16=None, local=False, own=False, captured=True,
          recompute=False, layers=2, muon=0.0):
    """Train as the script does, and repeat a step that is skipped. own: use DeepSpeed's gradient path and step. local:
    sum the gradients of the micro-steps on each rank first."""
    deepspeeds, fused = build(stage, dtype, blocks, zero or {}, clip, fp16 or {}, layers, muon)
    deepspeeds.module.gradient_checkpointing = recompute
    chosen = paths(deepspeeds, deepspeeds.module, local, kernels=blocks != "eager", graph=captured, own=own)
    engine = Engine(deepspeeds, chosen, fused)
    engine.check_values = lambda: torch.tensor(False)  # what is compared here is not to end in a UserError
    shortened = engine.our_step is not None
    one_pass = shortened and engine.our_step.use_kernel
    rank, world_size = dist.get_rank(), dist.get_world_size()
    result = {"norms": [], "layers": layers, "applied": [], "scales": [], "shortened": shortened, "one_pass": one_pass}
    step = 0
    while step < STEPS and len(result["applied"]) < 3 * STEPS:
        set_rates(deepspeeds.optimizer, RATES[step])
        for sequences in data(step).view(world_size, ACCUMULATION, -1, CONFIG.block_size + 1)[rank]:
            engine.micro_step(sequences[:, :-1], sequences[:, 1:])
        done = engine.step()
        norm, applied = done.grad_norm, all_reduce_sum(done.applied)[0]
        assert applied in (0, world_size), f"{applied} of {world_size} ranks made the step"
        result["norms"] += [None if norm is None else float(norm)] if applied else []
        result["applied"].append(bool(applied))
        if dtype == "float16":
            result["scales"].append(done.loss_scale)
        step += bool(applied)
    result["released"] = sum(getattr(p, "ds_status", None) == ZeroParamStatus.NOT_AVAILABLE
                             for p in deepspeeds.module.parameters())
    result |= {"captured": int(engine.forward_backward.graph is not None), "weights": weights(deepspeeds)}
    engine.forward_backward.close()
    deepspeeds.destroy()
    return result


def apart(a, b, layers):
    """Return the distance between two sets of weights, relative to how far training has moved b: over all weights, and
    of the parameter for which it is the largest."""
    moved = {name: (b[name] - p).square().sum() for name, p in fresh_model(layers).named_parameters()}
    gaps = {name: (a[name] - b[name]).square().sum() for name in b}
    return [math.sqrt(sum(gaps.values()) / sum(moved.values())), max(math.sqrt(gaps[n] / moved[n]) for n in gaps)]


def main(out):
    torch.optim._muon._zeropower_via_newtonschulz = by_singular_values  # in float64, PyTorch's is in bfloat16
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)  # names that DeepSpeed still uses
    deepspeed.utils.logger.setLevel("ERROR")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    join_process_group()
    deepspeed.init_distributed(verbose=False)
    every = {"plain": plain(CLIP), "plain unclipped": plain(0.0), "deep plain": plain(CLIP, DEEP["layers"]),
             "deep muon": plain(CLIP, **MUON)}
    for name, (stage, dtype, options) in CASES.items():
        print(time.strftime("%H:%M:%S"), name, flush=True)  # a launch that takes too long shows where it was
        fast = stage == 2 or stage == 3 and not options.get("own") and options.get("zero") is not RELEASED
        stream = torch.cuda.stream(torch.cuda.Stream()) if fast else contextlib.nullcontext()
        with stream:  # as setup_device()
            every[name] = train(stage, dtype, **options)
        torch.cuda.synchronize()
    report = {name: {**one, "weights": None, "apart": {
        name: apart(one["weights"], other["weights"], one["layers"])
        for name, other in every.items() if other["layers"] == one["layers"]}} for name, one in every.items()}
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(report, indent=1))
    shut_down()


if __name__ == "__main__":
    main(sys.argv[1])
