"""What the workers share that compare training with ZeRO with plain PyTorch."""

import json
import tempfile

import torch
from deepspeed.utils import safe_get_full_fp32_param

from runtime.engine import ds_config, setup

# With this epsilon, Adam doesn't turn the rounding of elements with nearly no gradient into full steps
ADAM = {"lr": 0.0, "betas": (0.9, 0.95), "eps": 1e-5}
RELEASED = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0,
            "stage3_param_persistence_threshold": 0}


def initialize(model, groups, content, batch, clip, dtype, compiled=False, masked=False, **adam):
    """Return DeepSpeed's engine, made as train_deepspeed.py makes it. content: of the DeepSpeed JSON."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(content, file)
        file.flush()
        config, _ = ds_config.complete_config(file.name, batch, clip, dtype, compiled)
    optimizer = torch.optim.AdamW(groups, fused=True, **adam)
    engine = setup.initialize(model, optimizer, config, masked)
    setup.describe(engine, config, dtype)
    return engine


def set_rates(optimizer, lr):
    """Set the learning rate of all parameter groups, Muon's at its ratio, as train_deepspeed.py does."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_ratio", 1)


def weights(engine):
    """Return the weights that the optimizer steps, in float32, whole, on every rank."""
    return {n: safe_get_full_fp32_param(p).detach().clone() for n, p in engine.module.named_parameters()}
