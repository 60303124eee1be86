"""The DeepSpeed JSON: check it, and complete it for deepspeed.initialize.

The training script owns batch size, accumulation, clipping, learning rate and precision. The JSON
owns ZeRO, offload and buckets. DeepSpeed ignores unknown keys at the top level, reads "auto" as a
default, and accepts some combinations with which it computes something else. So a key may differ
from DeepSpeed's default only if a test trains with it (tests/engine/zero_worker.py); all other keys
are rejected.
"""

import json
import os
from collections.abc import Mapping
from typing import Any

from configurator import did_you_mean
from runtime.engine.fixes import repair
from runtime.errors import UserError
from runtime.files import ROOT
from runtime.untrusted import read_regular

DTYPE_BLOCK = {"bfloat16": "bf16", "float16": "fp16"}
MAX_JSON_BYTES = 1_000_000
STAGE3_DEFAULTS = {
    "stage3_prefetch_bucket_size": 5e7,
    "stage3_max_reuse_distance": 1e9,
    "stage3_param_persistence_threshold": 1e5,
}
BOOLEAN = (True, False)


def allowed_keys(dtype: str) -> dict[str, Any]:
    """Return what a JSON may hold: {key: rule}.

    A rule is a block's keys, the choices, an int (the value is a whole number of at least this), a
    float (the value is a number of at least this, or "auto") or ... (any value).
    """
    offload = {"device": ("cpu", "none"), "pin_memory": BOOLEAN}
    return {
        "zero_optimization": {
            "stage": (0, 1, 2, 3),
            "overlap_comm": BOOLEAN,
            "reduce_bucket_size": 1,
            "allgather_bucket_size": 1,
            "offload_optimizer": offload,
            "offload_param": offload,
            "sub_group_size": 1,
            "memory_efficient_linear": BOOLEAN,
            "stage3_prefetch_bucket_size": 0,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_param_persistence_threshold": 0,
            # DeepSpeed's defaults, which its examples write out
            "contiguous_gradients": (True,),
            "reduce_scatter": (True,),
            "allgather_partitions": (True,),
            "round_robin_gradients": (False,),
        },
        "bf16": {"enabled": BOOLEAN},
        "fp16": {
            "enabled": BOOLEAN,
            "loss_scale": 0,
            "initial_scale_power": 0,
            "loss_scale_window": 1,
            "hysteresis": 1,
            "min_loss_scale": (1,),
            "auto_cast": (False,),
        },
        "data_types": {"grad_accum_dtype": ("fp32",)},
        "communication_data_type": (DTYPE_BLOCK.get(dtype, "fp32"),),
        "zero_force_ds_cpu_optimizer": BOOLEAN,
        "steps_per_print": 1,
        "wall_clock_breakdown": BOOLEAN,
    }


def with_batch(config: Mapping, batch: Any) -> dict[str, Any]:
    """Return the config with the sizes of a batch, which has micro, accumulation and world_size."""
    return {
        **config,
        "train_micro_batch_size_per_gpu": batch.micro,
        "gradient_accumulation_steps": batch.accumulation,
        "train_batch_size": batch.micro * batch.accumulation * batch.world_size,
    }


def complete_config(
    path: str,
    batch: Any,
    grad_clip: float,
    dtype: str,
    compiled: bool = False,
    extra: Mapping | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """Return (config for deepspeed.initialize, notes to print) from a JSON file and the script's
    settings.

    batch: as in with_batch(). compiled: whether the blocks are. extra: more keys, as in
    allowed_keys(). Raises UserError.
    """
    if not os.path.exists(path):
        path = os.path.join(ROOT, path)
    config = read_json(path)

    # What the script owns
    owned = {**with_batch({}, batch), "gradient_clipping": grad_clip}
    problems = []
    for key, value in owned.items():
        if config.get(key, "auto") not in ("auto", value):
            problems.append(
                f'"{key}" is {json.dumps(config[key])}, but the script sets it to {value}: remove '
                'it, or write "auto"'
            )
    config.update(owned)
    problems += set_precision(config, dtype)

    # What the JSON owns
    allowed = allowed_keys(dtype)
    allowed.update(extra or {})
    allowed.update({key: (value,) for key, value in owned.items()})
    problems += key_problems(config, allowed)
    zero = config.get("zero_optimization")
    if isinstance(zero, dict) and zero.get("stage") != 3 and uses_offload(config, "param"):
        fix = "remove it"
        if 3 in allowed["zero_optimization"]["stage"]:
            fix = "use stage 3, or remove it"
        problems.append(f'"zero_optimization.offload_param" has no effect below stage 3: {fix}')

    # All problems at once, so that one edit is enough
    if problems:
        raise UserError("\n".join(f"{path}: {problem}" for problem in problems))
    notes = repair(config, compiled)
    config.setdefault("steps_per_print", 2**31)  # the script prints
    return config, notes


def set_precision(config: dict[str, Any], dtype: str) -> list[str]:
    """Enable the block of a config that a dtype needs, and disable the other one. Return the
    problems."""
    problems = []
    for name, block in DTYPE_BLOCK.items():
        content = config.setdefault(block, {})
        if not isinstance(content, dict):
            continue  # key_problems() finds it
        is_wanted = name == dtype
        enabled = content.get("enabled", "auto")
        if enabled != "auto" and enabled is not is_wanted:  # 0 equals False
            other = name if enabled else "float32"
            problems.append(
                f'"{block}.enabled" is {json.dumps(enabled)}, but dtype={dtype}: write "auto", or '
                f"train in {other}"
            )
        content["enabled"] = is_wanted
    return problems


def read_json(path: str) -> dict[str, Any]:
    """Return the object in a JSON file. Raises UserError for invalid JSON and duplicate keys."""
    # A byte order mark does no harm
    try:
        text = read_regular(path, MAX_JSON_BYTES).decode("utf-8-sig")
        config = json.loads(text, object_pairs_hook=without_duplicates)
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror}: choose another file with --deepspeed_config=FILE"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} must contain a JSON object")
    return config


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these keys and values. Raises ValueError if a key comes twice."""
    # Python's json would keep the last one
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = sorted(key for key in content if keys.count(key) > 1)
        raise ValueError(f"these keys come twice: {', '.join(twice)}")
    return content


def key_problems(config: Mapping, allowed: Mapping, path: str = "") -> list[str]:
    """Return the problems of an object's keys and values. allowed: as in allowed_keys()."""
    problems = []
    for key, value in config.items():
        here = path + key
        rule = allowed.get(key)
        if rule is None:
            # A key that is unknown, or that no test trains with
            hint = did_you_mean(key, allowed)
            if not hint:
                hint = ": remove it"
                if not path:
                    hint += ", and see docs/memory.md"
            problems.append(f'"{here}" is not supported{hint}')
        elif isinstance(rule, dict) and isinstance(value, dict):
            problems += key_problems(value, rule, f"{here}.")
        elif isinstance(rule, dict):
            problems.append(f'"{here}" must be an object')
        elif not keeps_rule(value, rule):
            problems.append(f'"{here}" is {json.dumps(value)}: write {what_to_write(rule)}')
    return problems


def keeps_rule(value: object, rule: Any) -> bool:
    """Return whether a value keeps a rule of allowed_keys() that is no block."""
    if rule is ...:
        return True
    if isinstance(rule, tuple):
        return json.dumps(value) in map(json.dumps, rule)  # True and 1.0 equal 1
    if isinstance(rule, float) and value == "auto":
        return True
    if type(value) not in (int, float):
        return False
    if isinstance(rule, int):
        return rule <= value < 2**63 and value % 1 == 0
    return rule <= value < float("inf")


def what_to_write(rule: tuple | int | float) -> str:
    """Return which values keep a rule, as text."""
    if isinstance(rule, tuple):
        return " or ".join(map(json.dumps, rule))
    if isinstance(rule, int):
        return f"a whole number of at least {rule}, below 2**63"
    return f'a number of at least {rule}, or "auto"'


def uses_offload(config: Mapping, what: str = "optimizer") -> bool:
    """Return whether the "optimizer" state, or the parameters ("param"), are in host memory."""
    block = config["zero_optimization"].get(f"offload_{what}")
    return isinstance(block, dict) and block.get("device", "none") != "none"


def takes_our_gradients(config: Mapping) -> bool:
    """Return whether our gradients and step replace DeepSpeed's, before there is an engine.

    At stage 3, that needs no offload, and the default prefetching, because ours is another.
    """
    # Stage 2 is ours with and without offload
    zero = config["zero_optimization"]
    if zero["stage"] == 2:
        return True
    if uses_offload(config) or uses_offload(config, "param"):
        return False
    return all(zero.get(key, value) == value for key, value in STAGE3_DEFAULTS.items())
