# nanoGPT's defaults. Put this file before a nanoGPT config, which only has what differs from them.
#   python train_deepspeed.py config/nanogpt.py ../nanoGPT/config/train_shakespeare_char.py
# gradient_accumulation_steps is per GPU here, so divide nanoGPT's by the number of GPUs.
out_dir = "out"
init_from = "scratch"
dataset = "openwebtext"

eval_interval = 2000
eval_iters = 200
max_iters = 600_000

batch_size = 12
gradient_accumulation_steps = 40

bias = False

learning_rate = 6e-4
warmup_iters = 2000
lr_decay_iters = 600_000
min_lr = 6e-5
