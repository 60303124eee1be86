# GPT-2 XL on one GPU with 40 GB (A100). --dry_run=True --target_gpu=40 estimates 35.52 GB.
#   python train_deepspeed.py config/xl_shakespeare.py config/presets/40gb.py
batch_size = 2
gradient_accumulation_steps = 16  # 2 x 16 = 32 sequences per step, like 1 x 32
