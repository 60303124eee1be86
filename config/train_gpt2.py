# GPT-2 small (124M) from scratch on OpenWebText, on 8 GPUs with 16 GB or more: docs/pretrain.md.
#   torchrun --nproc_per_node=8 train_deepspeed.py config/train_gpt2.py
# 12 sequences x 8 GPUs x 5 = 480 sequences of 1,024 = 491,520 tokens per step; 600,000 steps see 295 billion tokens.
out_dir = "out-gpt2"
init_from = "scratch"
dataset = "openwebtext"

n_layer = 12
n_head = 12
n_embd = 768

eval_interval = 1000
eval_iters = 200
log_interval = 10
max_iters = 600_000

batch_size = 12
gradient_accumulation_steps = 5  # per GPU; nanoGPT's 40 is for all 8

learning_rate = 6e-4
warmup_iters = 2000
