# Character-level Shakespeare from scratch on one GPU: nanoGPT's settings, 10.7M parameters.
#   python train_deepspeed.py config/shakespeare_char.py
# 64 sequences x 1 GPU x 1 = 64 sequences of 256 = 16,384 characters per step; 1,003,854 / 16,384 = 61 steps per epoch.
out_dir = "out-shakespeare-char"
init_from = "scratch"
dataset = "shakespeare_char"

eval_interval = 250
eval_iters = 7  # 448 windows; the validation split has 435
log_interval = 10
always_save_checkpoint = False  # it overfits after about 2,000 steps, so keep the best checkpoint only

batch_size = 64
gradient_accumulation_steps = 1
block_size = 256
n_layer = 6
n_head = 6
n_embd = 384
dropout = 0.2

learning_rate = 1e-3
max_iters = 5000
warmup_iters = 100
beta2 = 0.99  # few tokens per step
