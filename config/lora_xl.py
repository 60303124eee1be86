# Fine-tune GPT-2 XL on Shakespeare with LoRA of rank 64, on one GPU with 8 GB or more.
#   python train_deepspeed.py config/lora_xl.py
# It trains 78.6M parameters. With --lora_rank=320 it trains 393.2M, on one GPU with 16 GB or more.
# 1 sequence x 1 GPU x 32 = 32 sequences of 1,024 = 32,768 tokens per step.
# 301,966 / 32,768 = 9.2 steps per epoch.
# On a larger GPU, --batch_size=8 --gradient_accumulation_steps=4 --gradient_checkpointing=False
# takes half the time.
out_dir = "out-shakespeare-xl-lora"
init_from = "gpt2-xl"
dataset = "shakespeare"

lora_rank = 64
lora_dropout = 0.05

eval_interval = 10
max_iters = 60
always_save_checkpoint = False

batch_size = 1
gradient_accumulation_steps = 32
gradient_checkpointing = True

learning_rate = 2e-4  # full fine-tuning: 3e-5
weight_decay = 0.0
