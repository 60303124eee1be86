"""Find out what a run trains on: this machine, or the GPU that target_gpu names."""

import os
from collections.abc import Mapping
from typing import Any

import torch

from runtime.chosen_model import GPTConfig
from runtime.cluster.ranks import Ranks
from runtime.engine.ds_config import uses_offload
from runtime.engine.fast_paths import ModelFacts
from runtime.errors import UserError
from runtime.hardware import (
    Execution,
    available_memory,
    find_gpu,
    pick_compile,
    pick_device,
    pick_dtype,
)
from runtime.kernels import device_has_triton
from runtime.plan.problems import Problems


def detect_hardware(s: Any, ranks: Ranks, problems: Problems, notes: list[str]) -> Execution:
    """Return the Execution of each rank. Raises UserError if there is none."""
    if s.target_gpu is not None:
        return target_execution(s, problems)
    device = pick_device(s.device, ranks.local_world_size)

    # What contradicts the device
    accelerator = os.environ.get("DS_ACCELERATOR") or device
    if accelerator != device:  # DeepSpeed would put the model there
        raise UserError(
            f"DS_ACCELERATOR={accelerator} is in the environment, but device={device}: run unset "
            f"DS_ACCELERATOR, or add --device={accelerator}"
        )
    if device == "cpu" and s.backend == "nccl":
        raise UserError("backend=nccl needs GPUs: use --backend=auto")

    # What "auto" stands for on it
    dtype = problems.attempt(pick_dtype, s.dtype, device) or "float32"
    compiled, note = pick_compile(s.compile, device)
    if note:
        notes.append(note)
    if device == "cpu":
        # The ranks of a node share its memory
        size = available_memory() / ranks.local_world_size
    else:
        gpus = range(ranks.local_world_size)
        size = min(torch.cuda.get_device_properties(i).total_memory for i in gpus)
    return Execution(device, dtype, compiled, size)


def target_execution(s: Any, problems: Problems) -> Execution:
    """Return the Execution on the GPU that target_gpu names. Raises UserError."""
    gpu = find_gpu(s.target_gpu)
    dtype = s.dtype
    if dtype == "auto":
        dtype = "bfloat16" if gpu.bf16 else "float16"
    if dtype == "bfloat16" and not gpu.bf16:
        problems.add(
            f"dtype=bfloat16 needs compute capability 8.0, but target_gpu={s.target_gpu} has less: "
            "use --dtype=float16 or --dtype=auto"
        )
    compiled = s.compile
    if compiled == "auto":
        compiled = gpu.bf16
    return Execution("cuda", dtype, compiled, int(gpu.gb * 1e9), gpu)


def check_kernels(s: Any, model: GPTConfig, execution: Execution, facts: ModelFacts) -> None:
    """Raise UserError if fp8 is set and this GPU or model can't use our FP8 kernels."""
    if not s.fp8:
        return

    # What the GPU can do, and what the model needs
    if execution.gpu:  # target_gpu
        has_fp8 = execution.gpu.fp8
    else:
        has_fp8 = execution.device == "cuda" and torch.cuda.get_device_capability() >= (9, 0)
    compiles = execution.compile and device_has_triton(torch.empty(0))
    sizes_fit = model.n_embd % 16 == 0 and s.block_size % 16 == 0
    model_fits = sizes_fit and not facts.no_chain and not s.lora_rank
    if not (has_fp8 and execution.dtype == "bfloat16" and compiles and model_fits):
        raise UserError(
            "fp8=True needs compute capability 9.0 (H100, H200, B200, ...), bfloat16, "
            "compile=auto, a C compiler, no LoRA, --dropout=0, biases, tanh GELU, unedited blocks "
            "in model.py, and multiples of 16 for block_size and n_embd, the latter up to 4,096: "
            "drop it"
        )


def check_compact(s: Any, config: Mapping, execution: Execution) -> None:
    """Raise UserError if the optimizer's state can't be compact in this run."""
    if s.dtype not in ("auto", execution.dtype):
        return  # this machine hasn't the dtype that was asked for, which is a problem of its own
    usable = "use bfloat16 with --deepspeed_config=ds_config_zero2.json, or drop it"
    if execution.dtype != "bfloat16":
        why = f"splits bfloat16 weights, and this run is in {execution.dtype}"
    elif uses_offload(config):
        why = f"keeps the state on the GPU, and {s.deepspeed_config} keeps it in host memory"
    elif config["zero_optimization"]["stage"] == 3:
        why = f"is for ZeRO-2, and {s.deepspeed_config} has stage 3"
    else:
        return
    raise UserError(f"compact_optimizer=True {why}: {usable}")
