# GPT-2 XL on a card of 40 GB (A100). After the configuration:
#   python train_deepspeed.py config/xl_shakespeare.py config/presets/40gb.py
# Plan: 35.52 GB, which --dry_run=True --target_gpu=40 shows in its parts.
batch_size = 2
gradient_accumulation_steps = 16  # 2 x 16 = 32 sequences per step, as 1 x 32
gradient_checkpointing = False
deepspeed_config = "ds_config_zero2.json"
