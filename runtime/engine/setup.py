"""From a plan to DeepSpeed's engine: device, process group, compiled blocks, optimizer, and what it really uses."""

import os
import warnings

import deepspeed
import torch

from model import Block
from runtime.cluster.ranks import print0, shut_down, silence_stdout
from runtime.engine import fixes
from runtime.engine.ds_config import has_per_step_timers, uses_offload
from runtime.kernels import block as kernels
from runtime.kernels import is_supported
from runtime.output import exit_with_error


def setup_device(hardware, local_rank, ds_config, backend="auto", deterministic=False):
    """Prepare this rank's device and the process group of all. Returns the torch.device."""
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)  # names that DeepSpeed still uses
    device = torch.device(hardware.device, local_rank) if hardware.device == "cuda" else torch.device("cpu")
    if hardware.device == "cuda":
        torch.cuda.set_device(device)
        if ds_config["zero_optimization"]["stage"] == 2:  # stage 3 counts on the default stream in places
            torch.cuda.set_stream(torch.cuda.Stream())  # the default stream cannot be captured
        torch.set_float32_matmul_precision("high")  # TF32 where a matmul is still in float32
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled at start, on CPU
    deepspeed.utils.logger.setLevel("INFO" if has_per_step_timers(ds_config) else "WARNING")
    backend = backend if backend != "auto" else {"cuda": "nccl", "cpu": "gloo"}[hardware.device]
    deepspeed.init_distributed(dist_backend=backend, verbose=False)
    return device


def compile_blocks(model, hardware, stage, fp8=False):
    """Run the blocks by our Triton kernels where they fit, else by torch.compile. Returns whether Triton works here."""
    use_triton = hardware.compile and hardware.device == "cuda" and is_supported(model.lm_head.weight)
    if use_triton and kernels.supports(model.config) and all(p.requires_grad for p in model.parameters()):
        kernels.install(model, fp8)
    elif hardware.compile:
        model.compile_blocks()
    if stage == 3:
        # Gather a block's weights at a time, not each layer's (on 4 H200s at 1 x 32, 12.5 s per step became 7.4); and
        # what is compiled then has no hooks inside, on which dynamo fails
        deepspeed.utils.set_z3_leaf_modules(model, [Block])
    return use_triton


def adamw(groups, ds_config, **options):
    """Return the AdamW of parameter groups, on the CPU with offload. options: lr and betas.

    Offload takes DeepSpeed's CPU Adam, compiled at its first use; where it cannot be built, PyTorch's, and prints so.
    """
    if not uses_offload(ds_config):
        return torch.optim.AdamW(groups, fused=True, **options)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    print0("note       offload: DeepSpeed's CPU Adam is compiled at its first use, for a minute or more; if that never "
           "ends, an interrupted build has left a file `lock` under ~/.cache/torch_extensions: delete it")
    try:
        return DeepSpeedCPUAdam(groups, adamw_mode=True, **options)
    except Exception as error:  # the build raises whatever the compiler, the loader or CUDA's absence make of it
        print0(f"note       PyTorch's AdamW steps on the CPU, as DeepSpeed's cannot be built ({type(error).__name__}): "
               "install a C++ compiler and ninja, and set DS_SKIP_CUDA_CHECK=1 for a CUDA mismatch")
        ds_config["zero_force_ds_cpu_optimizer"] = False
        return torch.optim.AdamW(groups, **options)


def initialize(model, optimizer, ds_config, path):
    """Return DeepSpeed's engine, with the workarounds of fixes.py. path: of the JSON, for the message if DeepSpeed
    refuses it: then all ranks end with exit code 2."""
    try:
        with silence_stdout():
            engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config)
    except AssertionError as error:  # keys of the JSON that DeepSpeed does not want together
        shut_down(2)
        exit_with_error(f"{path}: DeepSpeed refuses it: {str(error) or 'an assertion without a message'}")
    fixes.keep_going_at_min_loss_scale(engine)
    fixes.skip_nonfinite_at_stage_0(engine)
    fixes.record_zero_stage(engine)
    return engine


def describe(engine, ds_config, dtype):
    """Return what the engine really uses as one line; raise RuntimeError where it is not what it was given."""
    names = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    grad_dtype = names[ds_config.get("data_types", {}).get("grad_accum_dtype", "fp32")]
    used_dtype, used_grad_dtype = (str(d).removeprefix("torch.") for d in engine.get_data_types())
    facts = {  # (used, wanted)
        "stage": (int(engine.zero_optimization_stage()), ds_config["zero_optimization"]["stage"]),
        "micro-batch": (engine.train_micro_batch_size_per_gpu(), ds_config["train_micro_batch_size_per_gpu"]),
        "accumulation": (engine.gradient_accumulation_steps(), ds_config["gradient_accumulation_steps"]),
        "clipping": (engine.gradient_clipping(), ds_config["gradient_clipping"]),
        "dtype": (used_dtype, dtype), "gradients": (used_grad_dtype, grad_dtype)}
    if wrong := [f"{name} {used}, not {wanted}" for name, (used, wanted) in facts.items() if used != wanted]:
        raise RuntimeError(f"DeepSpeed uses {'; '.join(wrong)}")
    return ", ".join(f"{name} {used}" for name, (used, _) in facts.items())
