# Evaluate OpenAI's gpt2-large (774M) on a dataset, without training.
#   python train_deepspeed.py config/eval_gpt2_large.py --dataset=openwebtext
out_dir = "out-eval-gpt2-large"
init_from = "gpt2-large"
dataset = "shakespeare"

eval_only = True
eval_iters = 500
batch_size = 8
