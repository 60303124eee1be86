# GPT-2 small (124M) from scratch with Muon, on 8 GPUs with bfloat16 and 16 GB or more:
# docs/pretrain.md.
#   python launch_deepspeed.py --nproc_per_node=8 train_deepspeed.py config/train_gpt2.py
# On one GPU, add --gradient_accumulation_steps=40.
# 12 sequences x 8 GPUs x 5 = 480 sequences of 1,024 = 491,520 tokens per step.
# 20,000 steps see 9.8 billion tokens. By the speeds of one GPU, that takes 5.1 hours on one H200
# with 60 x 8, and 0.7 on eight H100s with 60 x 1. Expect about 3.28 on FineWeb, AdamW's validation
# loss after as many tokens (llm.c). Muon's is not measured.
# nanoGPT's recipe: --optimizer=adamw --learning_rate=6e-4 --lr_schedule=cosine --min_lr=6e-5
# --warmup_iters=2000 --max_iters=600000 --bias=False. Without biases, attention is in bfloat16
# (docs/pretrain.md#when-training-becomes-unstable): add --on_rising_norms=stop
out_dir = "out-gpt2"
init_from = "scratch"
dataset = "openwebtext"

n_layer = 12
n_head = 12
n_embd = 768

eval_interval = 1000
eval_iters = 200
log_interval = 10
max_iters = 20_000

batch_size = 12
gradient_accumulation_steps = 5  # per GPU; nanoGPT's 40 is for all 8

optimizer = "muon"
muon_learning_rate = 0.02
learning_rate = 3.6e-3  # of AdamW's part: embeddings, biases and layer norms
lr_schedule = "linear"
min_lr = 0.0
warmup_iters = 1000
