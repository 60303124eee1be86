"""Set up what training needs: device, compiled blocks, optimizer, DeepSpeed's engine, and our gradient path in it."""

import os
import warnings

import deepspeed
import torch

from runtime.cluster.ranks import all_exit_on, all_reduce_sum, print0, silence_stdout
from runtime.engine.any_optimizer import check_elementwise, is_adamw, optimizer_name
from runtime.engine.ds_config import config_fits_fast_gradients, uses_offload
from runtime.engine.fused_adamw import Zero2Step, Zero3Step
from runtime.engine.zero2_gradients import BucketedAllReduce, LocalAccumulation
from runtime.engine.zero3_blocks import Zero3Blocks
from runtime.errors import UserError


def setup_device(execution, local_rank, ds_config, deterministic=False):
    """Set up this rank's device, and DeepSpeed on the process group. Return the torch.device."""
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)  # DeepSpeed uses old names
    device = torch.device(execution.device, local_rank) if execution.device == "cuda" else torch.device("cpu")
    if execution.device == "cuda":
        torch.cuda.set_device(device)
        if config_fits_fast_gradients(ds_config, execution.dtype):  # DeepSpeed's stage 3 relies on the default stream
            torch.cuda.set_stream(torch.cuda.Stream())  # the default stream can't be captured
        torch.set_float32_matmul_precision("high")  # TF32 for matmuls that are still in float32
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # on CPU, DeepSpeed would compile it at the start
    deepspeed.utils.logger.setLevel("INFO" if ds_config.get("wall_clock_breakdown") else "WARNING")
    deepspeed.init_distributed(verbose=False)
    return device


def compile_blocks(model, execution, stage, fp8=False):
    """Run the blocks by our Triton kernels where they fit, else by torch.compile. Return whether Triton works here."""
    from model import Block  # here, because examples/ have models of their own
    from runtime.kernels import block as kernels
    from runtime.kernels import device_has_triton

    use_triton = execution.compile and execution.device == "cuda" and device_has_triton(model.lm_head.weight)
    if use_triton and kernels.model_fits_kernels(model.config) and all(p.requires_grad for p in model.parameters()):
        copies = execution.dtype == "bfloat16" and stage < 3 and not model.gradient_checkpointing
        kernels.use_fused_blocks(model, fp8, copies)
    elif execution.compile:
        model.compile_blocks()
    if stage == 3:
        # Gather the weights of a whole block at a time, not of each layer: 7.4 instead of 12.5 s per step on 4 H200s at
        # 1 x 32. Then compiled code has no hooks inside, on which dynamo fails
        deepspeed.utils.set_z3_leaf_modules(model, [Block])
    return use_triton


def may_capture(model, setting, ds_config, execution):
    """Return whether micro-steps may be replayed as a CUDA graph, and print why not.

    setting: cuda_graph. A graph repeats what Python did while it was captured. So "auto" needs a model whose micro-step
    is the same whatever the data. Call this before compile_blocks(), which changes the model."""
    from runtime.kernels.edits import varying_part  # here, because examples/ have models of their own

    if setting is False:
        return False
    reason = None
    if ds_config.get("wall_clock_breakdown"):
        reason = 'the timers of "wall_clock_breakdown" synchronize in every micro-step'
    elif setting == "auto" and (part := varying_part(model)):
        reason = f"{part}, so a micro-step may depend on the data; cuda_graph=True says that it doesn't"
    if reason and execution.compile:  # else there is no graph anyway
        print0(f"note       no CUDA graph: {reason}")
    return reason is None


def adamw(groups, ds_config, **options):
    """Return AdamW for these parameter groups. options: lr and betas. With offload it is DeepSpeed's CPU Adam, which is
    compiled on first use, or PyTorch's if that fails."""
    if not uses_offload(ds_config):
        return torch.optim.AdamW(groups, fused=True, **options)
    print0("note       offload: DeepSpeed compiles its CPU Adam on first use, in a minute or more; if it hangs, "
           "delete the file `lock` that an interrupted build left under ~/.cache/torch_extensions")
    try:
        return deepspeed.ops.adam.DeepSpeedCPUAdam(groups, adamw_mode=True, **options)
    except Exception as error:  # the build raises many kinds
        print0(f"note       cannot build DeepSpeed's CPU Adam ({type(error).__name__}), so PyTorch's slower AdamW is "
               "used: install a C++ compiler and ninja")
        return torch.optim.AdamW(groups, **options)


def initialize(model, optimizer, ds_config, masked=False):
    """Return DeepSpeed's engine, with buckets no larger than all gradients: DeepSpeed allocates two of
    `reduce_bucket_size` however small the model is, 2 GB in float16 by default. masked: only some tokens are targets.
    Each of them has a larger gradient then, so the loss scale that keeps float16 in range is smaller."""
    zero, size = ds_config["zero_optimization"], sum(p.numel() for p in model.parameters() if p.requires_grad)
    zero = {**zero, "reduce_bucket_size": min(size, int(zero.get("reduce_bucket_size", 5e8)))}
    config = {**ds_config, "zero_optimization": zero}
    if not isinstance(optimizer, deepspeed.ops.adam.DeepSpeedCPUAdam):  # it could not be built, or isn't wanted
        config["zero_force_ds_cpu_optimizer"] = False
    if not is_adamw(optimizer):
        with all_exit_on(UserError):
            check_elementwise(optimizer)
        config["zero_allow_untested_optimizer"] = True
        print0(f"note       the optimizer {optimizer_name(optimizer)} is stepped by its own step(), not by our kernels")
    with silence_stdout():
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    if hasattr(getattr(engine.optimizer, "loss_scaler", None), "raise_error_at_min_scale"):
        engine.optimizer.loss_scaler.raise_error_at_min_scale = False  # skip the step at the minimum scale, too
    if engine.bfloat16_enabled() and getattr(model, "is_fused", False):  # then parts of backward are in float16
        sequences = engine.train_micro_batch_size_per_gpu() * engine.gradient_accumulation_steps()
        tokens = sequences * model.config.block_size  # over which the loss is a mean
        engine.optimizer.loss_scale = 2.0 ** (tokens if masked else 16 * tokens).bit_length()
    return engine


def describe(engine, ds_config, dtype):
    """Return one line on what the engine uses. Raise RuntimeError if it differs from the settings."""
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


def replace_gradients_and_step(deepspeed, accumulate_locally, use_triton=False):
    """Replace DeepSpeed's gradient path and step if the run supports that. Return the FusedStep, or None."""
    if not config_fits_fast_gradients(deepspeed.config, str(deepspeed.get_data_types()[0]).removeprefix("torch.")):
        return None
    optimizer, offloads = deepspeed.optimizer, deepspeed.zero_use_cpu_optimizer()
    use_kernel = use_triton and optimizer.dtype == torch.bfloat16
    world_size = torch.distributed.get_world_size(optimizer.dp_process_group)
    local = world_size == 1 or all_reduce_sum(accumulate_locally)[0] == world_size
    if deepspeed.zero_optimization_stage() == 3:
        return Zero3Step(optimizer, Zero3Blocks(deepspeed, local), use_kernel, offloads)
    gradients = LocalAccumulation(optimizer) if local else BucketedAllReduce(optimizer)
    return Zero2Step(optimizer, gradients, use_kernel, offloads)
