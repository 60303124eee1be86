# GPT-2 XL on one GPU with 24 GB and bfloat16 (A10, L4, 3090, 4090), without offload.
# --dry_run=True --target_gpu=24 estimates 20.13 GB.
#   python train_deepspeed.py config/xl_shakespeare.py config/presets/24gb.py
batch_size = 8
gradient_accumulation_steps = 4  # 8 x 4 = 32 sequences per step, like 1 x 32
gradient_checkpointing = True
compact_optimizer = True  # 4 bytes of optimizer state per parameter instead of 12: 8-bit moments
