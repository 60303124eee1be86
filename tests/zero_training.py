"""What the workers share that compare training with ZeRO with plain PyTorch."""

import json
import tempfile

import torch
from deepspeed.utils import safe_get_full_fp32_param

from runtime.engine import ds_config, setup
from runtime.engine.ds_config import takes_our_gradients
from runtime.engine.fast_paths import Choice, FastPaths
from runtime.engine.zero3_blocks import blocks_to_gather

# With this epsilon, Adam doesn't turn the rounding of elements with nearly no gradient into full steps
ADAM = {"lr": 0.0, "betas": (0.9, 0.95), "eps": 1e-5}


def initialize(model, groups, content, batch, clip, dtype, compiled=False, masked=False, fused=None, **adam):
    """Return DeepSpeed's engine, made as train_deepspeed.py makes it. content: of the DeepSpeed JSON."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(content, file)
        file.flush()
        config, _ = ds_config.complete_config(file.name, batch, clip, dtype, compiled)
    optimizer = torch.optim.AdamW(groups, fused=True, **adam)
    engine = setup.initialize(model, optimizer, config, masked, scales_loss=fused is not None)
    setup.describe(engine, config, dtype)
    return engine


def paths(engine, model, local=False, kernels=False, graph=False, own=False):
    """Return the FastPaths of a test. own: DeepSpeed's gradients and step."""
    ours = takes_our_gradients(engine.config) and not own
    return FastPaths(gradients=Choice(ours), by_block=Choice(not blocks_to_gather(model)[1]), local=Choice(local),
                     kernels=Choice(kernels), step=Choice(ours and kernels and engine.bfloat16_enabled()),
                     graph=Choice(graph and ours and kernels and engine.bfloat16_enabled()))


def set_rates(optimizer, lr):
    """Set the learning rate of all parameter groups, Muon's at its ratio, as train_deepspeed.py does."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_ratio", 1)


def weights(engine):
    """Return the weights that the optimizer steps, in float32, whole, on every rank; frozen ones as they are."""
    whole = {}
    for name, param in engine.module.named_parameters():
        weight = safe_get_full_fp32_param(param) if param.requires_grad else param
        whole[name] = weight.detach().clone()
    return whole
