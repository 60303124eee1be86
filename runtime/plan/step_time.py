"""Estimate the time of a step.

The formulas fit GPT-2 XL's steps in RESULTS.md: on one H200, and for ZeRO-3 on two. With offload,
16 CPU cores make the optimizer's step.
"""

from runtime.files import format_time
from runtime.hardware import GPUS
from runtime.output import counted
from runtime.plan.memory import MemoryInputs

H200_FLOPS = GPUS["H200"].tflops * 1e12
FASTEST_MS = 597  # per step of 32 sequences, at 32 x 1
FASTEST_MFU = 0.571
CPU_STEP_MS = {"zero2": 400, "zero3": 2170}  # of the optimizer, with offload
SPARED_BY_FP8 = 0.24  # of a step
# With compact optimizer state: measured 0.995 to 1.002 (results/h200_x1_compact.json and
# h200_x2_compact.json). Above 1, so that float32 state is proposed first where both fit
COMPACT_TIME = 1.01
LEAST, MOST = 0.8, 2.0  # of the estimate: what other GPUs and models take
WORTH_SAYING_S = 0.005  # below that, launches take longer than the GPU's work


def relative_step_time(micro: int, recompute: bool, preset: str, gpu_speed: float = 1.0) -> float:
    """Return the time per step relative to the fastest setting's.

    preset: the name of a config, with its stage and perhaps "offload". gpu_speed: the GPU's peak,
    relative to an H200's.
    """
    if "offload" in preset:
        # The CPU's step comes on top. It doesn't become shorter on a faster GPU
        stage = "zero2" if "zero2" in preset else "zero3"
        cpu_time = CPU_STEP_MS[stage] * gpu_speed / FASTEST_MS
        return cpu_time + relative_step_time(micro, recompute, "zero2")

    # In ms on an H200: small micro-batches use the GPU less well
    time = (568 + 327 / micro**0.7) / FASTEST_MS
    # Recomputing, and gathering the weights, cost more with small micro-batches
    if recompute:
        time *= 1.31 + 0.14 / micro
    if "zero3" in preset:
        time *= 1.03 + 0.22 / micro
    return time


def step_seconds(run: MemoryInputs) -> float:
    """Return the estimated seconds per step at the MFU that GPT-2 XL has on an H200."""
    # Relative to the fastest setting that was measured
    preset = f"zero{run.stage}"
    relative = relative_step_time(run.batch.micro, run.gradient_checkpointing, preset)
    if run.fp8:
        relative *= 1 - SPARED_BY_FP8
    # A GPU's share of the FLOPs, at the MFU of the fastest setting
    flops_per_gpu = run.params.flops * run.batch.tokens / run.batch.world_size
    return relative * flops_per_gpu / (FASTEST_MFU * run.execution.peak_flops)


def time_line(run: MemoryInputs, steps: int, has_several_nodes: bool) -> str | None:
    """Return the estimated time per step and of the run as text, or None for small models.

    It is a range, or "at least" with offload and without our fast paths, which wait for the CPU
    less.
    """
    # A small model's step takes as long as its launches
    seconds = step_seconds(run)
    if seconds < WORTH_SAYING_S:
        return None

    # The upper end holds only for our step with its one kernel
    per_step = f"at least {1000 * LEAST * seconds:,.0f}"
    in_all = format_time(steps * LEAST * seconds)
    if run.paths.step.taken:
        per_step = f"{1000 * LEAST * seconds:,.0f} to {1000 * MOST * seconds:,.0f}"
        in_all += f" to {format_time(steps * MOST * seconds)}"
    left_out = "evaluations and saves"
    if has_several_nodes:
        left_out = "evaluations, saves and the network between nodes"
    return (
        f"time       {per_step} ms per step, {in_all} for {counted(steps, 'step')}, without "
        f"{left_out}"
    )
