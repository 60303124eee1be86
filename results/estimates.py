"""Estimate the memory of GPT-2 without its weights, for results/draw.py, results/table.py and tests/test_results.py."""

import functools
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch

from model import GPT, GPTConfig
from runtime.data.loader import BatchSizes
from runtime.engine.ds_config import complete_config
from runtime.engine.fast_paths import inspect_model
from runtime.hardware import Execution
from runtime.lora import TARGET_MODULES
from runtime.lora import apply as apply_lora
from runtime.plan.memory import MemoryInputs, ParamCount, estimate

SMALL = {"n_layer": 12, "n_head": 12, "n_embd": 768}
XL = {"n_layer": 48, "n_head": 25, "n_embd": 1600}


@functools.cache
def meta_model(lora_rank=0, **shape):
    """Return a GPT without memory for its weights."""
    with torch.device("meta"):
        model = GPT(GPTConfig(**shape))
    if lora_rank:
        apply_lora(model, {"rank": lora_rank, "alpha": 1.0, "dropout": 0.0, "target_modules": TARGET_MODULES})
    return model


def planned_parts(model, preset, micro, recomputed, gpus=1, accumulate_locally=False, fp8=False, pretrained=True,
                  zero3_by_block=True, muon=False):
    """Return {part: estimated GB per GPU} in bfloat16, with 32 sequences of 1,024 tokens per GPU and step."""
    batch = BatchSizes(micro, max(1, 32 // micro), gpus, 1024)
    config, _ = complete_config(ROOT / preset, batch, 1.0, "bfloat16", True)
    if config["zero_optimization"]["stage"] == 3 and not zero3_by_block:
        config["zero_optimization"]["stage3_prefetch_bucket_size"] = 0
    c, (stored, trainable) = model.config, (sum(p.numel() for p in model.parameters() if p.requires_grad or every)
                                            for every in (True, False))
    matrices = [param for block in model.muon_matrices() for param, _ in block] if muon else []
    block = sum(p.numel() for p in model.transformer.h[0].parameters() if p.dim() > 1)
    params = ParamCount(stored, stored, trainable, muon=sum(param.numel() for param in matrices), block=block)
    run = MemoryInputs(
        model=c,
        execution=Execution("cuda", "bfloat16", True, 0),
        batch=batch,
        params=params,
        ds_config=config,
        gradient_checkpointing=recomputed,
        accumulate_locally=accumulate_locally,
        fp8=fp8,
        pretrained=pretrained,
        facts=inspect_model(model),
    )
    parts = estimate(run)
    return {part: size / 1e9 for part, size in parts.items()}


def planned_gb(*args, **options):
    """Return the estimated peak GB per GPU without CUDA's own, as PyTorch measures it."""
    parts = planned_parts(*args, **options)
    return sum(parts.values()) - parts["CUDA and NCCL"]
