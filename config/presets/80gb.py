# GPT-2 XL on one GPU with 80 GB (A100, H100). --dry_run=True --target_gpu=80 estimates 71.57 GB.
#   python train_deepspeed.py config/xl_shakespeare.py config/presets/80gb.py
batch_size = 16
gradient_accumulation_steps = 2  # 16 x 2 = 32 sequences per step, like 1 x 32
