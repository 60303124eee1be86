# Character-level Shakespeare from scratch on one GPU, with Muon: nanoGPT's model, 10.7M parameters.
#   python train_deepspeed.py config/shakespeare_char.py
# GPUs without bfloat16 need --dtype=float32.
# 64 sequences x 1 GPU x 1 = 64 sequences of 256 = 16,384 characters per step.
# 1,003,854 / 16,384 = 61 steps per epoch.
out_dir = "out-shakespeare-char"
init_from = "scratch"
dataset = "shakespeare_char"

eval_interval = 100
eval_iters = 7  # 448 windows; the validation split has 435
log_interval = 10
always_save_checkpoint = False

batch_size = 64
gradient_accumulation_steps = 1
block_size = 256

n_layer = 6
n_head = 6
n_embd = 384
dropout = 0.2

optimizer = "muon"
learning_rate = 1e-3
muon_learning_rate = 0.02  # 0.01 and 0.04 give higher losses (results/h200_x1_char_muon.json)
max_iters = 1000
lr_schedule = "linear"
min_lr = 0.0
warmup_iters = 100
beta2 = 0.99  # few tokens per step
