# GPT-2 XL on one GPU with 16 GB; a T4 or V100 trains in float16.
# --dry_run=True --target_gpu=16 estimates 13.87 GB.
#   python train_deepspeed.py config/xl_shakespeare.py config/presets/16gb.py
batch_size = 8
gradient_accumulation_steps = 4  # 8 x 4 = 32 sequences per step, like 1 x 32
gradient_checkpointing = True
deepspeed_config = "config/ds/zero2_offload.json"  # the optimizer takes 25 GB of host memory
