# Fine-tune GPT-2 small on Shakespeare, on one GPU with 8 GB or more.
#   python train_deepspeed.py config/finetune_shakespeare.py
# 4 sequences x 1 GPU x 8 = 32 sequences of 1,024 = 32,768 tokens per step.
# 301,966 / 32,768 = 9.2 steps per epoch.
out_dir = "out-shakespeare"
init_from = "gpt2"
dataset = "shakespeare"

eval_interval = 10
eval_iters = 10  # 40 windows; the validation split has 35
always_save_checkpoint = False  # it overfits soon, so keep the best checkpoint only
max_iters = 60

batch_size = 4
gradient_accumulation_steps = 8

dropout = 0.1

learning_rate = 3e-5
decay_lr = False
