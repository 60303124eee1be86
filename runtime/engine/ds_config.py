"""The DeepSpeed JSON: check it, and complete it for deepspeed.initialize.

The training script owns batch size, accumulation, clipping, learning rate and precision. The JSON owns ZeRO, offload
and buckets. DeepSpeed ignores unknown keys at the top level, reads "auto" as a default, and accepts some combinations
with which it computes something else. So a key may differ from DeepSpeed's default only if a test trains with it
(tests/engine/zero_worker.py); all other keys are rejected."""

import json
import os
from collections.abc import Mapping

from configurator import did_you_mean
from runtime.engine.fixes import repair
from runtime.errors import UserError
from runtime.files import ROOT
from runtime.untrusted import read_regular

DTYPE_BLOCK = {"bfloat16": "bf16", "float16": "fp16"}
MAX_JSON_BYTES = 1_000_000
STAGE3_DEFAULTS = {"stage3_prefetch_bucket_size": 5e7, "stage3_max_reuse_distance": 1e9,
                   "stage3_param_persistence_threshold": 1e5}


def allowed_keys(dtype):
    """Return what a JSON may hold: {key: rule}. A rule is a block's keys, the choices, an int (the value is a whole
    number of at least this) or a float (the value is a number of at least this, or "auto")."""
    boolean, own = (True, False), DTYPE_BLOCK.get(dtype)
    offload = {"device": ("cpu", "none"), "pin_memory": boolean}
    return {
        "zero_optimization": {
            "stage": (0, 1, 2, 3), "overlap_comm": boolean, "reduce_bucket_size": 1, "allgather_bucket_size": 1,
            "offload_optimizer": offload, "offload_param": offload, "sub_group_size": 1,
            "memory_efficient_linear": boolean, "stage3_prefetch_bucket_size": 0, "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0,
            # DeepSpeed's defaults, which its examples write out
            "contiguous_gradients": (True,), "reduce_scatter": (True,), "allgather_partitions": (True,),
            "round_robin_gradients": (False,)},
        "bf16": {"enabled": boolean},
        "fp16": {"enabled": boolean, "loss_scale": 0, "initial_scale_power": 0, "loss_scale_window": 1, "hysteresis": 1,
                 "min_loss_scale": (1,), "auto_cast": (False,)},
        "data_types": {"grad_accum_dtype": ("fp32",)}, "communication_data_type": (own or "fp32",),
        "zero_force_ds_cpu_optimizer": boolean, "steps_per_print": 1, "wall_clock_breakdown": boolean}


def with_batch(config, batch):
    """Return the config with the sizes of a batch, which has micro, accumulation and world_size."""
    return {**config, "train_micro_batch_size_per_gpu": batch.micro, "gradient_accumulation_steps": batch.accumulation,
            "train_batch_size": batch.micro * batch.accumulation * batch.world_size}


def complete_config(path, batch, grad_clip, dtype, compiled=False, extra=None):
    """Return (config for deepspeed.initialize, notes to print) from a JSON file and the script's settings. batch: as in
    with_batch(). compiled: whether the blocks are. extra: more keys, as in allowed_keys(). Raises UserError."""
    path = path if os.path.exists(path) else os.path.join(ROOT, path)
    config, owned = read_json(path), {**with_batch({}, batch), "gradient_clipping": grad_clip}
    problems = [f'"{key}" is {json.dumps(config[key])}, but the script sets it to {value}: remove it, or write "auto"'
                for key, value in owned.items() if config.get(key, "auto") not in ("auto", value)]
    config.update(owned)
    for name, block in DTYPE_BLOCK.items():
        if isinstance(content := config.setdefault(block, {}), dict):
            enabled = content.get("enabled", "auto")
            if enabled != "auto" and enabled is not (name == dtype):  # 0 equals False
                problems.append(f'"{block}.enabled" is {json.dumps(enabled)}, but dtype={dtype}: write "auto", or '
                                f"train in {name if enabled else 'float32'}")
            content["enabled"] = name == dtype
    allowed = allowed_keys(dtype) | (extra or {}) | {key: (value,) for key, value in owned.items()}
    problems += key_problems(config, allowed)
    zero = config.get("zero_optimization")
    if isinstance(zero, dict) and zero.get("stage") != 3 and uses_offload(config, "param"):
        other = "use stage 3, or " * (3 in allowed["zero_optimization"]["stage"])
        problems.append(f'"zero_optimization.offload_param" has no effect below stage 3: {other}remove it')
    if problems:
        raise UserError("\n".join(f"{path}: {problem}" for problem in problems))
    notes = repair(config, compiled)
    config.setdefault("steps_per_print", 2**31)  # the script prints
    return config, notes


def read_json(path):
    """Return the object in a JSON file. Raise UserError for invalid JSON and duplicate keys."""
    from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys

    try:
        text = read_regular(path, MAX_JSON_BYTES).decode("utf-8-sig")
        config = json.loads(text, object_pairs_hook=dict_raise_error_on_duplicate_keys)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}: choose another file with --deepspeed_config=FILE") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} must contain a JSON object")
    return config


def key_problems(config, allowed, path=""):
    """Return the problems of an object's keys and values. allowed: as in allowed_keys()."""
    problems = []
    for key, value in config.items():
        here, rule = path + key, allowed.get(key)
        if rule is None:
            hint = did_you_mean(key, allowed) or ": remove it" + ", and see docs/memory.md" * (not path)
            problems.append(f'"{here}" is not supported{hint}')
        elif isinstance(rule, dict) and isinstance(value, dict):
            problems += key_problems(value, rule, f"{here}.")
        elif isinstance(rule, dict):
            problems.append(f'"{here}" must be an object')
        elif isinstance(rule, int) and (type(value) not in (int, float) or not rule <= value < 2**63 or value % 1):
            problems.append(f'"{here}" is {json.dumps(value)}: write a whole number of at least {rule}, below 2**63')
        elif isinstance(rule, float) and value != "auto" and not (
                type(value) in (int, float) and rule <= value < float("inf")):
            problems.append(f'"{here}" is {json.dumps(value)}: write a number of at least {rule}, or "auto"')
        elif isinstance(rule, tuple) and json.dumps(value) not in map(json.dumps, rule):  # True and 1.0 equal 1
            problems.append(f'"{here}" is {json.dumps(value)}: write {" or ".join(map(json.dumps, rule))}')
    return problems


def uses_offload(config, what="optimizer"):
    """Return whether the "optimizer" state, or the parameters ("param"), are in host memory."""
    block = config["zero_optimization"].get(f"offload_{what}")
    return isinstance(block, dict) and block.get("device", "none") != "none"


def takes_our_gradients(config: Mapping) -> bool:
    """Return whether our gradients and step replace DeepSpeed's, before there is an engine.

    At stage 3, that needs no offload, and the default prefetching, because ours is another.
    """
    zero = config["zero_optimization"]
    if zero["stage"] == 2:
        return True
    if uses_offload(config) or uses_offload(config, "param"):
        return False
    return all(zero.get(key, value) == value for key, value in STAGE3_DEFAULTS.items())
