# GPT-2 XL on a GPU with 32 GB (5090); a V100 trains in float16. After the configuration:
#   python train_deepspeed.py config/xl_shakespeare.py config/presets/32gb.py
# Plan: 22.68 GB, which --dry_run=True --target_gpu=32 shows in its parts.
batch_size = 4
gradient_accumulation_steps = 8  # 4 x 8 = 32 sequences per step, as 1 x 32
gradient_checkpointing = False
deepspeed_config = "config/ds/zero2_offload.json"  # the optimizer in host memory: 25 GB of it
