# Evaluate OpenAI's gpt2 (124M) on a dataset, without training.
#   python train_deepspeed.py config/eval_gpt2.py --dataset=openwebtext
out_dir = "out-eval-gpt2"
init_from = "gpt2"
dataset = "shakespeare"

eval_only = True
eval_iters = 500
batch_size = 8
