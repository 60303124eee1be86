# GPT-2 XL on a card of 24 GB (A10, L4, 3090, 4090). After the configuration:
#   python train_deepspeed.py config/xl_shakespeare.py config/presets/24gb.py
# Plan: 16.83 GB, which --dry_run=True --target_gpu=24 shows in its parts.
batch_size = 2
gradient_accumulation_steps = 16  # 2 x 16 = 32 sequences per step, as 1 x 32
gradient_checkpointing = False
deepspeed_config = "config/ds/zero2_offload.json"  # the optimizer in host memory: 25 GB of it
