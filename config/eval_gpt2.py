# Evaluate OpenAI's weights on a dataset, without training. --init_from: gpt2, gpt2-medium, gpt2-large or gpt2-xl.
#   python train_deepspeed.py config/eval_gpt2.py --init_from=gpt2-xl --dataset=openwebtext
out_dir = "out-eval-gpt2"
init_from = "gpt2"

eval_only = True
eval_iters = 500
batch_size = 8
