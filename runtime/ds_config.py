"""The DeepSpeed JSON: what it may say, and what the engine is handed.

One owner for each number: the training script owns batch, accumulation, clipping, learning rate and precision; the
JSON owns ZeRO, offload and buckets. DeepSpeed itself ignores unknown keys at the top, takes "auto" for a default
without a word, and accepts several combinations that then compute something wrong; all of them end here.
"""

import json
import os

from configurator import nearest

OURS = ("zero_optimization", "bf16", "fp16", "data_types", "communication_data_type", "zero_force_ds_cpu_optimizer",
        "steps_per_print", "memory_breakdown", "dump_state", "aio")  # fmt: skip
INSTEAD = {
    "optimizer": "the script owns it: set learning_rate, weight_decay, beta1 and beta2 there",
    "scheduler": "the script owns it: set lr_schedule, warmup_iters, lr_decay_iters and min_lr there",
    "activation_checkpointing": "DeepSpeed does nothing with it: set --gradient_checkpointing=True",
    "tensorboard": "DeepSpeed would log no loss: set --tensorboard_log=True",
    "wandb": "DeepSpeed would log no loss: set --wandb_log=True",
    "csv_monitor": "DeepSpeed would log no loss: history.jsonl in out_dir has it",
    "flops_profiler": "set --profile=True; DeepSpeed cannot see into blocks that are compiled",
    "wall_clock_breakdown": "set --wall_clock_breakdown=True",
    "comms_logger": "set --comms_log=True",
    "prescale_gradients": "ZeRO refuses it",
    "gradient_predivide_factor": "ZeRO refuses it",
    "zero_allow_untested_optimizer": "the optimizer is AdamW, which ZeRO knows",
    "checkpoint": "the script owns checkpoints, and DeepSpeed's writers leave files that it cannot read",
}
POSTPONED = 2**20  # by this, a window of loss scaling never ends inside DeepSpeed
DTYPE_BLOCK = {"bfloat16": "bf16", "float16": "fp16"}


class ConfigError(Exception):
    """Every problem found in a DeepSpeed JSON, one a line."""


def find(path, root):
    """Where a JSON lies: as it is named, or else below the project's folder."""
    return path if os.path.exists(path) else os.path.join(root, path)


def resolve(path, settings, world_size, dtype, compiled=False):
    """(config for deepspeed.initialize, notes to print) from a JSON file, the script's settings and its precision.

    dtype: 'bfloat16', 'float16' or 'float32'. compiled: whether the blocks are. Raises ConfigError.
    """
    config = read_json(path)
    owned = {
        "train_micro_batch_size_per_gpu": settings["batch_size"],
        "gradient_accumulation_steps": settings["gradient_accumulation_steps"],
        "train_batch_size": settings["batch_size"] * settings["gradient_accumulation_steps"] * world_size,
        "gradient_clipping": settings["grad_clip"],
    }
    problems = top_level_problems(config, owned) + precision_problems(config, dtype)
    config.update(owned)
    for block in ("bf16", "fp16"):
        if isinstance(config.setdefault(block, {}), dict):
            config[block]["enabled"] = DTYPE_BLOCK.get(dtype) == block
    problems += [f'"{key}" is "auto", which nothing resolves: give it a value' for key in autos(config)]
    if not problems:
        problems = block_problems(config) or zero_problems(config.get("zero_optimization", {}))
    if problems:
        raise ConfigError("\n".join(f"{path}: {problem}" for problem in problems))
    notes = repair(config, dtype, compiled)
    config.setdefault("steps_per_print", 2**31)  # the script prints
    if settings.get("wall_clock_breakdown"):
        config["wall_clock_breakdown"] = True
    if settings.get("comms_log"):
        config["comms_logger"] = {"enabled": True, "prof_all": True}
    return config, notes


def read_json(path):
    """The file's object; keys given twice and bad syntax are ConfigErrors."""

    def no_doubles(pairs):
        keys = [key for key, _ in pairs]
        doubles = sorted({key for key in keys if keys.count(key) > 1})
        if doubles:
            raise ConfigError(f"{path}: the key {', '.join(doubles)} is given twice")
        return dict(pairs)

    try:
        with open(path, encoding="utf-8") as f:
            config = json.load(f, object_pairs_hook=no_doubles)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name another with --deepspeed_config=FILE") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return config


def top_level_problems(config, owned):
    """Unknown keys, keys with another owner, and numbers that contradict the script's."""
    problems = []
    for key, value in config.items():
        if key in owned:
            if value not in ("auto", owned[key]):
                problems.append(f'"{key}" is {value}, but the script\'s settings make it {owned[key]}: '
                                'remove it here, or write "auto"')
        elif key in INSTEAD:
            problems.append(f'"{key}" does not belong here: {INSTEAD[key]}')
        elif key not in OURS:
            problems.append(f'unknown key "{key}"{nearest(key, [*OURS, *owned])}')
        elif key in ("zero_optimization", "bf16", "fp16", "data_types") and not isinstance(value, dict):
            problems.append(f'"{key}" must be an object')
    return problems


def precision_problems(config, dtype):
    """Precision blocks that say something else than dtype; fit ones have "auto" or the same in `enabled`."""
    problems = []
    for block in ("bf16", "fp16"):
        content = config.get(block, {})
        said = content.get("enabled", "auto") if isinstance(content, dict) else "auto"
        if said not in ("auto", DTYPE_BLOCK.get(dtype) == block):
            problems.append(f'"{block}.enabled" is {json.dumps(said)}, but dtype is {dtype}: write "auto" here, or '
                            f"set --dtype={'float32' if not said else {'bf16': 'bfloat16', 'fp16': 'float16'}[block]}")
    return problems


def autos(node, path=""):
    """Paths of all "auto" values left below node."""
    if isinstance(node, dict):
        return [found for key, value in node.items() for found in autos(value, f"{path}.{key}" if path else key)]
    return [path] if node == "auto" else []


def block_problems(config):
    """What DeepSpeed refuses inside its blocks, by its own models of them; data_types has none."""
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError

    problems = []
    models = {"zero_optimization": DeepSpeedZeroConfig, "bf16": DeepSpeedBF16Config, "fp16": DeepSpeedFP16Config}
    for block, model in models.items():
        content = config.get(block, {})
        problems += [
            f'"{block}.{key}" is an old name: write "{field.json_schema_extra.get("new_param") or "offload_*"}"'
            for key, field in model.model_fields.items()
            if key in content and (field.json_schema_extra or {}).get("deprecated")
        ]
        try:
            model(**content)
        except ValidationError as error:
            problems += [
                f'"{".".join(map(str, (block, *e["loc"])))}": '
                + (f"unknown key{nearest(str(e['loc'][-1]), model.model_fields)}"
                   if e["type"] == "extra_forbidden" else e["msg"])
                for e in error.errors() if e["type"] != "assertion_error"  # these zero_problems tells with a mend
            ]
    for key, value in config.get("data_types", {}).items():
        if key != "grad_accum_dtype":
            problems.append(f'"data_types.{key}": unknown key{nearest(key, ["grad_accum_dtype"])}')
        elif value not in ("fp32", "bf16", "fp16"):
            problems.append(f'"data_types.{key}" is {json.dumps(value)}: write "fp32", "bf16" or "fp16"')
    return problems


def zero_problems(zero):
    """What DeepSpeed takes and then ignores or gets wrong."""
    problems, stage = [], zero.get("stage", 0)
    if type(stage) is not int:
        return [f'"zero_optimization.stage" is {json.dumps(stage)}: write 0, 1, 2 or 3']
    optimizer, param = ((zero.get(key) or {}) for key in ("offload_optimizer", "offload_param"))
    if param.get("device", "none") != "none" and stage != 3:
        problems.append(f'"zero_optimization.offload_param" does nothing at stage {stage}: use stage 3, or remove it')
    if optimizer.get("device", "none") != "none" and stage == 0:
        problems.append('"zero_optimization.offload_optimizer" needs stage 1, 2 or 3')
    if zero.get("round_robin_gradients"):
        problems.append('"zero_optimization.round_robin_gradients" makes DeepSpeed tell the places of weights wrongly, '
                        "and resuming with other ranks relies on them: remove it")
    if optimizer.get("ratio", 1.0) < 1 and stage != 3:
        problems.append(f'"zero_optimization.offload_optimizer.ratio" below 1 works at stage 3 only, not at {stage}')
    return problems


def repair(config, dtype, compiled):
    """Change in place what DeepSpeed would get wrong; returns a note on each change."""
    notes = []
    zero = config.setdefault("zero_optimization", {"stage": 0})
    stage = zero.setdefault("stage", 0)
    if stage == 0 and dtype != "float32":
        why = "never scales the loss in float16" if dtype == "float16" else "adds up gradients in bfloat16"
        notes.append(f"stage 0 runs as stage 1, because DeepSpeed's stage 0 {why}")
        stage = zero["stage"] = 1
    if dtype == "float16" and not config["fp16"].get("loss_scale"):
        # its step divides by the scale of the next step, which halves the gradient each time the scale grows (at
        # stages 1 and 2 too, where the norm that it tells is right)
        config["fp16"]["loss_scale_window"] = config["fp16"].get("loss_scale_window", 1000) * POSTPONED
        notes.append("the script makes the loss scale grow: when DeepSpeed does, it halves the gradient")
    if stage > 0:
        config.setdefault("data_types", {}).setdefault("grad_accum_dtype", "fp32")
    if stage == 3 and compiled:
        # DeepSpeed's own F.linear, traced by PyTorch 2.11, costs each block a graph of its own, up to dynamo's limit of
        # 8, and the gradients of those blocks are zero: GPT-2 XL's norm was 71 instead of 97
        if zero.get("memory_efficient_linear"):
            notes.append("memory_efficient_linear is off, because compiled blocks lose their gradients by it")
        zero["memory_efficient_linear"] = False
    ignored = [key for key in zero if key.startswith("stage3_")] if stage != 3 else []
    if ignored:
        notes.append(f"{', '.join(ignored)} have no effect at stage {stage}")
    return notes


def talks(config):
    """True where DeepSpeed is to time or tell something at each micro-step, for which it stops the GPU."""
    return any(config.get(key) for key in ("wall_clock_breakdown", "comms_logger", "memory_breakdown"))


def offloads(config):
    """True where the optimizer's state lives in host memory."""
    return (config["zero_optimization"].get("offload_optimizer") or {}).get("device", "none") != "none"


def shortens(config, dtype):
    """True where the shorter way of runtime/gradients.py goes: what shorten() asks the engine, before there is one."""
    own = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[dtype]
    return (config["zero_optimization"]["stage"] == 2 and not offloads(config)
            and config["data_types"]["grad_accum_dtype"] == "fp32"
            and (config.get("communication_data_type") or own).lower() == own)


def compare(engine, config, dtype):
    """What the engine really uses, as one line; RuntimeError where it is not what it was handed."""
    wanted = {
        "stage": config["zero_optimization"]["stage"],
        "micro-batch": config["train_micro_batch_size_per_gpu"],
        "accumulation": config["gradient_accumulation_steps"],
        "clipping": config["gradient_clipping"],
        "dtype": dtype,
        "gradients": {"bf16": "bfloat16", "fp16": "float16"}.get(
            config.get("data_types", {}).get("grad_accum_dtype", "fp32"), "float32"),
    }
    model_dtype, grad_dtype = (str(d).removeprefix("torch.") for d in engine.get_data_types())
    real = {
        "stage": int(engine.zero_optimization_stage()),
        "micro-batch": engine.train_micro_batch_size_per_gpu(),
        "accumulation": engine.gradient_accumulation_steps(),
        "clipping": engine.gradient_clipping(),
        "dtype": model_dtype,
        "gradients": grad_dtype,
    }
    wrong = [key for key in wanted if wanted[key] != real[key]]
    if wrong:
        raise RuntimeError(f"DeepSpeed uses {[(k, real[k]) for k in wrong]}, not {[(k, wanted[k]) for k in wrong]}")
    return ", ".join(f"{key} {value}" for key, value in real.items())


def grow_loss_scale(engine):
    """float16: double the loss scale after every window of good steps, between two steps, where it is safe
    (see repair). Does nothing elsewhere."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    window = getattr(scaler, "scale_window", 0) // POSTPONED
    good_steps = scaler.cur_iter - 1 - scaler.last_overflow_iter if window else 0
    if good_steps > 0 and good_steps % window == 0:
        scaler.cur_scale *= scaler.scale_factor
        scaler.cur_hysteresis = scaler.delayed_shift


def cpu_adam(config, groups, adam):
    """The optimizer for offload: DeepSpeed's, compiled at first use; where it cannot be built, torch's, and says so."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    from runtime.dist import print0

    print0("note       offload: DeepSpeed's CPU Adam is compiled at its first use, for a minute or more; if that never "
           "ends, an interrupted build has left a file `lock` under ~/.cache/torch_extensions: delete it")
    try:
        return DeepSpeedCPUAdam(groups, adamw_mode=True, **adam)
    except Exception as error:  # the build raises whatever the compiler, the loader or CUDA's absence make of it
        import torch

        print0(f"note       torch's AdamW steps on the CPU, as DeepSpeed's cannot be built ({type(error).__name__}): "
               "a C++ compiler and ninja mend that, and DS_SKIP_CUDA_CHECK=1 a CUDA mismatch")
        config["zero_force_ds_cpu_optimizer"] = False
        return torch.optim.AdamW(groups, **adam)
