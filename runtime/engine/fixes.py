"""Workarounds for bugs in DeepSpeed 0.19.8, one function each. tests/engine/test_zero.py tests them."""

import importlib.metadata
import os
import re

import torch

DEEPSPEED = "0.19.8"  # as in requirements.txt
NEVER_GROW = 2**20  # times loss_scale_window, so that DeepSpeed itself never increases the loss scale


def unusable_deepspeed():
    """Return a message if another DeepSpeed is installed, or if it can't be imported because of DEEPSPEED_TIMEOUT. With
    DeepSpeed 0.17.6, a bfloat16 run at stage 1 exited with code 0 and a gradient norm 65,536 times too large."""
    if not re.fullmatch(r"[1-9]\d{0,4}", os.environ.get("DEEPSPEED_TIMEOUT", "10")):
        return "DEEPSPEED_TIMEOUT in the environment must be 1 to 99999 minutes: export DEEPSPEED_TIMEOUT=10"
    version = importlib.metadata.version("deepspeed")
    if version.partition("+")[0] != DEEPSPEED:
        return (f"DeepSpeed {version} is installed, but only {DEEPSPEED} is tested: run python -m pip install "
                f"deepspeed=={DEEPSPEED}")


def repair(config, dtype, compiled):
    """Change the config in place where DeepSpeed would compute something wrong. Return a note for each change."""
    notes = []
    zero = config.setdefault("zero_optimization", {"stage": 0})
    stage = zero.setdefault("stage", 0)
    if stage == 0 and dtype != "float32":
        why = "doesn't scale the loss in float16" if dtype == "float16" else "accumulates gradients in bfloat16"
        notes.append(f"stage 0 runs as stage 1, because DeepSpeed's stage 0 {why}")
        stage = zero["stage"] = 1
    if dtype == "float16" and not config["fp16"].get("loss_scale"):
        # DeepSpeed divides by the scale of the next step, which halves the gradient whenever the scale grows. At stages
        # 1 and 2 only the norm that it reports is right
        config["fp16"]["loss_scale_window"] = config["fp16"].get("loss_scale_window", 1000) * NEVER_GROW
        notes.append("the script increases the loss scale, because DeepSpeed halves the gradient when it does")
    if stage > 0:
        config.setdefault("data_types", {}).setdefault("grad_accum_dtype", "fp32")
    if stage == 3 and compiled:
        # When PyTorch 2.11 traces DeepSpeed's F.linear, each block gets its own graph, up to dynamo's limit of 8, and
        # the gradients of those blocks are zero: GPT-2 XL's norm was 71 instead of 97
        zero["memory_efficient_linear"] = False
    return notes


def grow_loss_scale(engine):
    """float16: double the loss scale after every window of good steps. Between two steps this is safe (see repair)."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    window = getattr(scaler, "scale_window", 0) // NEVER_GROW
    good_steps = scaler.cur_iter - 1 - scaler.last_overflow_iter if window else 0
    if good_steps > 0 and good_steps % window == 0:
        scaler.cur_scale *= scaler.scale_factor
        scaler.cur_hysteresis = scaler.delayed_shift


def skip_nonfinite_at_stage_0(engine):
    """Skip steps with a non-finite gradient at stage 0 (float32) too, where DeepSpeed doesn't check."""
    def drop_nonfinite(optimizer, *_):
        params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        optimizer.overflow = not torch.nn.utils.get_total_norm([p.grad for p in params]).isfinite()  # DeepSpeed's flag
        for p in params if optimizer.overflow else ():
            p.grad = None

    if engine.zero_optimization_stage() == 0:
        engine.optimizer.register_step_pre_hook(drop_nonfinite)


def keep_going_at_min_loss_scale(engine):
    """float16: skip the step at the minimum loss scale too, instead of letting DeepSpeed raise."""
    if hasattr(getattr(engine.optimizer, "loss_scaler", None), "raise_error_at_min_scale"):
        engine.optimizer.loss_scaler.raise_error_at_min_scale = False


def record_zero_stage(engine):
    """bfloat16 at stage 1: add the ZeRO stage, which DeepSpeed's BF16_Optimizer doesn't save and zero_to_fp32 needs."""
    if type(engine.optimizer).__name__ == "BF16_Optimizer":
        state_dict = engine.optimizer.state_dict
        engine.optimizer.state_dict = lambda: {**state_dict(), "zero_stage": 1}
