"""Print the plan of a run: a summary, its memory, and settings that fit if it doesn't."""

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from runtime.cluster.ranks import Ranks
from runtime.engine import fast_paths
from runtime.engine.any_optimizer import is_adamw, optimizer_name
from runtime.files import format_bytes, free_bytes
from runtime.output import Explainer, counted, explain_uncaught
from runtime.plan import advice, memory, step_time
from runtime.plan.plan import RunPlan

OUR_OPTIMIZER = "adamw = setup.make_adamw("  # the text of a script that makes our AdamW


def memory_report(plan: RunPlan, ranks: Ranks) -> str:
    """Return the memory estimate of a GPU and of the host as text.

    With dry_run=True also settings that fit if this run doesn't. plan: a RunPlan.
    """
    # The memory of a GPU, and of a node
    title = "each GPU" if plan.execution.device == "cuda" else "each rank"
    lines = format_breakdown(title, memory.estimate(plan), plan.execution.memory)
    tag_bytes = plan.tag_bytes if plan.settings.keep_last else 0
    host = memory.host_estimate(plan, ranks.local_world_size, tag_bytes)
    lines += format_breakdown("host", host)
    if plan.settings.dry_run:
        lines += advice.advice(plan)
    return "\n".join(lines)


def format_breakdown(
    title: str, parts: Mapping[str, float], limit: float | None = None
) -> list[str]:
    """Return lines with the sum of the parts, and a bar for each.

    limit: the bytes that they should fit into; the first line says if they don't.
    """
    # The sum, and whether it fits
    total = sum(parts.values())
    line = f"{title:<10} {format_bytes(total)}"
    if limit:
        line += f" of {format_bytes(limit)}"
    if limit and total > memory.USABLE_FRACTION * limit:
        line += f": too much ({1 - memory.USABLE_FRACTION:.0%} must stay free)"
    lines = [line]

    # A bar for each part, the largest first
    whole = max(total, limit or 0)
    for name, size in sorted(parts.items(), key=lambda item: -item[1]):
        if size >= 1e6:
            bar = "█" * max(1, round(40 * size / whole))
            lines.append(f"           {format_bytes(size):>9}  {bar} {name}")
    return lines


def summary(plan: RunPlan) -> str:
    """Return the run as text: model, data, hardware, batch, output, and the notes."""
    s = plan.settings
    notes = [f"note       {note}" for note in plan.notes]
    # Of another machine's GPU, less is known
    if plan.execution.gpu:  # target_gpu: the data may be missing
        lines = [model_line(plan), batch_line_of_target(plan), *ramp_lines(plan), *time_lines(plan)]
        return "\n".join([*lines, *notes])

    lines = [
        model_line(plan),
        data_line(plan),
        hardware_line(plan),
        batch_line(plan),
        *ramp_lines(plan),
        *path_lines(plan),
        *time_lines(plan),
        f"output     {s.out_dir}",
    ]

    # What only some runs have
    if s.keep_last and not s.eval_only:
        size = format_bytes(plan.tag_bytes)
        free = format_bytes(free_bytes(s.out_dir))
        lines.append(f"space      {size} per checkpoint, {free} free")
    if len(plan.datasets) > 1:
        lines.append(mixture_line(plan))
    if s.dry_run:  # memory_report() has the advice
        return "\n".join([*lines, optimizer_line(plan), *notes])
    return "\n".join([*lines, *notes, *advice.advice(plan)])


def model_line(plan: RunPlan) -> str:
    """Return the line on the model and where its weights come from."""
    origin = f"from {plan.start.init_from}"
    if plan.start.tag:
        origin = f"resumed from {plan.start.tag}"
    block_size = plan.model.block_size
    line = f"model      {plan.params.total:,} parameters {origin}, block_size {block_size}"
    if plan.lora:
        line += f"; LoRA of rank {plan.lora['rank']}: {plan.params.trainable:,} trainable"
    return line


def data_line(plan: RunPlan) -> str:
    """Return the line on the datasets."""
    # A mixture names all its datasets
    names = " and ".join(dataset.name for dataset in plan.datasets)
    train_tokens = plan.data["train_tokens"]
    val_tokens = plan.data["val_tokens"]
    return f"data       {names}: {train_tokens:,} tokens to train on, {val_tokens:,} to validate"


def mixture_line(plan: RunPlan) -> str:
    """Return the line on the shares of several datasets."""
    shares = ", ".join(f"{dataset.name} {dataset.share}" for dataset in plan.datasets)
    total = sum(dataset.share for dataset in plan.datasets)
    return f"mixture    {shares} of each {total:,} sequences"


def hardware_line(plan: RunPlan) -> str:
    """Return the line on the devices, and how they are used."""
    name = "CPU"
    if plan.execution.device == "cuda":
        memory_of_gpu = format_bytes(torch.cuda.get_device_properties().total_memory)
        name = f"{torch.cuda.get_device_name()}, {memory_of_gpu}"
    line = f"hardware   {plan.batch.world_size} x {name}, {plan.execution.dtype}, "
    line += f"ZeRO-{plan.stage} ({plan.settings.deepspeed_config})"
    if plan.execution.compile:
        line += ", compiled"
    return line


def sequences_of_a_step(plan: RunPlan) -> str:
    """Return the batch as text: micro-batch x ranks x accumulation = sequences."""
    batch = plan.batch
    factors = f"{batch.micro} x {batch.world_size} x {batch.accumulation}"
    return f"{factors} = {counted(batch.sequences, 'sequence')}"


def batch_line(plan: RunPlan) -> str:
    """Return the line on the batch, and on the epoch in steps."""
    # Of a text, about: an epoch leaves out less than two windows
    epoch = plan.data["train_tokens"] / plan.model.block_size
    if plan.data["template"]:  # conversations: rows have padding
        epoch = plan.sequences_per_epoch
    steps = epoch / plan.batch.sequences
    tokens = counted(plan.batch.tokens, "token")
    return (
        f"batch      {sequences_of_a_step(plan)}, {tokens} per step; {steps:,.1f} steps per epoch"
    )


def batch_line_of_target(plan: RunPlan) -> str:
    """Return the line on the batch with target_gpu."""
    how = f"{plan.execution.dtype}, ZeRO-{plan.stage}"
    return f"plan       {sequences_of_a_step(plan)} per step, {how}"


def ramp_lines(plan: RunPlan) -> list[str]:
    """Return the lines on the ramps, if there are any."""
    lines = []
    if plan.settings.batch_ramp is not None:
        lines.append(f"ramp       {plan.ramp.describe()}")
    if plan.settings.length_ramp is not None:
        lines.append(f"ramp       {plan.ramp.describe_lengths()}")
    return lines


def time_lines(plan: RunPlan) -> list[str]:
    """Return the line on the time, if it can be estimated."""
    # It is the time of equal steps: a ramp's are not estimated
    s = plan.settings
    if not plan.execution.peak_flops or s.eval_only or s.batch_ramp or s.length_ramp:
        return []
    line = step_time.time_line(plan, s.max_iters, plan.has_several_nodes)
    return [line] if line else []


def optimizer_line(plan: RunPlan, optimizer: torch.optim.Optimizer | None = None) -> str:
    """Return the line on the optimizer. None: the script hasn't made it."""
    s = plan.settings
    # The optimizer's own name, if the script doesn't make AdamW
    name = "adamw"
    if optimizer is not None and not is_adamw(optimizer):
        name = optimizer_name(optimizer)
    elif optimizer is None and OUR_OPTIMIZER not in Path(s.script).read_text(encoding="utf-8"):
        name = f"as {os.path.basename(s.script)} makes it"

    # Muon takes the matrices, and the other optimizer all the rest
    if s.optimizer == "muon":
        name = f"muon (learning rate {s.muon_learning_rate:g}), {name}"
    return f"optimizer  {name} (learning rate {s.learning_rate:g})"


def path_lines(plan: RunPlan) -> list[str]:
    """Return lines that say which fast paths the run takes, and why not the others."""
    first, *others = fast_paths.describe(plan.paths)
    return [f"paths      {first}", *(f"           {line}" for line in others)]


def explain_out_of_memory(plan: RunPlan) -> None:
    """If the GPU runs out of memory, print settings that take less, and exit with code 2.

    The other ranks follow. This installs an excepthook.
    """

    def explain(error: BaseException) -> None:
        # PyTorch's error, and CUDA's own
        if not isinstance(error, RuntimeError) or "out of memory" not in str(error):
            return

        # The error proves that the estimate was too low: look for what takes less than it
        try:
            estimated = memory.gpu_bytes(plan)
            available = min(plan.execution.memory, estimated - 1)
            smaller = replace(plan.execution, memory=available)
            first = (
                f"out of memory: the estimate was {format_bytes(estimated)} per GPU. Check "
                "nvidia-smi for other processes."
            )
            lines = [first, *advice.advice(replace(plan, execution=smaller))]
            print("\n".join(lines), file=sys.stderr, flush=True)
        finally:
            os._exit(2)

    explain_uncaught(Explainer.OUT_OF_MEMORY, explain)
