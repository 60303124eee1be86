# GPT-2 XL (1.5B) from scratch on OpenWebText with Muon, on 8 GPUs with 80 GB: docs/pretrain.md.
#   python launch_deepspeed.py --nproc_per_node=8 train_deepspeed.py config/train_gpt2_xl.py
# 8 sequences x 8 GPUs x 8 = 512 sequences of 1,024 = 524,288 tokens per step.
# 100,000 steps see 52.4 billion tokens. By the speed of one GPU, that takes 36 hours on eight
# H200s. It was not run. llm.c's run_gpt2_1558M.sh is another recipe: 32,000 steps of 1M tokens.
out_dir = "out-gpt2-xl"
init_from = "scratch"
dataset = "openwebtext"

n_layer = 48
n_head = 25
n_embd = 1600

eval_interval = 1000
eval_iters = 200
log_interval = 10
max_iters = 100_000

batch_size = 8
gradient_accumulation_steps = 8

optimizer = "muon"
muon_learning_rate = 0.02
# Of AdamW's part. With AdamW alone: 2e-4, GPT-3's for 1.3B (arXiv:2005.14165, table 2.1)
learning_rate = 1.8e-3
lr_schedule = "linear"
min_lr = 0.0
warmup_iters = 2000
