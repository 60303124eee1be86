"""Train the image classifier: start one process per GPU, forward signals, return the run's exit code.

    python launch_deepspeed.py --num_gpus 1
    python launch_deepspeed.py --epochs 50 --batch_size 64 --fp16 --num_workers 8

All other options go to the training script, which lists them: python src/train_deepspeed.py --help
"""

import argparse
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent / "src" / "train_deepspeed.py"
sys.path[0] = str(SCRIPT.parents[3])  # instead of this folder, so that the next lines import the project's launcher

from configurator import settings_of_script
from launch_deepspeed import count_gpus, exit_on_signals, fail, train
from runtime.output import protect_output


def parse_arguments():
    """Return (--num_gpus, the arguments of the training script). Exit with code 2 for mistakes."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = fail
    parser.add_argument("--num_gpus", type=int, help="number of GPUs, or of CPU processes (default: all GPUs, or 1)")
    parser.add_argument("--config", help="DeepSpeed's JSON: the training script's --deepspeed_config")
    own, args = parser.parse_known_args()
    args += [f"--deepspeed_config={own.config}"] * bool(own.config)
    settings_of_script(SCRIPT, args)
    return own.num_gpus, args


if __name__ == "__main__":
    protect_output()
    sys.stdout.reconfigure(line_buffering=True)  # print before the ranks do
    exit_on_signals()
    num_gpus, args = parse_arguments()
    gpus = count_gpus()
    ranks = num_gpus if num_gpus is not None else gpus or 1
    if not 0 < ranks <= (gpus or ranks):
        fail(f"num_gpus={ranks} is not possible with {gpus} GPUs: use --num_gpus {gpus or 1}")
    train(ranks, args, str(SCRIPT))
