# Evaluate OpenAI's gpt2-medium (350M) on a dataset, without training.
#   python train_deepspeed.py config/eval_gpt2_medium.py --dataset=openwebtext
out_dir = "out-eval-gpt2-medium"
init_from = "gpt2-medium"
dataset = "shakespeare"

eval_only = True
eval_iters = 500
batch_size = 8
