"""Print the plan of a run: a summary, its memory, and settings that fit if it doesn't."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import torch

from runtime.engine import fast_paths
from runtime.engine.any_optimizer import is_adamw, optimizer_name
from runtime.files import format_bytes, free_bytes
from runtime.output import counted, explain_uncaught
from runtime.plan import memory

OUR_OPTIMIZER = "adamw = setup.adamw("  # in a training script


def memory_report(plan, ranks):
    """Return the memory estimate of a GPU and of the host as text, with settings that fit if this run doesn't."""
    host = memory.host_estimate(plan, ranks.local_world_size, plan.tag_bytes if plan.settings.keep_last else 0)
    title = "each GPU" if plan.execution.device == "cuda" else "each rank"
    return "\n".join([*memory.format_breakdown(title, memory.estimate(plan), plan.execution.memory),
                      *memory.format_breakdown("host", host), *memory.advice(plan) * plan.settings.dry_run])


def summary(plan):
    """Return the run as text: model, data, hardware, batch, output, and the notes."""
    s, batch, execution, data = plan.settings, plan.batch, plan.execution, plan.data
    sequences = f"{batch.micro} x {batch.world_size} x {batch.accumulation}"
    notes = [f"note       {note}" for note in plan.notes]
    start = f"resumed from {plan.start.tag}" if plan.start.tag else f"from {plan.start.init_from}"
    lora = f"; LoRA of rank {plan.lora['rank']}: {plan.params.trainable:,} trainable" if plan.lora else ""
    model = f"model      {plan.params.total:,} parameters {start}, block_size {plan.model.block_size}{lora}"
    time = filter(None, [execution.peak_flops and not s.eval_only and memory.time_line(plan, s.max_iters)])
    if execution.gpu:  # target_gpu: the data may be missing
        return "\n".join([model, f"plan       {sequences} = {counted(batch.sequences, 'sequence')} per step, "
                          f"{execution.dtype}, ZeRO-{plan.stage}", *time, *notes])
    epoch = plan.windows if data["template"] else data["train_tokens"] / plan.model.block_size
    name = (f"{torch.cuda.get_device_name()}, {format_bytes(torch.cuda.get_device_properties().total_memory)}"
            if execution.device == "cuda" else "CPU")
    lines = [
        model,
        f"data       {' and '.join(d.name for d in plan.datasets)}: {data['train_tokens']:,} tokens to train on, "
        f"{data['val_tokens']:,} to validate",
        f"hardware   {batch.world_size} x {name}, {execution.dtype}, ZeRO-{plan.stage} ({s.deepspeed_config})"
        + ", compiled" * execution.compile,
        f"batch      {sequences} = {counted(batch.sequences, 'sequence')}, {counted(batch.tokens, 'token')} per step; "
        f"{epoch / batch.sequences:,.1f} steps per epoch",
        *path_lines(plan),
        *time, f"output     {s.out_dir}"]
    if s.keep_last and not s.eval_only:
        lines.append(f"space      {format_bytes(plan.tag_bytes)} per checkpoint, "
                     f"{format_bytes(free_bytes(s.out_dir))} free")
    if len(plan.datasets) > 1:
        lines.append("mixture    " + ", ".join(f"{d.name} {d.share}" for d in plan.datasets)
                     + f" of each {sum(d.share for d in plan.datasets):,} sequences")
    if s.dry_run:
        return "\n".join([*lines, optimizer_line(plan), *notes])  # and the advice later
    return "\n".join([*lines, *notes, *memory.advice(plan)])


def optimizer_line(plan, optimizer: torch.optim.Optimizer | None = None) -> str:
    """Return the line on the optimizer. None: the script hasn't made it."""
    s = plan.settings
    name = "adamw"
    if optimizer is not None and not is_adamw(optimizer):
        name = optimizer_name(optimizer)
    elif optimizer is None and OUR_OPTIMIZER not in Path(s.script).read_text(encoding="utf-8"):
        name = f"as {os.path.basename(s.script)} makes it"
    if s.optimizer == "muon":
        name = f"muon (learning rate {s.muon_learning_rate:g}), {name}"
    return f"optimizer  {name} (learning rate {s.learning_rate:g})"


def path_lines(plan) -> list[str]:
    """Return lines that say which fast paths the run takes, and why not the others."""
    first, *others = fast_paths.describe(plan.paths)
    return [f"paths      {first}", *(f"           {line}" for line in others)]


def explain_out_of_memory(plan):
    """If the GPU runs out of memory, print settings that take less and exit with code 2; the other ranks follow."""
    def explain(error):
        if not isinstance(error, RuntimeError) or "out of memory" not in str(error):  # PyTorch's, and CUDA's own
            return
        try:
            estimated = memory.gpu_bytes(plan)
            smaller = replace(plan.execution, memory=min(plan.execution.memory, estimated - 1))
            print(f"out of memory: the estimate was {format_bytes(estimated)} per GPU. Check nvidia-smi for other "
                  "processes.", *memory.advice(replace(plan, execution=smaller)), sep="\n", file=sys.stderr, flush=True)
        finally:
            os._exit(2)

    explain_uncaught(explain)
