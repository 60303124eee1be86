"""Workarounds for bugs in DeepSpeed 0.19.8, and the check that it is this version.

tests/engine/test_zero.py tests them."""

import importlib.metadata
import os
import re

DEEPSPEED = "0.19.8"  # as in requirements.txt


def unusable_deepspeed() -> str | None:
    """Return a message if another DeepSpeed is installed, or if it can't be imported because of
    DEEPSPEED_TIMEOUT.

    With DeepSpeed 0.17.6, a bfloat16 run at stage 1 exited with code 0 and a gradient norm 65,536
    times too large.
    """
    if not re.fullmatch(r"[1-9]\d{0,4}", os.environ.get("DEEPSPEED_TIMEOUT", "10")):
        return (
            "DEEPSPEED_TIMEOUT in the environment must be 1 to 99999 minutes: export "
            "DEEPSPEED_TIMEOUT=10"
        )
    version = importlib.metadata.version("deepspeed")
    if version.partition("+")[0] != DEEPSPEED:
        return (
            f"DeepSpeed {version} is installed, but only {DEEPSPEED} is tested: run python -m pip "
            f"install deepspeed=={DEEPSPEED}"
        )
    return None


def repair(config: dict, compiled: bool) -> list[str]:
    """Change the config in place where DeepSpeed would compute something wrong or slow. Return a
    note for each change.

    At stage 0, DeepSpeed accumulates in bfloat16 and doesn't scale the loss in float16. Stages 0
    and 1 run as stage 2. With accumulate_locally, each rank then holds all gradients and a part of
    the optimizer's state, as in ZeRO-1.
    """
    notes = []
    zero = config.setdefault("zero_optimization", {})
    stage = zero.setdefault("stage", 0)
    if stage < 2:
        notes.append(f"ZeRO stage {stage} runs as stage 2, which is faster")
        stage = 2
        zero["stage"] = stage
    config.setdefault("data_types", {}).setdefault("grad_accum_dtype", "fp32")
    if stage == 3 and compiled:
        # When PyTorch 2.11 traces DeepSpeed's F.linear, each block gets its own graph, up to
        # dynamo's limit of 8, and the gradients of those blocks are zero: GPT-2 XL's norm was 71
        # instead of 97
        zero["memory_efficient_linear"] = False
    return notes
