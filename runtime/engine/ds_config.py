"""The DeepSpeed JSON: what it may say, and what the engine is handed.

The training script owns batch, accumulation, clipping, learning rate and precision; the JSON owns ZeRO, offload and
buckets. DeepSpeed itself ignores unknown keys at the top, takes "auto" for a default, and accepts several combinations
that then compute something wrong; all of them are refused here. A key may change what DeepSpeed does only if a test
trains with it (TESTED); all others must have DeepSpeed's own default.
"""

import json
import os
from collections import Counter
from pathlib import Path
from typing import get_args

from configurator import did_you_mean
from runtime.engine.fixes import repair
from runtime.files import UserError

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
ALLOWED_KEYS = ("zero_optimization", "bf16", "fp16", "data_types", "communication_data_type",
                "zero_force_ds_cpu_optimizer", "steps_per_print", "dump_state", "wall_clock_breakdown", "comms_logger")
# The keys of each block that a test trains with in a value that is not the default (tests/zero_worker.py)
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
WHY = {  # other keys are refused as untested
    "zero_optimization.compute_grad_norm": "turns off the gradient norm, which the script needs",
    "zero_optimization.leaf_module": "is set by the script, which makes each block a leaf module",
    "zero_optimization.round_robin_gradients": "makes DeepSpeed record wrong positions of weights, and resuming with "
                                               "another number of ranks needs them",
    **dict.fromkeys(("zero_optimization.stage3_gather_16bit_weights_on_model_save",
                     "zero_optimization.stage3_gather_fp16_weights_on_model_save"),
                    "is not needed, because export_hf.py reads the checkpoints of ZeRO-3"),
    "bf16.check_grad_overflow": "makes ZeRO-1 and ZeRO-2 apply a gradient with NaN",
}
POSITIVE = ("steps_per_print", "zero_optimization.sub_group_size")
CHOICES = {
    "zero_optimization.stage": (0, 1, 2, 3),
    "zero_optimization.offload_optimizer.device": ("cpu", "none"),
    "zero_optimization.offload_param.device": ("cpu", "none"),
    **dict.fromkeys(("zero_force_ds_cpu_optimizer", "dump_state", "wall_clock_breakdown"), (True, False)),
}
USE_INSTEAD = {
    "optimizer": "the script owns it: set learning_rate, weight_decay, beta1 and beta2 there",
    "scheduler": "the script owns it: set lr_schedule, warmup_iters, lr_decay_iters and min_lr there",
    "activation_checkpointing": "DeepSpeed does nothing with it: set --gradient_checkpointing=True",
    "tensorboard": "DeepSpeed would log no loss: set --tensorboard_log=True",
    "wandb": "DeepSpeed would log no loss: set --wandb_log=True",
    "csv_monitor": "DeepSpeed would log no loss: remove it, and read history.jsonl in out_dir",
    "flops_profiler": "DeepSpeed cannot see into blocks that are compiled: set --profile=True",
    "memory_breakdown": "the script prints the peak of memory at each step: remove it",
    "prescale_gradients": "ZeRO refuses it: remove it",
    "gradient_predivide_factor": "ZeRO refuses it: remove it",
    "zero_allow_untested_optimizer": "the optimizer is AdamW, which ZeRO knows: remove it",
    "aio": "it is for NVMe, which is untested here: remove it, and offload to the CPU",
    "checkpoint": "the script owns checkpoints, and DeepSpeed's writers leave files that it cannot read: remove it",
}
DTYPE_BLOCK = {"bfloat16": "bf16", "float16": "fp16"}


def find(path):
    """Return the path of a JSON: as it is named, or else below the project's folder."""
    return path if os.path.exists(path) else os.path.join(ROOT, path)


def with_batch(config, batch):
    """Return the config with the sizes of a batch: anything with micro, accumulation and world_size."""
    return {**config, "train_micro_batch_size_per_gpu": batch.micro, "gradient_accumulation_steps": batch.accumulation,
            "train_batch_size": batch.micro * batch.accumulation * batch.world_size}


def resolve(path, batch, grad_clip, dtype, compiled=False):
    """Return (config for deepspeed.initialize, notes to print) from a JSON file and what the script owns.

    batch: as in with_batch(). compiled: whether the blocks are. Raises UserError with all problems.
    """
    config, owned = read_json(path), {**with_batch({}, batch), "gradient_clipping": grad_clip}
    problems = top_level_problems(config, owned, dtype)
    config.update(owned)
    for name, block in DTYPE_BLOCK.items():
        if isinstance(content := config.setdefault(block, {}), dict):
            enabled = content.get("enabled", "auto")
            if enabled not in ("auto", name == dtype):
                problems.append(f'"{block}.enabled" is {json.dumps(enabled)}, but dtype is {dtype}: write "auto" here, '
                                f"or set --dtype={name if enabled else 'float32'}")
            content["enabled"] = name == dtype
    problems += block_problems(config, dtype)
    if problems:
        raise UserError("\n".join(f"{path}: {problem}" for problem in problems))
    notes = repair(config, dtype, compiled)
    config.setdefault("steps_per_print", 2**31)  # the script prints
    return config, notes


def read_json(path):
    """Return the file's object. Raises UserError for bad syntax, and for keys that are given twice."""
    def no_doubles(pairs):
        doubles = sorted(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        if doubles:
            raise UserError(f"{path}: the key {', '.join(doubles)} is given twice")
        return dict(pairs)

    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=no_doubles)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; name another with --deepspeed_config=FILE") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} holds no JSON object")
    return config


def top_level_problems(config, owned, dtype):
    """List unknown keys, keys with another owner, wrong values, and numbers that contradict the script's."""
    problems = []
    for key, value in config.items():
        if key in owned:
            if value not in ("auto", owned[key]):
                problems.append(f'"{key}" is {json.dumps(value)}, but the script\'s settings make it {owned[key]}: '
                                'remove it here, or write "auto"')
        elif key in USE_INSTEAD:
            problems.append(f'"{key}" does not belong here: {USE_INSTEAD[key]}')
        elif key not in ALLOWED_KEYS:
            hint = did_you_mean(key, [*ALLOWED_KEYS, *owned, *USE_INSTEAD])
            problems.append(f'unknown key "{key}"{hint or ": remove it"}')
        elif key not in TESTED:
            problems += value_problem(key, value, dtype)
        elif not isinstance(value, dict):
            problems.append(f'"{key}" must be an object')
    return problems


def block_problems(config, dtype):
    """List what is unknown, untested or of a wrong type inside the blocks, and what cannot work at ZeRO's stage."""
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
        except OverflowError as error:  # in DeepSpeed's validator of loss_scale
            problems.append(f'"{block}": {error}: write a smaller number')
    stage = config["zero_optimization"].get("stage", 0) if isinstance(config.get("zero_optimization"), dict) else None
    if stage in (0, 1, 2) and uses_offload(config, "param"):
        problems.append(f'"zero_optimization.offload_param" does nothing at stage {stage}: use stage 3, or remove it')
    if stage == 0 and uses_offload(config):
        problems.append('"zero_optimization.offload_optimizer" needs stage 1, 2 or 3')
    return problems


def check_keys(model, content, path, dtype):
    """Return the problems of the keys in one block, and the block without these keys, for DeepSpeed's model to check.

    model: DeepSpeed's pydantic model of the block. A key passes if it is in TESTED or has DeepSpeed's default.
    """
    problems, rest = [], {}
    fields = {field.alias or name: field for name, field in model.model_fields.items()}
    for key, value in content.items():
        here, field, found = f"{path}.{key}", fields.get(key), []
        extra = field and field.json_schema_extra or {}
        if field is None:
            found = [f'"{here}": unknown key{did_you_mean(key, TESTED[path]) or ": remove it"}']
        elif here in TESTED and isinstance(value, dict):
            inner = next(kind for kind in get_args(field.annotation) if kind is not type(None))
            nested, value = check_keys(inner, value, here, dtype)
            problems += nested
        elif key in TESTED[path]:
            found = value_problem(here, value, dtype, field)
        elif extra.get("deprecated") and here not in WHY:
            found = [f'"{here}" is an old name: write "{extra["new_param"]}"']
        elif extra.get("deprecated") or value != field.get_default(call_default_factory=True):
            found = [f'"{here}" {WHY.get(here, "is untested here")}: remove it']
        problems += found
        if not found:
            rest[key] = value
    return problems, rest


def value_problem(path, value, dtype, field=None):
    """Return a list with the problem of an "auto", of a value that is not among those of a key, or of a number or bool
    written as something else, which DeepSpeed would convert; empty if fine. field: of DeepSpeed's pydantic model."""
    choices, wanted = CHOICES.get(path), None
    if path in ("communication_data_type", "data_types.grad_accum_dtype"):
        choices = tuple(dict.fromkeys(("fp32", DTYPE_BLOCK.get(dtype, "fp32"))))
    if value == "auto":
        return [f'"{path}" is "auto", which nothing resolves: give it a value']
    if choices:
        if json.dumps(value) in map(json.dumps, choices):
            return []
        *first, last = map(json.dumps, choices)
        wanted = f"{', '.join(first)}{' or ' * bool(first)}{last}"
    elif value is None and field:
        return []
    elif path in TESTED:
        wanted = '{"device": "cpu"}, or remove it'
    elif path in POSITIVE:
        if type(value) not in (int, float) or value < 1 or value % 1:
            wanted = "a whole number above 0"
    else:
        is_bool = bool in (field.annotation, *get_args(field.annotation))
        if isinstance(value, str) or isinstance(value, bool) != is_bool:
            wanted = f"{'true or false' if is_bool else 'a number'}, without quotation marks"
    untested = ", which is untested here" if value == "nvme" else ""
    return [f'"{path}" is {json.dumps(value)}{untested}: write {wanted}'] if wanted else []


def logs_messages(config):
    """Whether DeepSpeed records the messages between ranks, for a table at the end."""
    return config.get("comms_logger", {}).get("enabled", False)


def has_per_step_timers(config):
    """Whether DeepSpeed measures something in each micro-step, for which it synchronizes with the GPU."""
    return config.get("wall_clock_breakdown", False) or logs_messages(config)


def uses_offload(config, what="optimizer"):
    """Whether the "optimizer"'s state, or the "param"eters, live in host memory."""
    block = config["zero_optimization"].get(f"offload_{what}")
    return isinstance(block, dict) and block.get("device", "none") != "none"


def supports_fast_gradients(config, dtype):
    """True if zero2_gradients.install will replace DeepSpeed's gradient path, known before there is an engine."""
    own = DTYPE_BLOCK.get(dtype, "fp32")
    return (config["zero_optimization"]["stage"] == 2 and not uses_offload(config)
            and config["data_types"]["grad_accum_dtype"] == "fp32"
            and (config.get("communication_data_type") or own).lower() == own)
