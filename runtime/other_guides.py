"""Name our setting for an option of other training scripts, such as --fp16 or --zero_stage=3.

docs/guides.md translates whole commands.
"""

import shlex

LAUNCH = "start it by python launch_deepspeed.py --nproc_per_node={} train_deepspeed.py"
PREPARE = "prepare the text by python data/prepare.py {} --name=mine, and write --dataset=mine"
PREPARE_VAL = (
    "prepare it by python data/prepare.py my.txt --val={} --name=mine, and write --dataset=mine"
)
RESUME = "write --init_from=resume, and --resume_tag=iter_10 for another than the newest"
ZERO3 = "write --deepspeed_config=ds_config_zero3.json"
OFFLOAD = "write --deepspeed_config=config/ds/zero2_offload.json"

# What to do instead, with {} for the value. Names that did_you_mean() finds are not here
INSTEAD = {
    "config": "write {} alone, without --config",
    # Precision
    "fp16": "write --dtype=float16",
    "half": "write --dtype=float16",
    "bf16": "write --dtype=bfloat16",
    "mixed_precision": "write --dtype=bfloat16 or --dtype=float16",
    "precision": "write --dtype=bfloat16 or --dtype=float16",
    "amp": "write --dtype=float16",
    # Batch and length of the run
    "per_device_train_batch_size": "write --batch_size={}",
    "micro_batch_size": "write --batch_size={}",
    "train_micro_batch_size_per_gpu": "write --batch_size={}",
    "accumulate_grad_batches": "write --gradient_accumulation_steps={}",
    "grad_accum": "write --gradient_accumulation_steps={}",
    "max_steps": "write --max_iters={}",
    "num_steps": "write --max_iters={}",
    "train_steps": "write --max_iters={}",
    "epochs": "write --max_epochs={}",
    "num_epochs": "write --max_epochs={}",
    "num_train_epochs": "write --max_epochs={}",
    # Optimizer
    "lr": "write --learning_rate={}",
    "wd": "write --weight_decay={}",
    "warmup_steps": "write --warmup_iters={}",
    "num_warmup_steps": "write --warmup_iters={}",
    "lr_scheduler_type": "write --lr_schedule=cosine, linear or constant",
    "gradient_clipping": "write --grad_clip={}",
    "gradient_clip_val": "write --grad_clip={}",
    "clip_grad": "write --grad_clip={}",
    "max_grad_norm": "write --grad_clip={}",
    "max_length": "write --block_size={}",
    "max_seq_length": "write --block_size={}",
    "max_seq_len": "write --block_size={}",
    "model_max_length": "write --block_size={}",
    "context_length": "write --block_size={}",
    "seq_len": "write --block_size={}",
    # Checkpoints and the log
    "save_interval": "write --eval_interval={}: every evaluation saves",
    "save_steps": "write --eval_interval={}: every evaluation saves",
    "save_every": "write --eval_interval={}: every evaluation saves",
    "save_strategy": "write --eval_epochs=1, or --eval_interval for steps: every evaluation saves",
    "eval_strategy": "write --eval_epochs=1, or --eval_interval for steps",
    "evaluation_strategy": "write --eval_epochs=1, or --eval_interval for steps",
    "save_freq": "write --eval_interval={}: every evaluation saves",
    "eval_steps": "write --eval_interval={}",
    "logging_steps": "write --log_interval={}",
    "save_total_limit": "write --keep_last={}",
    "checkpoint_dir": "write --out_dir={}",
    "output_dir": "write --out_dir={}",
    "save_dir": "write --out_dir={}",
    "resume": "write --init_from=resume",
    "resume_from_checkpoint": RESUME,
    "load_checkpoint": RESUME,
    # Weights and data
    "model": "write --init_from={}",
    "model_name": "write --init_from={}",
    "model_type": "write --init_from={}",
    "model_name_or_path": "write --init_from={}",
    "data_path": PREPARE,
    "data_dir": PREPARE,
    "train_file": PREPARE,
    "validation_file": PREPARE_VAL,
    # Features
    "report_to": "write --wandb_log=True or --tensorboard_log=True",
    "wandb": "write --wandb_log=True",
    "use_lora": "write --lora_rank=64",
    "peft": "write --lora_rank=64",
    "lora_r": "write --lora_rank={}",
    "activation_checkpointing": "write --gradient_checkpointing=True",
    "torch_compile": "write --compile=True",
    "deepspeed": "write --deepspeed_config={}",
    "fsdp": ZERO3,
    "offload": OFFLOAD,
    "cpu_offload": OFFLOAD,
    "offload_optimizer": OFFLOAD,
    # GPUs
    "gpus": LAUNCH,
    "num_gpus": LAUNCH,
    "n_gpus": LAUNCH,
    "devices": LAUNCH,
    "nproc_per_node": LAUNCH,
    "ngpu": LAUNCH,
}
STAGES = ("zero", "stage", "zero_stage", "deepspeed_stage")


def instead_of(name: str, value: object) -> str | None:
    """Return what to write instead of an option of other scripts.

    Return None if it is none of these.
    """
    text = str(value)
    # The stage of ZeRO: each number has another answer
    if name in STAGES:
        if text in ("0", "1", "2"):
            return "drop it: ZeRO-2 is the default, and stages 0 and 1 run as it"
        return ZERO3
    if name not in INSTEAD:
        return None
    if text.lower() in ("false", "no"):
        return "drop it"

    # Put the value into the sentence. Only a number can be one of GPUs, not their list or "auto"
    value_shown = "VALUE"
    if INSTEAD[name] is LAUNCH and not text.isdecimal():
        value_shown = "GPUS"
    elif text:
        value_shown = shlex.quote(text)
    return INSTEAD[name].format(value_shown)
