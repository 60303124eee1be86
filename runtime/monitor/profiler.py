"""profile=True: the model's FLOPs by DeepSpeed's profiler, and a trace of some steps by
PyTorch's."""

from pathlib import Path

import torch
from torch import nn

from runtime.cluster.ranks import RANK, print0
from runtime.files import remove_links, write_atomic
from runtime.model_parts import evaluating
from runtime.output import counted

LAST_STEP = 7  # of the trace; the first five steps compile
TRACED = 2  # steps


def count_flops(model: nn.Module, file: Path) -> float:
    """Return the FLOPs per token of a forward by DeepSpeed's profiler, and write those of each
    module to a file. It can't count what is compiled, fused or sharded."""
    from deepspeed.profiling.flops_profiler import get_model_profile

    T = model.config.block_size
    tokens = torch.zeros((1, T), dtype=torch.long, device=model.lm_head.weight.device)
    with evaluating(model), torch.no_grad():
        flops, *_ = get_model_profile(
            model, args=[tokens], warm_up=0, as_string=False, output_file=str(file)
        )
    return flops / T


class Profiler:
    """Writes flops.txt, and for two steps a trace per rank and operations.txt, into
    out_dir/profile.

    Create it before compiling the model, which counts its FLOPs. Call start() before the first
    step, step() after each, and close() at the end.
    """

    def __init__(self, model: nn.Module, out_dir: str) -> None:
        # A folder without links, through which others could have a file overwritten
        self.folder = Path(out_dir, "profile")
        if self.folder.is_symlink():  # in a folder where others write, it may lead anywhere
            self.folder.unlink(missing_ok=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_links(self.folder)
        if RANK == 0:
            flops = count_flops(model, self.folder / "flops.txt")
            print0(f"{flops:.4g} FLOPs per token in a forward, by DeepSpeed")
        self.is_traced = False
        # The trace: a step to warm up, and then those that are traced
        schedule = torch.profiler.schedule(
            skip_first=LAST_STEP - TRACED - 1, wait=0, warmup=1, active=TRACED, repeat=1
        )
        self.profiler = torch.profiler.profile(
            acc_events=True, on_trace_ready=self.write, schedule=schedule
        )

    def start(self) -> None:
        """Begin the first step."""
        self.profiler.start()

    def step(self) -> bool:
        """End a step. Return whether it was the last one of the trace, which is then written."""
        self.profiler.step()
        return self.profiler.step_num == LAST_STEP

    def close(self) -> None:
        """End the last step. If the run was too short for the trace, report it."""
        self.profiler.stop()
        steps = self.profiler.step_num
        if not self.is_traced:
            print0(
                f"note       profile=True wrote no trace: this run made {counted(steps, 'step')}, "
                f"and the trace is of steps {LAST_STEP - TRACED + 1} to {LAST_STEP}: let it run on"
            )

    def write(self, profiler: torch.profiler.profile) -> None:
        """Write the trace. A failure is reported, and the run continues."""
        self.is_traced = True
        try:
            profiler.export_chrome_trace(str(self.folder / f"trace_rank{RANK}.json.gz"))
            if RANK == 0:
                self.write_operations(profiler)
        except (OSError, RuntimeError) as error:  # the latter is PyTorch's
            print(f"rank {RANK}: cannot write the trace: {error}", flush=True)

    def write_operations(self, profiler: torch.profiler.profile) -> None:
        """Write the operations that take most time as a table."""
        sort_by = "self_cpu_time_total"
        if torch.cuda.is_initialized():
            sort_by = "self_cuda_time_total"
        operations = profiler.key_averages().table(sort_by=sort_by, row_limit=40)
        write_atomic(self.folder / "operations.txt", operations)
        print0(
            f"wrote a trace: see {self.folder}/operations.txt, or open trace_rank*.json.gz in "
            "https://ui.perfetto.dev"
        )
