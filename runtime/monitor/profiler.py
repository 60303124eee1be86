"""profile=True: the model's FLOPs by DeepSpeed's profiler, and a trace of some steps by PyTorch's."""

from pathlib import Path

import torch

from runtime.cluster.ranks import RANK, print0
from runtime.files import remove_links, write_atomic

LAST_STEP = 7  # of the trace; the first five steps compile


def count_flops(model, file):
    """Return the FLOPs per token of a forward by DeepSpeed's profiler, and write those of each module to a file. It
    can't count what is compiled, fused or sharded."""
    from deepspeed.profiling.flops_profiler import get_model_profile

    tokens = torch.zeros((1, model.config.block_size), dtype=torch.long, device=model.lm_head.weight.device)
    with torch.no_grad():
        counted, *_ = get_model_profile(model, args=[tokens], warm_up=0, as_string=False, output_file=str(file))
    model.train()
    return counted / model.config.block_size


class Profiler:
    """Writes flops.txt, and for two steps a trace per rank and operations.txt, into out_dir/profile. Create it before
    compiling the model, call start() before the first step, step() after each, and close() at the end."""

    def __init__(self, model, out_dir):
        self.folder = Path(out_dir, "profile")
        if self.folder.is_symlink():  # in a folder where others write, it may lead anywhere
            self.folder.unlink(missing_ok=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_links(self.folder)
        if RANK == 0:
            print0(f"{count_flops(model, self.folder / 'flops.txt'):.4g} FLOPs per token in a forward, by DeepSpeed")
        schedule = torch.profiler.schedule(skip_first=LAST_STEP - 3, wait=0, warmup=1, active=2, repeat=1)
        self.profiler = torch.profiler.profile(acc_events=True, on_trace_ready=self.write, schedule=schedule)
        self.start, self.close = self.profiler.start, self.profiler.stop

    def step(self):
        """End a step. Return whether it was the last one of the trace, which is then written."""
        self.profiler.step()
        return self.profiler.step_num == LAST_STEP

    def write(self, profiler):
        """Write the trace. A failure is reported, and the run continues."""
        try:
            profiler.export_chrome_trace(str(self.folder / f"trace_rank{RANK}.json.gz"))
            if RANK == 0:
                sort_by = "self_cuda_time_total" if torch.cuda.is_initialized() else "self_cpu_time_total"
                operations = profiler.key_averages().table(sort_by=sort_by, row_limit=40)
                write_atomic(self.folder / "operations.txt", operations)
                print0(f"wrote a trace: see {self.folder}/operations.txt, or open trace_rank*.json.gz in "
                       "https://ui.perfetto.dev")
        except (OSError, RuntimeError) as error:  # the latter is PyTorch's
            print(f"rank {RANK}: cannot write the trace: {error}", flush=True)
