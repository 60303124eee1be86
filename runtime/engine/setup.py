"""From a model to DeepSpeed's engine: the optimizer, and what the engine really uses."""


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


def cpu_adam(config, groups, adam):
    """The optimizer for offload: DeepSpeed's, compiled at first use; where it cannot be built, torch's, and says so."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    from runtime.cluster.ranks import print0

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
