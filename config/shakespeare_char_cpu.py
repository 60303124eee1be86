# Character-level Shakespeare from scratch without a GPU, on 2 ranks: nanoGPT's model for CPUs,
# trained with Muon.
#   python launch_deepspeed.py --nproc_per_node=2 train_deepspeed.py config/shakespeare_char_cpu.py
# 12 sequences x 2 ranks x 1 = 24 sequences of 64 = 1,536 characters per step.
# 1,003,854 / 1,536 = 654 steps per epoch.
out_dir = "out-shakespeare-char-cpu"
init_from = "scratch"
dataset = "shakespeare_char"
device = "cpu"

eval_interval = 150
eval_iters = 20  # 240 windows of each split
log_interval = 50
always_save_checkpoint = False

batch_size = 12
gradient_accumulation_steps = 1
block_size = 64

n_layer = 4
n_head = 4
n_embd = 128

optimizer = "muon"  # AdamW takes twice the time to the same loss (RESULTS.md)
learning_rate = 3e-3
muon_learning_rate = 0.03
max_iters = 600
lr_schedule = "linear"
min_lr = 0.0
warmup_iters = 100
beta2 = 0.99  # few tokens per step
