# GPT-2 XL on a card of 80 GB (A100, H100). After the configuration:
#   python train_deepspeed.py config/xl_shakespeare.py config/presets/80gb.py
# Plan: 71.57 GB, which --dry_run=True --target_gpu=80 shows in its parts.
batch_size = 16
gradient_accumulation_steps = 2  # 16 x 2 = 32 sequences per step, as 1 x 32
gradient_checkpointing = False
deepspeed_config = "ds_config_zero2.json"
