# Character-level Shakespeare from scratch without a GPU, on 2 ranks: nanoGPT's model and batch, with Muon.
#   torchrun --nproc_per_node=2 train_deepspeed.py config/shakespeare_char_cpu.py
# 6 sequences x 2 ranks x 1 = 12 sequences of 64 = 768 characters per step; 1,003,854 / 768 = 1,307 steps per epoch.
out_dir = "out-shakespeare-char-cpu"
init_from = "scratch"
dataset = "shakespeare_char"
device = "cpu"

eval_interval = 250
eval_iters = 40  # 240 windows of each split
log_interval = 50
always_save_checkpoint = False

batch_size = 6
gradient_accumulation_steps = 1
block_size = 64
n_layer = 4
n_head = 4
n_embd = 128

optimizer = "muon"  # validation loss 1.6871; AdamW's is 1.7865 after twice as many steps, decayed to 1e-4 by a cosine
learning_rate = 2e-3
max_iters = 1000
lr_schedule = "linear"
min_lr = 0.0
warmup_iters = 100
beta2 = 0.99  # few tokens per step
