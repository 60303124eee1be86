# GPT-2 XL on one GPU with 24 GB (A10, L4, 3090, 4090).
# --dry_run=True --target_gpu=24 estimates 17.81 GB.
#   python train_deepspeed.py config/xl_shakespeare.py config/presets/24gb.py
batch_size = 2
gradient_accumulation_steps = 16  # 2 x 16 = 32 sequences per step, like 1 x 32
deepspeed_config = "config/ds/zero2_offload.json"  # the optimizer takes 25 GB of host memory
