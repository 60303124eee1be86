"""Train the image classifier with one process per GPU: python launch_deepspeed.py --num_gpus 1 --fp16"""

import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent / "src" / "train_deepspeed.py"
sys.path[0] = str(SCRIPT.parents[3])  # instead of this folder, so that the next lines import the project's launcher

from configurator import settings_of_script
from launch_deepspeed import count_gpus, train

if __name__ == "__main__":
    settings = settings_of_script(SCRIPT, sys.argv[1:])  # exits for mistakes
    raise SystemExit(train(max(1, settings.num_gpus or count_gpus()), SCRIPT, sys.argv[1:]))
