"""Train the image classifier with one process per GPU: python launch_deepspeed.py --num_gpus 1 --fp16

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
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.error = fail
    parser.add_argument("--num_gpus", type=int, help="number of GPUs, or of CPU processes (default: all GPUs, or 1)")
    parser.add_argument("--config", help="DeepSpeed's JSON: the training script's --deepspeed_config")
    own, args = parser.parse_known_args()
    if own.num_gpus is not None and own.num_gpus < 1:
        fail(f"--num_gpus={own.num_gpus} must be at least 1")
    args += [f"--deepspeed_config={own.config}"] * bool(own.config)
    settings_of_script(SCRIPT, args)
    return own.num_gpus, args


if __name__ == "__main__":
    protect_output()
    sys.stdout.reconfigure(line_buffering=True)  # print before the ranks do
    exit_on_signals()
    num_gpus, args = parse_arguments()
    train(num_gpus or count_gpus() or 1, args, str(SCRIPT))
