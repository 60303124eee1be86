# GPT-2 XL on one GPU with 40 GB (A100). Put it after the config:
#   python train_deepspeed.py config/xl_shakespeare.py config/presets/40gb.py
# Estimate: 35.52 GB. See its parts with --dry_run=True --target_gpu=40
batch_size = 2
gradient_accumulation_steps = 16  # 2 x 16 = 32 sequences per step, like 1 x 32
