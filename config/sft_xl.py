# Fine-tune GPT-2 XL on conversations with ZeRO-2, with the loss on the answers (docs/chat.md).
#   python data/prepare.py chat.jsonl --format=chat --name=mychat
#   python launch_deepspeed.py --nproc_per_node=4 train_deepspeed.py config/sft_xl.py
# 1 row x 4 GPUs x 16 = 64 rows of 1,024 tokens per step. --batch_size=auto keeps this number with
# a larger micro-batch.
out_dir = "out-sft-xl"
init_from = "gpt2-xl"
dataset = "mychat"

eval_interval = 50
max_epochs = 3
patience = 3
always_save_checkpoint = False

batch_size = 1
gradient_accumulation_steps = 16

learning_rate = 1e-5
warmup_iters = 20
weight_decay = 0.0
