# Evaluate OpenAI's gpt2-xl (1.5B) on a dataset, without training.
#   python train_deepspeed.py config/eval_gpt2_xl.py --dataset=openwebtext
out_dir = "out-eval-gpt2-xl"
init_from = "gpt2-xl"
dataset = "shakespeare"

eval_only = True
eval_iters = 500
batch_size = 8
