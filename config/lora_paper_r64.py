# Fine-tune GPT-2 XL with LoRA of rank 64 for 3 epochs, on one GPU with 12 GB or more. Each epoch saves a checkpoint.
#   python train_deepspeed.py config/lora_paper_r64.py --dataset=mine
#   python export_hf.py --out_dir=out-lora-paper-r64 --tag=final --to=final_model
# 8 sequences x 1 GPU x 8 = 64 sequences of 1,024 = 65,536 tokens per step; 301,966 / 65,536 = 4.6 steps per epoch.
out_dir = "out-lora-paper-r64"
init_from = "gpt2-xl"
dataset = "shakespeare"

lora_rank = 64
lora_dropout = 0.05

eval_epochs = 1.0
max_epochs = 3.0

batch_size = 8
gradient_accumulation_steps = 8
gradient_checkpointing = True

learning_rate = 2e-4
weight_decay = 0.0
