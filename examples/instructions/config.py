# Learn to add, reverse and copy from instructions without a GPU, on 2 ranks, by character (docs/chat.md).
#   python examples/instructions/generate.py
#   python data/prepare.py examples/instructions/train.jsonl --format=chat --tokenizer=char --name=instructions
#   python launch_deepspeed.py --nproc_per_node=2 train_deepspeed.py examples/instructions/config.py
out_dir = "out-sft-cpu"
init_from = "scratch"
dataset = "instructions"
device = "cpu"

eval_interval = 550
log_interval = 50
always_save_checkpoint = False

batch_size = 32
gradient_accumulation_steps = 1
block_size = 36  # a prompt with its answer
n_layer = 3
n_head = 4
n_embd = 128

learning_rate = 2e-3
max_iters = 1100
min_lr = 1e-4
warmup_iters = 100
beta2 = 0.99  # few tokens per step
