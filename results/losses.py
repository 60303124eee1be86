"""Train GPT-2 small from scratch with fast paths turned on and off, on the same tokens, and record the losses.

    python results/losses.py h100_x1_losses.json --dataset=packages
    python results/losses.py h200_x2_losses.json --gpus=2 --dataset=packages

The dataset is that of results/race.py. Options of train_deepspeed.py are added to each run. results/table.py reads
files of these names.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from runtime.git import git_commit
from runtime.monitor.history import read_history

RECIPE = ("--init_from=scratch --n_layer=12 --n_head=12 --n_embd=768 --batch_size=8 --gradient_accumulation_steps=4 "
          "--optimizer=adamw --learning_rate=6e-4 --warmup_iters=100 --max_iters=500 --eval_interval=250 "
          "--eval_iters=16 --keep_last=0 --log_interval=10").split()
VARIANTS = {  # what is turned on or off: options, after RECIPE
    "8 x 4": [],
    "another seed": ["--seed=1338"],
    "32 x 1": ["--batch_size=32", "--gradient_accumulation_steps=1"],
    "without a CUDA graph": ["--deepspeed_config={launched}"],
    "`--compile=False`": ["--compile=False"],
    "`--fp8=True`": ["--fp8=True"]}
TWO_GPUS = {
    "`--accumulate_locally=False`": ["--accumulate_locally=False"],
    "`--accumulate_locally=True`": ["--accumulate_locally=True"],
    "ZeRO-3": ["--deepspeed_config=ds_config_zero3.json"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--gpus", type=int, default=1)
    args, settings = parser.parse_known_args()
    record = {"what": "GPT-2 small from scratch, with fast paths turned on and off, on the same tokens",
              "command": " ".join(["results/losses.py", *sys.argv[1:]]), "recipe": " ".join(RECIPE),
              "commit": git_commit(), "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()), "runs": {}}
    with tempfile.TemporaryDirectory() as folder:
        preset = json.loads((ROOT / "ds_config_zero2.json").read_text()) | {"wall_clock_breakdown": True}
        launched = Path(folder, "launched.json")  # DeepSpeed's timers, which a CUDA graph can't hold
        launched.write_text(json.dumps(preset))
        for name, options in (VARIANTS if args.gpus == 1 else TWO_GPUS).items():
            options = [option.format(launched=launched) for option in options]
            accumulation = [] if args.gpus == 1 else [f"--gradient_accumulation_steps={4 // args.gpus}"]
            out_dir = Path(folder, str(len(record["runs"])))
            subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone",
                            f"--nproc_per_node={args.gpus}", ROOT / "train_deepspeed.py", *RECIPE, *accumulation,
                            *options, *settings, f"--out_dir={out_dir}"], check=True)
            run, history = json.loads((out_dir / "settings.json").read_text()), read_history(out_dir)
            record |= {key: run[key] for key in ("hardware", "world_size", "versions")}
            record["runs"][name] = {"options": " ".join(options).replace(f"{folder}/", ""),
                                    "loss": [r["loss"] for r in history if "loss" in r],
                                    "val": [r["val_loss"] for r in history if "val_loss" in r]}
            Path(args.file).write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
