# GPT-2 XL on Shakespeare by LoRA of rank 64, on one card of 16 GB and more.
#   python train_deepspeed.py config/lora_xl_r64.py
# Of 1,557.6M parameters none changes; 78.6M new ones learn: 64 x (6,400 + 3,200 + 8,000 + 8,000) a block, 48 times.
# 1 sequence x 1 GPU x 32 = 32 sequences of 1,024 = 32,768 tokens per step; 301,966 / 32,768 = 9.2 steps per epoch.
out_dir = "out-shakespeare-xl-lora"
init_from = "gpt2-xl"
dataset = "shakespeare"
wandb_run_name = "gpt2-xl-lora-64"

lora_rank = 64
lora_alpha = 64.0
lora_dropout = 0.05

eval_interval = 10
eval_iters = 20
max_iters = 60
always_save_checkpoint = False

batch_size = 1
gradient_accumulation_steps = 32
block_size = 1024
gradient_checkpointing = True

learning_rate = 2e-4  # what learns begins at nothing, and takes ten times the rate of whole weights
weight_decay = 0.0
