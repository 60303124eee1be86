"""profile=True: the model's FLOPs by DeepSpeed's profiler, and a trace of some steps by PyTorch's."""

import contextlib
import io
from pathlib import Path

import torch

from runtime.cluster.ranks import RANK, print0


def count_flops(model):
    """Return (a line that compares DeepSpeed's FLOPs with our formula's, DeepSpeed's table of FLOPs per module). Both
    count the masked positions of attention. DeepSpeed can't count what is compiled, fused or sharded."""
    from deepspeed.profiling.flops_profiler import get_model_profile

    config, table, training = model.config, io.StringIO(), model.training
    tokens = torch.zeros((1, config.block_size), dtype=torch.long, device=model.lm_head.weight.device)
    with torch.no_grad(), contextlib.redirect_stdout(table):
        counted = get_model_profile(model, args=[tokens], warm_up=0, as_string=False)[0] / config.block_size
    model.train(training)
    ours = 2 * model.num_params(positions=False) + 4 * config.n_layer * config.n_embd * config.block_size
    return (f"forward FLOPs per token: {ours:.4g} by our formula, {counted:.4g} by DeepSpeed's profiler "
            f"({100 * abs(counted / ours - 1):.2f}% apart)", table.getvalue())


class Profiler:
    """Writes a trace per rank, operations.txt and flops.txt into out_dir/profile, for two steps after the first five,
    which compile. Create it before compiling the model, call start() before the first step and step() after each."""

    def __init__(self, model, out_dir):
        self.folder, self.left = Path(out_dir, "profile"), 7
        self.flops = count_flops(model) if RANK == 0 else ("", "")
        print0(self.flops[0])
        self.sort_by = "self_cuda_time_total" if model.lm_head.weight.is_cuda else "self_cpu_time_total"
        self.profiler = torch.profiler.profile(
            acc_events=True, on_trace_ready=self.write,
            schedule=torch.profiler.schedule(skip_first=4, wait=0, warmup=1, active=2, repeat=1))
        self.start = self.profiler.start

    def step(self):
        """End a step. Return whether it was the last one of the trace, which is then written."""
        self.left -= 1
        if self.left >= 0:
            self.profiler.step()
        return self.left == 0

    def close(self):
        """Stop the profiler. If the run ended before the last step of the trace, write no trace."""
        if self.left > 0:
            print0("no trace: the run ended before the last step to trace")
            self.profiler.on_trace_ready = None
        self.profiler.stop()

    def write(self, profiler):
        """Write all files. A failure is reported, and the run continues."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(self.folder / f"trace_rank{RANK}.json.gz"))
            if RANK == 0:
                operations = profiler.key_averages().table(sort_by=self.sort_by, row_limit=40)
                (self.folder / "operations.txt").write_text(operations, encoding="utf-8")
                (self.folder / "flops.txt").write_text("\n".join(self.flops), encoding="utf-8")
                print0(f"traced 2 steps: see {self.folder}/operations.txt, or open trace_rank*.json.gz in "
                       "https://ui.perfetto.dev")
        except (OSError, RuntimeError) as error:  # the latter is PyTorch's
            print(f"rank {RANK}: cannot write the trace: {error}", flush=True)
