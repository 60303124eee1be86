"""Find settings that fit into the memory of the GPU."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from runtime.data.loader import BatchSizes
from runtime.engine.ds_config import complete_config
from runtime.files import format_bytes
from runtime.plan.memory import MemoryInputs, bytes_with_eval, fits, gpu_bytes
from runtime.plan.plan import RunPlan
from runtime.plan.step_time import COMPACT_TIME, H200_FLOPS, relative_step_time

ZERO2 = "ds_config_zero2.json"
ZERO3_OFFLOAD = "config/ds/zero3_offload.json"
PRESETS = (ZERO2, "ds_config_zero3.json", "config/ds/zero2_offload.json", ZERO3_OFFLOAD)
MOST_SHOWN = 5
LORA_RANK = 64
LORA_RATE = 2e-4
LORA_INPUTS_AND_OUTPUTS = 16  # of a block's matrices, in units of n_embd


class Fit(NamedTuple):
    """Settings that fit. Fits compare by time."""

    time: float  # per step, relative to the fastest setting
    size: float  # bytes per GPU
    arguments: str  # to add to the command


def fit_batch(run: MemoryInputs) -> BatchSizes:
    """Return run.batch with the largest micro-batch that fits, or with 1."""
    largest = largest_that_fits(run, bytes_with_eval)
    return (largest or run.splits()[-1]).batch


def largest_that_fits(
    run: MemoryInputs, size: Callable[[MemoryInputs], float] = gpu_bytes
) -> MemoryInputs | None:
    """Return the run with the largest micro-batch that fits, or None.

    It divides the sequences per step.
    """
    for split in run.splits():
        if fits(size(split), split):
            return split
    return None


def runs_that_fit(plan: RunPlan) -> list[Fit]:
    """Return at most 5 settings that fit, the fastest first.

    They have as many sequences per step as the RunPlan: of each preset, with and without
    recomputation and compact optimizer state, the largest micro-batch.
    """
    found = []

    # Times are relative to those that were measured on H200s
    gpu_speed = (plan.execution.peak_flops or H200_FLOPS) / H200_FLOPS
    both = (False, True)
    for preset, recompute, compact in itertools.product(PRESETS, both, both):
        if not can_use(plan, preset):
            continue
        if compact and not (preset == ZERO2 and plan.execution.dtype == "bfloat16"):
            continue
        # The largest micro-batch with this preset, without our choice of local accumulation
        execution = plan.execution
        config, _ = complete_config(
            preset, plan.batch, plan.settings.grad_clip, execution.dtype, execution.compile
        )
        with_preset = replace(
            plan,
            ds_config=config,
            gradient_checkpointing=recompute,
            compact_optimizer=compact,
            accumulate_locally=False,
        )
        other = largest_that_fits(with_preset)
        if other:
            time = relative_step_time(other.batch.micro, recompute, preset, gpu_speed)
            if compact:
                time *= COMPACT_TIME
            found.append(Fit(time, gpu_bytes(other), arguments(other, deepspeed_config=preset)))
    return sorted(found)[:MOST_SHOWN]


def can_use(plan: RunPlan, preset: str) -> bool:
    """Return whether a RunPlan's other settings and hardware can use a preset."""
    offload = "offload" in preset
    if offload and plan.execution.device == "cpu":  # whose memory is the host's already
        return False
    if plan.params.muon or plan.batch.world_size == 1 and not offload:
        return preset == ZERO2  # Muon needs it, and one GPU has nothing to shard over
    return not (plan.settings.skip_grad_spikes and preset == ZERO3_OFFLOAD)


def arguments(plan: Any, **others: object) -> str:
    """Return what to add to the command line for this RunPlan. others: settings to have as well."""
    wanted = {
        "gradient_checkpointing": plan.gradient_checkpointing,
        "compact_optimizer": plan.compact_optimizer,
        **others,
    }
    if plan.settings.accumulate_locally is True:
        wanted["accumulate_locally"] = False

    # Only what differs from the command that was typed
    words = [
        f"--batch_size={plan.batch.micro}",
        f"--gradient_accumulation_steps={plan.batch.accumulation}",
    ]
    for name, value in wanted.items():
        if getattr(plan.settings, name) != value:
            words.append(f"--{name}={value}")
    return " ".join(words)


def lora_that_fits(plan: RunPlan) -> Fit | None:
    """Return the RunPlan with LoRA of rank 64, one sequence at a time, recomputed, if that fits."""
    if plan.lora or plan.params.muon or plan.fp8 or plan.start.kind in ("scratch", "resume"):
        return None
    # The smallest run of that kind
    adapters = LORA_RANK * LORA_INPUTS_AND_OUTPUTS * plan.model.n_embd * plan.model.n_layer
    params = plan.params._replace(trainable=adapters, stored=plan.params.stored + adapters)
    smallest = plan.splits()[-1]
    lora = replace(smallest, params=params, gradient_checkpointing=True, accumulate_locally=False)
    size = gpu_bytes(lora)
    if not fits(size, lora):
        return None
    min_lr = plan.settings.min_lr and min(plan.settings.min_lr, LORA_RATE)
    words = arguments(lora, lora_rank=LORA_RANK, learning_rate=LORA_RATE, min_lr=min_lr)
    return Fit(0.0, size, words)


def advice(plan: RunPlan) -> list[str]:
    """Return lines with the settings that fit if those of a RunPlan don't, the fastest first."""
    if fits(gpu_bytes(plan), plan):
        return []

    # The fastest first, and LoRA last, because it trains something else
    lines = []
    for fit in runs_that_fit(plan):
        lines.append(f"  {format_bytes(fit.size):>9}  {fit.time:>4.1f}x  {fit.arguments}")
    lora = lora_that_fits(plan)
    if lora:
        lines.append(f"  {format_bytes(lora.size):>9}   LoRA  {lora.arguments}")
    if lines:
        first = (
            "It doesn't fit. Add one of these to your command (memory per GPU, time relative to "
            "the fastest setting):"
        )
        return [first, *lines]

    # Nothing fits. AdamW can be sharded and offloaded in more ways than Muon
    others = "more GPUs or larger ones, a smaller --block_size, or a smaller model"
    if plan.params.muon and runs_that_fit(replace(plan, params=plan.params._replace(muon=0))):
        others = f"--optimizer=adamw with its own --learning_rate, {others}"
    return [f"It doesn't fit, and no ZeRO stage of this optimizer makes it fit: use {others}"]
