"""profile=True: the FLOPs of the model by DeepSpeed's count, and where a step's time goes by PyTorch's trace."""

import contextlib
import io
import os

import torch

from runtime.cluster.ranks import print0

ROWS = 40  # operations that operations.txt names


def count_flops(model):
    """(a line that sets DeepSpeed's count of FLOPs beside our formula's, its table of them by module).

    The model must be as model.py has it and whole: what is compiled, fused or split, DeepSpeed's profiler cannot see
    into. Both count masked places of attention like all others.
    """
    from deepspeed.profiling.flops_profiler import FlopsProfiler

    profiler, text, training = FlopsProfiler(model), io.StringIO(), model.training
    tokens = torch.zeros((1, model.config.block_size), dtype=torch.long, device=model.lm_head.weight.device)
    model.eval()
    with torch.no_grad(), contextlib.redirect_stdout(text):
        profiler.start_profile()
        model(tokens)
        theirs = profiler.get_total_flops() / model.config.block_size
        profiler.print_model_profile()
        profiler.end_profile()
    model.train(training)
    learns = [p.requires_grad for p in model.parameters()]
    model.requires_grad_(True)  # with a backward for each weight, the forward is a third
    ours = model.flops_per_token() / 3
    for p, whether in zip(model.parameters(), learns, strict=True):
        p.requires_grad_(whether)
    return (f"FLOPs of a token's forward: {ours:.4g} by our formula, {theirs:.4g} by DeepSpeed's count, "
            f"{100 * abs(theirs / ours - 1):.2f}% apart", text.getvalue())


def folder(out_dir):
    return os.path.join(out_dir, "profile")


def write(out_dir, name, text):
    """A text into the profile's folder; a full disk is told of and stops nothing. Returns whether it is there."""
    try:
        os.makedirs(folder(out_dir), exist_ok=True)
        with open(os.path.join(folder(out_dir), name), "w", encoding="utf-8") as f:
            f.write(text)
        return True
    except OSError as error:
        print0(f"{folder(out_dir)}/{name} could not be written: {error.strerror}")
        return False


def tracer(out_dir, rank, start, steps, device):
    """PyTorch's profiler, running, of `steps` iterations after the first `start`; its step() ends each. When it has
    seen them, each rank writes trace_rank<r>.json.gz, and rank 0 operations.txt, the operations that take longest."""
    cuda = torch.device(device).type == "cuda"

    def done(profiler):
        try:
            os.makedirs(folder(out_dir), exist_ok=True)
            profiler.export_chrome_trace(os.path.join(folder(out_dir), f"trace_rank{rank}.json.gz"))
        except (OSError, RuntimeError) as error:
            print(f"rank {rank}'s trace could not be written: {error}", flush=True)
        if rank == 0:
            by = "self_cuda_time_total" if cuda else "self_cpu_time_total"
            table = profiler.key_averages().table(sort_by=by, row_limit=ROWS)
            if write(out_dir, "operations.txt", table):
                print0(f"traced {steps} iterations: {folder(out_dir)}/operations.txt, and trace_rank*.json.gz for "
                       "https://ui.perfetto.dev")

    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * cuda
    profiler = torch.profiler.profile(
        activities=activities, acc_events=True, on_trace_ready=done,
        schedule=torch.profiler.schedule(skip_first=start - 1, wait=0, warmup=1, active=steps, repeat=1))
    profiler.start()
    return profiler
