"""DeepSpeed's JSON, and checkpoints that appear when they are complete."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig
from deepspeed.runtime.activation_checkpointing.config import ACT_CHKPT_DEFAULT

from runtime.cluster.ranks import silence_stdout
from runtime.engine.ds_config import allowed_keys, resolve
from runtime.files import UserError, fsync, replace_dir, write_atomic
from runtime.weights import SAFE_GLOBALS


def own_keys(lr, dtype):
    """Return what a JSON may hold that the core's may not, as its allowed_keys(). The rule ... allows any value."""
    zero = {"stage": (2,), "round_robin_gradients": (True, False)}
    adam = {"lr": (lr, "auto"), "betas": ..., "eps": ..., "weight_decay": ...}
    warmup = {"warmup_min_lr": ..., "warmup_max_lr": (lr, "auto"), "warmup_num_steps": ..., "warmup_type": ("linear",)}
    return {"zero_optimization": allowed_keys(dtype)["zero_optimization"] | zero,
            "optimizer": {"type": ("AdamW", "Adam"), "params": adam},
            "scheduler": {"type": ("WarmupLR",), "params": warmup},
            "activation_checkpointing": dict.fromkeys(ACT_CHKPT_DEFAULT, ...),
            "flops_profiler": dict.fromkeys(vars(DeepSpeedFlopsProfilerConfig({})), ...)}


def read_recipe(path, s, world_size, epoch_steps, device, dtype):
    """Return what a JSON says for the settings s, with DeepSpeed's config in `config`. Raise UserError."""
    batch = SimpleNamespace(micro=s.batch_size, accumulation=s.gradient_accumulation_steps, world_size=world_size)
    config, notes = resolve(path, batch, 0.0, dtype, extra=own_keys(s.learning_rate, dtype))
    if config["zero_optimization"]["stage"] != 2:
        raise UserError(f'{path}: "zero_optimization.stage" is missing: write 2')
    blocks = config.pop("optimizer", {}), config.pop("scheduler", {})
    adam, warmup = ({key: value for key, value in block.get("params", {}).items() if value != "auto"}
                    for block in blocks)
    decay = 0.0 if blocks[0].get("type") == "Adam" else 0.01
    recompute = config.pop("activation_checkpointing", None)
    if recompute:
        notes.append(f"activation_checkpointing: {', '.join(recompute)} have no effect, PyTorch recomputes")
    return SimpleNamespace(
        config=config, device=device, dtype=dtype, adamw={"lr": s.learning_rate, "weight_decay": decay, **adam},
        notes=notes, recompute=recompute is not None, warmup_from=warmup.get("warmup_min_lr", 0.0),
        warmup_steps=warmup.get("warmup_num_steps", epoch_steps) if blocks[1] else 0)


def save(engine, folder, info):
    """Save the engine and the dict `info` as `folder`, which appears when it is complete. All ranks call this."""
    new = folder.with_name(".saving")
    if dist.get_rank() == 0:
        shutil.rmtree(new, ignore_errors=True)  # of a run that was killed
    with silence_stdout():
        engine.save_checkpoint(str(new), tag=folder.name.removesuffix("_model"))  # best, epoch_5
    if dist.get_rank() == 0:
        for path in new.rglob("*"):
            fsync(path)
        write_atomic(new / "extra_info.json", json.dumps(info, indent=1) + "\n")  # last: now it is complete
        replace_dir(new, folder)
    dist.barrier()


def find_checkpoint(resume):
    """Return (folder, its extra_info.json) of a checkpoint, or of the newest one in this folder. Raises UserError if it
    is incomplete, or if its files could run code."""
    try:
        found = [*Path(resume).rglob("extra_info.json"), *Path(f"{resume}.old").rglob("extra_info.json")]
        path = max(found, key=os.path.getmtime)  # .old is there after a kill between two renames
        info = json.loads(path.read_text())
        files = [*path.parent.glob("*/*_states.pt")]
        unsafe = set().union(*map(torch.serialization.get_unsafe_globals_in_checkpoint, files)) - SAFE_GLOBALS
        if unsafe or len(files) != info["world_size"] + 1:
            names = ", ".join(sorted(unsafe))
            raise ValueError(f"{names} could run code" if unsafe else f"{len(files) - 1} optimizer files")
    except Exception as error:  # no such file, no JSON, cut short
        raise UserError(f"resume={resume} is not a complete checkpoint ({type(error).__name__}: {error}): choose "
                        "another folder, or drop --resume") from None
    return path.parent, info
