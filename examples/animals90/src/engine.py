"""DeepSpeed's JSON and checkpoints, and DistributedDataParallel with the methods of DeepSpeed's engine."""

import contextlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from configurator import did_you_mean
from runtime.cluster.ranks import silence_stdout
from runtime.engine.ds_config import read_json, resolve
from runtime.files import UserError, fsync, replace_dir

BLOCKS = {  # what the training script reads from the JSON itself
    "optimizer": "type lr betas eps weight_decay",
    "scheduler": "type warmup_min_lr warmup_max_lr warmup_num_steps warmup_type",
    "activation_checkpointing": "partition_activations cpu_checkpointing contiguous_memory_optimization "
                                "number_checkpoints synchronize_checkpoint_boundary profile",
    "flops_profiler": "enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file",
}
SAFE_CLASSES = {"deepspeed.runtime.fp16.loss_scaler.LossScaler", "deepspeed.runtime.zero.config.ZeroStageEnum",
                "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
                "deepspeed.utils.tensor_fragment.fragment_address"}


def read_recipe(path, s, dtype, world_size, epoch_steps):
    """Return what a JSON says for the settings s, with DeepSpeed's config in `config`. Raise UserError."""
    config, problems, own = read_json(path), [], {}
    for name, keys in BLOCKS.items():
        if not isinstance(block := config.get(name, {}), dict) or not isinstance(block.get("params", {}), dict):
            raise UserError(f'{path}: "{name}" and its "params" must be objects, in braces')
        block = {**block, **block.get("params", {}), "params": "auto"}
        problems += [f'"{name}.{key}" is not supported{did_you_mean(key, keys.split()) or ": remove it"}'
                     for key in block if key not in ("params", *keys.split())]
        own[name] = {key: value for key, value in block.items() if value != "auto"}
    adam, warmup, recomputing, profiler = own.values()
    zero = config.pop("zero_optimization", {})
    for key, value, *allowed in (
            ("optimizer.type", adam.pop("type", "AdamW"), "AdamW", "Adam"),
            ("zero_optimization.stage", zero.get("stage"), 2),
            ("scheduler.type", warmup.get("type", "WarmupLR"), "WarmupLR"),
            ("warmup_type", warmup.get("warmup_type", "linear"), "linear"),
            ("lr", adam.pop("lr", s.learning_rate), s.learning_rate),
            ("warmup_max_lr", warmup.get("warmup_max_lr", s.learning_rate), s.learning_rate)):
        if value not in allowed:
            problems.append(f'"{key}" is {json.dumps(value)}: write {" or ".join(map(json.dumps, allowed))}')
    if problems:
        raise UserError("\n".join(f"{path}: {problem}" for problem in problems))
    round_robin = zero.pop("round_robin_gradients", False)  # the core does not use it
    core = {**{key: value for key, value in config.items() if key not in BLOCKS}, "zero_optimization": zero}
    batch = SimpleNamespace(micro=s.batch_size, accumulation=s.gradient_accumulation_steps, world_size=world_size)
    resolved, notes = resolve(path, batch, 0.0, dtype, config=core)
    zero["round_robin_gradients"], resolved["flops_profiler"] = round_robin, profiler
    if recomputing:
        notes.append(f"activation_checkpointing: {', '.join(recomputing)} have no effect, PyTorch recomputes")
    decay = 0.0 if config.get("optimizer", {}).get("type") == "Adam" else 0.01
    return SimpleNamespace(
        config=resolved, adamw={"lr": s.learning_rate, "weight_decay": decay, **adam}, notes=notes,
        recompute="activation_checkpointing" in config, warmup_from=warmup.get("warmup_min_lr", 0.0),
        warmup_steps=warmup.get("warmup_num_steps", epoch_steps) if "scheduler" in config else 0)


def save(engine, folder, info):
    """Save the engine and the dict `info` as `folder`, which appears when it is complete. All ranks call this."""
    new = Path(f"{folder}.saving")
    with silence_stdout():
        engine.save_checkpoint(str(new), tag=folder.name.removesuffix("_model"))  # best, epoch_5
    if dist.get_rank() == 0:
        (new / "extra_info.json").write_text(json.dumps(info, indent=1) + "\n")
        for path in new.rglob("*"):
            fsync(path)
        replace_dir(new, folder)
    dist.barrier()


def list_checkpoints(folder):
    """Return the checkpoints in a folder, the newest one last. Finish or remove what a killed run left."""
    for path in (*Path(folder).glob("*.old"), *Path(folder).glob("*.saving")):
        if path.suffix == ".old" and not path.with_suffix("").exists():  # killed between two renames
            with contextlib.suppress(OSError):  # another rank was faster
                path.rename(path.with_suffix(""))
        shutil.rmtree(path, ignore_errors=True)
    return sorted((path.parent for path in Path(folder).glob("*/extra_info.json")),
                  key=lambda found: (found / "extra_info.json").stat().st_mtime)


def find_checkpoint(resume):
    """Return (folder, its extra_info.json) of a checkpoint, or of the newest one in this folder. Raises UserError if it
    is incomplete, or if its files could run code."""
    try:
        beside = list_checkpoints(Path(resume).parent)
        folder = Path(resume) if Path(resume) in beside else list_checkpoints(resume)[-1]
        info = json.loads((folder / "extra_info.json").read_text())
        files = [*folder.glob("*/mp_rank_00_model_states.pt"), *folder.glob("*/*zero_pp_rank_*")]
        unsafe = set().union(*map(torch.serialization.get_unsafe_globals_in_checkpoint, files)) - SAFE_CLASSES
        if unsafe or len(files) != info["world_size"] + 1:
            names = ", ".join(sorted(unsafe))
            raise ValueError(f"{names} could run code" if unsafe else f"{len(files) - 1} optimizer files")
    except Exception as error:  # no such file, no JSON, cut short
        raise UserError(f"resume={resume} is not a complete checkpoint ({type(error).__name__}: {error}): choose "
                        "another folder, or drop --resume") from None
    return folder, info


class Plain(DistributedDataParallel):
    """DistributedDataParallel with the methods of DeepSpeed's engine. dtype: of autocast; the weights are float32."""

    def __init__(self, model, optimizer, dtype, accumulation):
        super().__init__(model, broadcast_buffers=False)
        self.optimizer, self.dtype, self.accumulation, self.micro_steps = optimizer, dtype, accumulation, 0
        self.scaler = torch.amp.GradScaler(enabled=dtype == torch.float16)

    def forward(self, x):
        with torch.autocast(x.device.type, self.dtype, enabled=self.dtype != torch.float32):
            return super().forward(x)

    def backward(self, loss):
        self.scaler.scale(loss / self.accumulation).backward()

    def step(self):
        self.micro_steps += 1
        if self.micro_steps % self.accumulation == 0:
            scale = self.scaler.get_scale()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.applied = self.scaler.get_scale() >= scale
            self.optimizer.zero_grad()

    def was_step_applied(self):
        return self.applied
