# Fine-tune GPT-2 XL on Shakespeare with ZeRO-2.
#   python launch_deepspeed.py --nproc_per_node=4 train_deepspeed.py config/xl_shakespeare.py
# 1 sequence x 4 GPUs x 32 = 128 sequences of 1,024 = 131,072 tokens per step.
# 301,966 / 131,072 = 2.3 steps per epoch, so 20 steps are 8.7 epochs.
# 8 x 4 instead of 1 x 32 is the same step, but faster. It needs more memory.
out_dir = "out-shakespeare-xl-deepspeed"
init_from = "gpt2-xl"
dataset = "shakespeare"

eval_interval = 5
max_iters = 20

batch_size = 1
gradient_accumulation_steps = 32

learning_rate = 3e-5
