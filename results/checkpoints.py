"""Time saves and resumes of GPT-2 XL from random weights on all GPUs of this machine.

    python results/checkpoints.py h200_x2_checkpoints.json --dataset=shakespeare

A new run saves twice. With several GPUs, it resumes on half of them, and on all again. Without a GPU, two ranks run.
Options of train_deepspeed.py are added to each run. results/table.py reads files of this name, and
h100_x1_checkpoints.json.
"""

import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch

from runtime.git import git_commit
from runtime.monitor.history import read_history

OPTIONS = ("--init_from=scratch --n_layer=48 --n_head=25 --n_embd=1600 --batch_size=8 --eval_iters=1 --keep_last=1 "
           "--eval_interval=5").split()


def main():
    path, *more = sys.argv[1:]
    gpus = torch.cuda.device_count() or 2
    record = {"what": "saves and resumes of GPT-2 XL", "command": " ".join(["results/checkpoints.py", *sys.argv[1:]]),
              "commit": git_commit(), "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()), "runs": {}}
    runs = {"new": (gpus, 10)} | ({f"resumed, {gpus} to {gpus // 2}": (gpus // 2, 12),
                                   f"resumed, {gpus // 2} to {gpus}": (gpus, 14)} if gpus > 1 else {})
    known = 0  # saves of the runs before, which stay in history.jsonl
    with tempfile.TemporaryDirectory() as folder:
        for name, (ranks, steps) in runs.items():
            options = [*OPTIONS, f"--gradient_accumulation_steps={4 * gpus // ranks}", f"--max_iters={steps}",
                       *more, f"--out_dir={folder}"]
            if name != "new":
                options.append("--init_from=resume")
            output = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone",
                                     f"--nproc_per_node={ranks}", ROOT / "train_deepspeed.py", *options],
                                    check=True, stdout=subprocess.PIPE, text=True).stdout
            run = json.loads(Path(folder, "settings.json").read_text())
            record["versions"] = run["versions"]
            record.setdefault("hardware", run["hardware"])
            saves = [r for r in read_history(folder) if "saved" in r][known:]
            known += len(saves)
            times = re.search(r"its files were checked in (\S+) s.*^loaded in (\S+) s", output, re.M | re.S)
            record["runs"][name] = {"gpus": ranks, "gb": saves[0]["bytes"] / 1e9,
                                    "verify_and_load_s": times and times.groups(),
                                    "save_s": [r["save_s"] for r in saves],
                                    "blocked_s": [r["blocked_s"] for r in saves]}
            Path(path).write_text(json.dumps(record, indent=1))
            print(name, record["runs"][name], flush=True)


if __name__ == "__main__":
    main()
