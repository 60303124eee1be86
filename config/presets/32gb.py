# GPT-2 XL on one GPU with 32 GB, with offload: a V100, which trains in float16. A 5090 can also
# take 24gb.py, which doesn't need the CPU's cores.
# --dry_run=True --target_gpu=32 estimates 23.67 GB.
#   python train_deepspeed.py config/xl_shakespeare.py config/presets/32gb.py
batch_size = 4
gradient_accumulation_steps = 8  # 4 x 8 = 32 sequences per step, like 1 x 32
deepspeed_config = "config/ds/zero2_offload.json"  # the optimizer takes 25 GB of host memory
