"""Time the parts of ZeRO-2's optimizer step in host memory, for GPT-2 XL: print them and write them as JSON.

    python results/offload_parts.py h200_x1_offload_parts.json
    python results/offload_parts.py OUT.json --parameters=1000000 --device=cpu    a trial without a GPU

CPU Adam and the copies run one after the other here; step_on_host() overlaps them, and is timed too. What DeepSpeed's
own step takes is printed by a run with "wall_clock_breakdown": true in its JSON.
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from torch.utils.benchmark import Timer

from runtime.engine.fused_adamw import Partition
from runtime.engine.offload import cpu_adam, step_on_host
from runtime.hardware import git_commit, machine_record

XL = 1_557_611_200  # parameters


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", help="output file")
    parser.add_argument("--parameters", type=int, default=XL)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()

    def host(dtype=torch.float32):
        return torch.zeros(args.parameters, dtype=dtype, pin_memory=args.device == "cuda")

    master = torch.nn.Parameter(host())
    master.grad, cast = host(), host(torch.bfloat16)
    state = {"step": 1, "exp_avg": host(), "exp_avg_sq": host()}
    grads = torch.full((args.parameters,), 1e-3, device=args.device)
    half = torch.zeros(args.parameters, dtype=torch.bfloat16, device=args.device)
    optimizer = DeepSpeedCPUAdam([master], lr=1e-4, adamw_mode=True)
    group = optimizer.param_groups[0]
    parts = {
        "CPU Adam": lambda: cpu_adam(optimizer, group, 1, master.data, master.grad, *list(state.values())[1:]),
        "fp32 gradients to the host": lambda: master.grad.copy_(grads),
        "bfloat16 weights to the GPU": lambda: half.copy_(cast),
        "cast to bfloat16 on the CPU": lambda: cast.copy_(master.data),
        "step_on_host": lambda: step_on_host(Partition(master, grads, half, group), state, optimizer)}
    ms = {}
    for name, part in parts.items():
        part()
        ms[name] = 1000 * Timer("part()", globals={"part": part}, num_threads=torch.get_num_threads()).timeit(3).median
        print(f"{name:>28} {ms[name]:8.1f} ms", flush=True)
    record = {"command": " ".join(sys.argv), "commit": git_commit(), **machine_record(args.device),
              "parameters": args.parameters, "ms": ms}
    Path(args.json).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
