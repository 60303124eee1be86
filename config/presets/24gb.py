# GPT-2 XL on one GPU with 24 GB (A10, L4, 3090, 4090), without offload.
# --dry_run=True --target_gpu=24 estimates 19.99 GB; not measured yet (docs/memory.md).
#   python train_deepspeed.py config/xl_shakespeare.py config/presets/24gb.py
batch_size = 4
gradient_accumulation_steps = 8  # 4 x 8 = 32 sequences per step, like 1 x 32
gradient_checkpointing = True
compact_optimizer = True  # or offload: --compact_optimizer=False --batch_size=2
# --gradient_accumulation_steps=16 --deepspeed_config=config/ds/zero2_offload.json
