"""The DeepSpeed JSON: check it, and complete it for deepspeed.initialize.

The training script owns batch size, accumulation, clipping, learning rate and precision. The JSON owns ZeRO, offload
and buckets. DeepSpeed ignores unknown keys at the top level, reads "auto" as a default, and accepts some combinations
with which it computes something else. So a key may differ from DeepSpeed's default only if a test trains with it
(TESTED); all other keys are rejected.
"""

import json
import os
from pathlib import Path
from typing import get_args

from configurator import did_you_mean
from runtime.engine.fixes import repair
from runtime.files import UserError

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
ALLOWED_KEYS = ("zero_optimization", "bf16", "fp16", "data_types", "communication_data_type",
                "zero_force_ds_cpu_optimizer", "steps_per_print", "dump_state", "wall_clock_breakdown", "comms_logger")
# The keys of each block with which a test trains at another value than the default (tests/engine/zero_worker.py)
TESTED = {
    "zero_optimization": (
        "stage", "overlap_comm", "reduce_bucket_size", "allgather_bucket_size", "offload_optimizer", "offload_param",
        "sub_group_size", "memory_efficient_linear", "stage3_prefetch_bucket_size", "stage3_max_live_parameters",
        "stage3_max_reuse_distance", "stage3_param_persistence_threshold"),
    "zero_optimization.offload_optimizer": ("device", "pin_memory"),
    "zero_optimization.offload_param": ("device", "pin_memory"),
    "bf16": ("enabled",),
    "fp16": ("enabled", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis"),
    "data_types": ("grad_accum_dtype",),
    "comms_logger": ("enabled",),
}  # fmt: skip
POSITIVE = ("steps_per_print", "zero_optimization.sub_group_size")
CHOICES = {
    "zero_optimization.stage": (0, 1, 2, 3),
    "zero_optimization.offload_optimizer.device": ("cpu", "none"),
    "zero_optimization.offload_param.device": ("cpu", "none"),
    **dict.fromkeys(("zero_force_ds_cpu_optimizer", "dump_state", "wall_clock_breakdown"), (True, False)),
}
DTYPE_BLOCK = {"bfloat16": "bf16", "float16": "fp16"}
STAGE3_DEFAULTS = {"stage3_prefetch_bucket_size": 5e7, "stage3_max_live_parameters": 1e9,
                   "stage3_max_reuse_distance": 1e9, "stage3_param_persistence_threshold": 1e5}


def find(path):
    """Return the path of a JSON: as given, or else relative to the project's folder."""
    return path if os.path.exists(path) else os.path.join(ROOT, path)


def with_batch(config, batch):
    """Return the config with the sizes of a batch, which has micro, accumulation and world_size."""
    return {**config, "train_micro_batch_size_per_gpu": batch.micro, "gradient_accumulation_steps": batch.accumulation,
            "train_batch_size": batch.micro * batch.accumulation * batch.world_size}


def resolve(path, batch, grad_clip, dtype, compiled=False, config=None):
    """Return (config for deepspeed.initialize, notes to print) from a JSON file and the script's settings. batch: as in
    with_batch(). compiled: whether the blocks are. config: the file's content, if it has been read. Raise UserError
    with all problems."""
    config, owned = config or read_json(path), {**with_batch({}, batch), "gradient_clipping": grad_clip}
    problems = top_level_problems(config, owned, dtype)
    config.update(owned)
    for name, block in DTYPE_BLOCK.items():
        if isinstance(content := config.setdefault(block, {}), dict):
            enabled = content.get("enabled", "auto")
            if enabled not in ("auto", name == dtype):
                problems.append(f'"{block}.enabled" is {json.dumps(enabled)}, but dtype={dtype}: write "auto", or set '
                                f"--dtype={name if enabled else 'float32'}")
            content["enabled"] = name == dtype
    problems += block_problems(config, dtype)
    if problems:
        raise UserError("\n".join(f"{path}: {problem}" for problem in problems))
    notes = repair(config, dtype, compiled)
    config.setdefault("steps_per_print", 2**31)  # the script prints
    return config, notes


def read_json(path):
    """Return the object in a JSON file. Raise UserError for invalid JSON and duplicate keys."""
    from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys

    try:
        text = Path(path).read_text(encoding="utf-8")
        config = json.loads(text, object_pairs_hook=dict_raise_error_on_duplicate_keys)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}: choose another file with --deepspeed_config=FILE") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} must contain a JSON object")
    return config


def top_level_problems(config, owned, dtype):
    """Return the problems of the top-level keys: unsupported, invalid, or different from the script's settings."""
    problems = []
    for key, value in config.items():
        if key in owned:
            if value not in ("auto", owned[key]):
                problems.append(f'"{key}" is {json.dumps(value)}, but the script sets it to {owned[key]}: remove it, '
                                'or write "auto"')
        elif key not in ALLOWED_KEYS:
            hint = did_you_mean(key, [*ALLOWED_KEYS, *owned]) or ": remove it, and see docs/settings.md"
            problems.append(f'"{key}" is not supported{hint}')
        elif key not in TESTED:
            problems += value_problem(key, value, dtype)
        elif not isinstance(value, dict):
            problems.append(f'"{key}" must be an object')
    return problems


def block_problems(config, dtype):
    """Return the problems inside the blocks: keys that are unsupported, of a wrong type, or useless at the stage."""
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError, create_model

    problems = []
    models = {"zero_optimization": DeepSpeedZeroConfig, "bf16": DeepSpeedBF16Config, "fp16": DeepSpeedFP16Config,
              "data_types": create_model("DataTypes", grad_accum_dtype=(str | None, None)),
              "comms_logger": CommsLoggerConfig}
    for block, model in models.items():
        if not isinstance(config.get(block), dict):
            continue
        found, rest = check_keys(model, config[block], block, dtype)
        problems += found
        try:
            model(**rest)
        except ValidationError as error:
            problems += [f'"{".".join(map(str, (block, *e["loc"])))}": {e["msg"].removeprefix("Value error, ")}'
                         for e in error.errors()]
    zero = config.get("zero_optimization")
    for what, lowest in (("param", 3), ("optimizer", 1)) if isinstance(zero, dict) else ():
        if (stage := zero.get("stage", 0)) in range(lowest) and uses_offload(config, what):
            problems.append(f'"zero_optimization.offload_{what}" has no effect at stage {stage}: use stage 3, or '
                            "remove it")
    return problems


def check_keys(model, content, path, dtype):
    """Return the problems of a block's keys, and the block without these keys, which DeepSpeed's pydantic model then
    checks. A key passes if it is in TESTED or has DeepSpeed's default."""
    problems, rest = [], {}
    fields = {field.alias or name: field for name, field in model.model_fields.items()}
    for key, value in content.items():
        here, field, found = f"{path}.{key}", fields.get(key), []
        if field and here in TESTED and isinstance(value, dict):
            inner = next(kind for kind in get_args(field.annotation) if kind is not type(None))
            nested, value = check_keys(inner, value, here, dtype)
            problems += nested
        elif key in TESTED[path]:
            found = value_problem(here, value, dtype, field)
        elif field is None or value != field.get_default(call_default_factory=True):
            hint = did_you_mean(key, TESTED[path]) if field is None else ""
            found = [f'"{here}" is not supported{hint or ": remove it"}']
        problems += found
        if not found:
            rest[key] = value
    return problems, rest


def value_problem(path, value, dtype, field=None):
    """Return [a problem] if the value is "auto", not one of the choices, or a number or bool of another type, which
    DeepSpeed would convert; else []. field: that of DeepSpeed's pydantic model, if there is one."""
    valid, choices = field is not None and value is None, CHOICES.get(path)
    if path in ("communication_data_type", "data_types.grad_accum_dtype"):
        choices = tuple(dict.fromkeys(("fp32", DTYPE_BLOCK.get(dtype, "fp32"))))
    if choices:
        valid, expected = json.dumps(value) in map(json.dumps, choices), " or ".join(map(json.dumps, choices))
    elif path in TESTED:
        expected = '{"device": "cpu"}'
    elif path in POSITIVE:
        valid = valid or (type(value) in (int, float) and value >= 1 and value % 1 == 0)
        expected = "a whole number above 0"
    else:
        is_bool = bool in (field.annotation, *get_args(field.annotation))
        valid = valid or (not isinstance(value, str) and isinstance(value, bool) == is_bool)
        expected = f"{'true or false' if is_bool else 'a number'}, without quotation marks"
    return [] if valid else [f'"{path}" is {json.dumps(value)}: write {expected}']


def logs_messages(config):
    """Return whether DeepSpeed logs communication, for a table at the end."""
    return config.get("comms_logger", {}).get("enabled", False)


def has_per_step_timers(config):
    """Return whether DeepSpeed times every micro-step, for which it synchronizes with the GPU."""
    return config.get("wall_clock_breakdown", False) or logs_messages(config)


def uses_offload(config, what="optimizer"):
    """Return whether the "optimizer" state, or the parameters ("param"), are in host memory."""
    block = config["zero_optimization"].get(f"offload_{what}")
    return isinstance(block, dict) and block.get("device", "none") != "none"


def supports_fast_gradients(config, dtype):
    """Return whether zero2_gradients.py or zero3_blocks.py will replace DeepSpeed's gradient path, before there is an
    engine. At stage 3 that needs the default prefetching, because ours is another."""
    zero, own = config["zero_optimization"], DTYPE_BLOCK.get(dtype, "fp32")
    return (zero["stage"] >= 2 and not uses_offload(config) and not uses_offload(config, "param")
            and config.get("data_types", {}).get("grad_accum_dtype") == "fp32"
            and (config.get("communication_data_type") or own).lower() == own
            and (zero["stage"] == 2 or all(zero.get(key, value) == value for key, value in STAGE3_DEFAULTS.items())))
