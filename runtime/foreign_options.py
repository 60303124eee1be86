"""What to type instead of the options of other training scripts, where the nearest of our names isn't the answer."""

FOREIGN_OPTIONS = {  # our arguments, with {} for the value: options that mean the same elsewhere
    "--dtype=float16": "fp16 half",
    "--dtype=bfloat16": "bf16",
    "--batch_size={}": "per_device_train_batch_size train_micro_batch_size_per_gpu",
    "--gradient_accumulation_steps={}": "accumulate_grad_batches",
    "--max_iters={}": "train_steps",
    "--learning_rate={}": "lr",
    "--grad_clip={}": "gradient_clipping clip_grad max_grad_norm",
    "--block_size={}": "max_length max_seq_length model_max_length context_length seq_len",
    "--eval_interval={}": "save_interval save_steps save_every save_freq eval_steps",
    "--out_dir={}": "checkpoint_dir save_dir",
    "--init_from=resume": "resume",
    "--init_from=resume --resume_tag=iter_10": "resume_from_checkpoint",
    "--init_from={}": "model model_name model_name_or_path",
    "--dataset=mine after python data/prepare.py {} --name=mine": "data_path data_dir train_file",
    "--wandb_log=True or --tensorboard_log=True": "report_to",
    "--lora_rank=64": "use_lora peft",
    "--deepspeed_config=ds_config_zero3.json": "fsdp zero stage zero_stage deepspeed_stage",
    "--deepspeed_config=config/ds/zero2_offload.json": "offload cpu_offload offload_optimizer",
    "torchrun --nproc_per_node={} train_deepspeed.py": "gpus num_gpus n_gpus devices nproc_per_node",
}


def hint(name, value, known):
    """Return ": use ..." for an option that other scripts have instead of train_deepspeed.py's settings, or ""."""
    if "max_iters" in known:
        for ours, names in FOREIGN_OPTIONS.items():
            if name in names.split():
                return ": drop it" if str(value).lower() == "false" else f": use {ours.format(value or 'VALUE')}"
    return ""
