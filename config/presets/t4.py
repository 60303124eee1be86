# GPT-2 XL on a T4 (16 GB), or a V100 of 16 GB: float16. After the configuration:
#   python train_deepspeed.py config/xl_shakespeare.py config/presets/t4.py
# Plan: 13.87 GB, which --dry_run=True --gpu_gb=T4 shows in its parts.
batch_size = 8
gradient_accumulation_steps = 4  # 8 x 4 = 32 sequences a step, as 1 x 32
gradient_checkpointing = True
deepspeed_config = "config/ds/zero2_offload.json"  # the optimizer in host memory: 25 GB of it
dtype = "float16"  # these cards have no bfloat16
