"""profile=True: the model's FLOPs by DeepSpeed's profiler, and a trace of some iterations by PyTorch's."""

import contextlib
import io
from pathlib import Path

import torch

from runtime.cluster.ranks import RANK, print0


def count_flops(model):
    """(a line that compares DeepSpeed's count of FLOPs with our formula's, its table of them by module). Both count
    attention's masked positions. DeepSpeed's profiler sees nothing of what is compiled, fused or sharded."""
    from deepspeed.profiling.flops_profiler import get_model_profile

    config, table, training = model.config, io.StringIO(), model.training
    tokens = torch.zeros((1, config.block_size), dtype=torch.long, device=model.lm_head.weight.device)
    with torch.no_grad(), contextlib.redirect_stdout(table):
        deepspeeds = get_model_profile(model, args=[tokens], warm_up=0, as_string=False)[0] / config.block_size
    model.train(training)
    ours = 2 * model.num_params(positions=False) + 4 * config.n_layer * config.n_embd * config.block_size
    return (f"FLOPs of a token's forward: {ours:.4g} by our formula, {deepspeeds:.4g} by DeepSpeed's count, "
            f"{100 * abs(deepspeeds / ours - 1):.2f}% apart", table.getvalue())


class Profiler:
    """Writes into out_dir/profile, of `iters` iterations after the first `start`: a trace of each rank, operations.txt
    (those that take longest) and flops.txt. Make it before the model is compiled, call start() before the first
    iteration and step() after each."""

    def __init__(self, model, out_dir, start, iters):
        self.folder, self.iters, self.left = Path(out_dir, "profile"), iters, start + iters
        self.flops = count_flops(model) if RANK == 0 else ("", "")
        print0(self.flops[0])
        self.sort_by = "self_cuda_time_total" if model.lm_head.weight.is_cuda else "self_cpu_time_total"
        self.profiler = torch.profiler.profile(
            acc_events=True, on_trace_ready=self.write,
            schedule=torch.profiler.schedule(skip_first=start - 1, wait=0, warmup=1, active=iters, repeat=1))
        self.start = self.profiler.start

    def step(self):
        """End an iteration. Returns whether it was the last one of the trace, which is then written."""
        self.left -= 1
        if self.left >= 0:
            self.profiler.step()
        return self.left == 0

    def close(self):
        """End the profiler, also of a run that did not reach the last iteration to trace."""
        if self.left > 0:
            print0("no trace: the run ended before the iterations to trace")
            self.profiler.on_trace_ready = None  # else stop() writes what there is
        self.profiler.stop()

    def write(self, profiler):
        """Write all files. What cannot be written is reported, and stops nothing."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(self.folder / f"trace_rank{RANK}.json.gz"))
            if RANK == 0:
                operations = profiler.key_averages().table(sort_by=self.sort_by, row_limit=40)
                for name, text in ("operations.txt", operations), ("flops.txt", "\n".join(self.flops)):
                    (self.folder / name).write_text(text, encoding="utf-8")
                print0(f"traced {self.iters} iterations: {self.folder}/operations.txt, and trace_rank*.json.gz for "
                       "https://ui.perfetto.dev")
        except (OSError, RuntimeError) as error:  # the latter is PyTorch's
            print(f"rank {RANK}'s trace could not be written: {error}", flush=True)
