"""How much memory a run takes on each GPU and on the host, whether it fits, and which commands would.

ZeRO divides optimizer states (stage 1), gradients (2) and weights (3) over the ranks. What a stage does not divide,
every rank holds. RESULTS.md compares the estimate with what was measured for GPT-2 XL on H200.
"""

import os
from dataclasses import dataclass, replace

from model import LOSS_CHUNK, GPTConfig
from runtime.engine import ds_config
from runtime.files import format_bytes

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
CUDA_CONTEXT_BYTES = (1.3e9, 1.6e9)  # CUDA, cuBLAS, cuDNN and NCCL beside PyTorch's tensors: one H200, each of two
USABLE_FRACTION = 0.9  # of a card; the rest is lost between tensors
PRESETS = ("ds_config_zero2.json", "ds_config_zero3.json", "config/ds/zero2_offload.json",
           "config/ds/zero3_offload.json")
BAR_WIDTH = 40


@dataclass(frozen=True)
class Job:
    """What the memory of a run depends on. hardware, batch, params: see run_plan.py; config: DeepSpeed's, resolved."""

    model: GPTConfig
    hardware: object
    batch: object
    params: object
    config: dict
    gradient_checkpointing: bool = False
    accumulate_locally: bool = False

    @property
    def stage(self):
        return self.config["zero_optimization"]["stage"]

    @property
    def usable(self):
        """Bytes of each rank's memory that the estimate may take."""
        return USABLE_FRACTION * self.hardware.memory

    def offloads(self, what):
        """Whether "optimizer" states or "param"eters live in host memory."""
        return (self.config["zero_optimization"].get(f"offload_{what}") or {}).get("device", "none") != "none"

    def with_micro_batch(self, micro):
        """The same sequences per step, `micro` at a time."""
        sequences = self.batch.micro * self.batch.accumulation
        return replace(self, batch=replace(self.batch, micro=micro, accumulation=sequences // micro))


def estimate(job):
    """Return the bytes on each GPU at the peak of a step, by what they hold: {"weights": ..., "activations": ...}."""
    zero, params, world_size = job.config["zero_optimization"], job.params, job.batch.world_size
    stage, dtype = job.stage, job.hardware.dtype
    itemsize = 4 if dtype == "float32" else 2
    shards = [world_size if stage >= lowest else 1 for lowest in (3, 2, 1)]  # of weights, gradients, optimizer states
    bucket = min(params.trainable, int(zero.get("reduce_bucket_size", 5e8))) * itemsize
    buckets = 0 if stage == 0 or (stage < 3 and world_size == 1) else bucket
    if stage in (1, 2) and zero.get("overlap_comm", True):
        buckets *= 2
    if job.accumulate_locally:
        buckets = params.trainable * 4
    if stage == 3:  # gathered weights of the blocks in use, and of those prefetched
        buckets += min(params.stored, int(zero.get("stage3_max_live_parameters", 1e9))) * itemsize
    tokens, C, L = job.batch.micro * job.model.block_size, job.model.n_embd, job.model.n_layer
    # Values that a block saves per token for its backward, in units of C: input, layer norms, q, k, v, attention, and
    # both sides of GELU (4 each). 15.9 were measured with our kernels; without, dropout's masks come on top
    saved_per_token = 16 if job.hardware.compile else 18 + 2 * (job.model.dropout > 0)
    saved_per_token += 5 * (params.trainable < params.stored)  # LoRA's share, measured at rank 64
    loss = min(tokens, LOSS_CHUNK) * job.model.padded_vocab_size * 8
    if params.trainable == params.stored:
        loss += job.model.padded_vocab_size * C * 4
    activations = tokens * C * itemsize * L * (1 if job.gradient_checkpointing else saved_per_token)
    bf16_gradients = 0  # stage 1 keeps them beside the float32 ones, and its step copies as many again
    if stage == 1 and dtype == "bfloat16" and not job.offloads("optimizer"):
        bf16_gradients = params.trainable * 2
        activations = max(activations, bf16_gradients - loss)
    # With offload, the float32 gradients stay on the GPU below stage 3
    gradients = 0 if stage == 3 and job.offloads("optimizer") else params.trainable * 4 // shards[1] + bf16_gradients
    optimizer = 0 if job.offloads("optimizer") else params.trainable * (8 if stage == 0 else 12) // shards[2]
    parts = {
        "weights": 0 if job.offloads("param") else params.stored * itemsize // shards[0],
        "gradients": gradients,
        "optimizer": optimizer,
        "buckets": buckets,
        "activations": activations,
        # or a block that is recomputed
        "loss": max(loss, tokens * C * itemsize * saved_per_token) if job.gradient_checkpointing else loss,
    }
    return {**parts, "CUDA and NCCL": CUDA_CONTEXT_BYTES[world_size > 1]} if job.hardware.device == "cuda" else parts


def gpu_bytes(job):
    """Return the bytes of each GPU, or of each rank on CPU, at the peak."""
    return sum(estimate(job).values())


def torch_bytes(job):
    """Return the bytes of PyTorch's tensors at the peak: what torch.cuda.max_memory_allocated should show."""
    return sum(size for name, size in estimate(job).items() if name != "CUDA and NCCL")


def fits(job):
    return gpu_bytes(job) <= job.usable


def eval_bytes(job):
    """Return the bytes of an evaluation beside a captured CUDA graph, which keeps the memory of its activations.

    Estimated, not measured: a block holds 11 values per token at one time, in units of n_embd, and the loss its chunk.
    """
    tokens, itemsize = job.batch.micro * job.model.block_size, 4 if job.hardware.dtype == "float32" else 2
    return tokens * job.model.n_embd * itemsize * 11 + min(tokens, LOSS_CHUNK) * job.model.padded_vocab_size * 8


def bytes_with_eval(job):
    return gpu_bytes(job) + (eval_bytes(job) if job.hardware.compile else 0)


def fit_batch(job):
    """Return job.batch with the largest micro-batch that divides the sequences per step and fits; 1 if none does."""
    candidates = map(job.with_micro_batch, divisors(job.batch.micro * job.batch.accumulation))
    return next((c.batch for c in candidates if bytes_with_eval(c) <= job.usable), job.with_micro_batch(1).batch)


def divisors(n):
    """The divisors of n, the largest first."""
    return [d for d in range(n, 0, -1) if n % d == 0]


def host_estimate(job, local_world_size, tag_bytes):
    """Return the bytes of one machine's memory, by what they hold. tag_bytes: of a checkpoint; 0 if none is saved.

    A process with PyTorch takes 2 GB (bench.py's host_gb, four processes on an H200 machine).
    """
    share = local_world_size / job.batch.world_size
    parts = {"processes": 2e9 * local_world_size,
             "optimizer and gradients": 16 * job.params.trainable * share * job.offloads("optimizer"),
             "weights": 2 * job.params.stored * share * job.offloads("param"),
             "checkpoint being written": tag_bytes * share * (not job.offloads("optimizer"))}
    return {name: int(size) for name, size in parts.items() if size}


def format_breakdown(title, parts, memory=None):
    """Return lines: the sum of the parts, against `memory` bytes if given, and a bar for each part."""
    total = sum(parts.values())
    verdict = "" if not memory or total <= USABLE_FRACTION * memory else ": too much, as a tenth stays free"
    lines = [f"{title:<10} {format_bytes(total)}" + (f" of {format_bytes(memory)}{verdict}" if memory else "")]
    for name, size in sorted(parts.items(), key=lambda item: -item[1]):
        if size >= 1e6:
            bar = "█" * max(1, round(BAR_WIDTH * size / max(total, memory or 0)))
            lines.append(f"           {format_bytes(size):>9}  {bar} {name}")
    return lines


def relative_step_time(micro, recompute, preset):
    """Return the time of a step in units of the fastest setting's, for GPT-2 XL on H200 (RESULTS.md).

    606 ms at 32 x 1, 635 at 8, 853 at 1. ZeRO-3 takes 1.12 times as long at 32, 1.53 at 16 and 2.3 at 8, where it waits
    for the CPU. Offload, recomputed at 8 x 4: 2,230 and 2,850 ms, most of it the work of 16 CPU cores, which is
    taken to be the same elsewhere. Recomputation takes 1.31 times as long at 8 x 4.
    """
    if "offload" in preset:
        cpu_ms = 1390 if "zero2" in preset else 2010
        return (cpu_ms + 606 * relative_step_time(micro, recompute, "zero2")) / 606
    time = (598 + 255 / micro) / 606 * (1.31 if recompute else 1)
    return time * (1.12 + max(0.0, 12.3 / micro - 0.35) if "zero3" in preset else 1)


def jobs_that_fit(job, grad_clip):
    """Return [(arguments, job, relative step time)], the fastest first, at most 5.

    With as many sequences per step; of each preset, with and without recomputation, the largest micro-batch.
    """
    found = []
    for preset in PRESETS:
        if "zero3" in preset and job.batch.world_size == 1 and "offload" not in preset:
            continue
        for recompute in (False, True):
            for micro in divisors(job.batch.micro * job.batch.accumulation):
                other = replace(job.with_micro_batch(micro), gradient_checkpointing=recompute, accumulate_locally=False)
                config, _ = ds_config.resolve(os.path.join(ROOT, preset), other.batch, grad_clip, job.hardware.dtype,
                                              job.hardware.compile)
                other = replace(other, config=config)
                if fits(other):
                    args = [f"--batch_size={micro}", f"--gradient_accumulation_steps={other.batch.accumulation}"]
                    args += ["--gradient_checkpointing=True"] * recompute
                    args += [f"--deepspeed_config={preset}"] * (preset != PRESETS[0])
                    found.append((args, other, relative_step_time(micro, recompute, preset)))
                    break
    return sorted(found, key=lambda item: item[2])[:5]


def drop_arguments(argv, *names):
    """Return the arguments without some settings, whether written --name=value or --name value."""
    kept, skipped = [], False
    for argument in argv:
        is_value = skipped and not argument.startswith("--") and not argument.endswith(".py")
        skipped = argument.partition("=")[0].removeprefix("--") in names and argument.startswith("--")
        if not skipped and not is_value:
            kept.append(argument)
        skipped = skipped and "=" not in argument
    return kept


def advice(job, settings, argv, lora_possible):
    """Return lines with the commands that fit where `job` does not, the fastest first; [] if it fits.

    argv: the run's arguments. lora_possible: whether LoRA could be added.
    """
    if fits(job):
        return []
    choices = jobs_that_fit(job, settings.grad_clip)
    ranks = job.batch.world_size
    command = ["python"] if ranks == 1 else ["torchrun", f"--nproc_per_node={ranks}"]
    command += ["train_deepspeed.py", *drop_arguments(argv, "dry_run", "target_gpu", "batch_size",
                                                      "gradient_accumulation_steps")]
    lora = lora_advice(job, command) if lora_possible else []
    if not choices and not lora:
        return [f"It does not fit, and nothing does {what_would_fit(job, settings.grad_clip)}"]
    lines = ["It does not fit. What does, the fastest first:" if choices else "It does not fit, but with LoRA it does."]
    for args, other, time in choices:
        lines += [f"  {format_bytes(gpu_bytes(other))}, about {time:.1f} times the fastest step's time:",
                  f"    {' '.join([*command, *args])}"]
    return lines + lora


def what_would_fit(job, grad_clip):
    """Return the end of the sentence that nothing fits: which number of GPUs, or shorter sequences, would."""
    def longest_block(ranks):
        for block_size in (full >> i for i in range(5)):
            other = replace(job, model=replace(job.model, block_size=block_size),
                            batch=replace(job.batch, world_size=ranks))
            if jobs_that_fit(other, grad_clip):
                return block_size
        return 0

    full, ranks = job.model.block_size, job.batch.world_size
    counts = [2**i for i in range(7)] if job.hardware.device == "cuda" else []  # on CPU, ranks share the memory
    counts = sorted({*counts, ranks} - {ranks}, key=lambda n: (n < ranks, abs(n - ranks)))
    longest = {n: longest_block(n) for n in (ranks, *counts)}
    best = max(longest, key=longest.get)  # of equals, the nearest number
    found = [f"--block_size={longest[ranks]} would"] * (longest[ranks] > 0)
    if longest[best] > longest[ranks]:
        found.append(f"{best} GPU{'s' * (best > 1)} would"
                     + (f" with --block_size={longest[best]}" if longest[best] < full else ""))
    return (f"on {ranks} GPU{'s' * (ranks > 1)} of {format_bytes(job.hardware.memory)}: "
            f"{', and '.join(found) or 'larger ones are needed, or a smaller model'}")


def lora_advice(job, command):
    """Return lines with LoRA's command where that fits: rank 64, one sequence at a time, recomputed."""
    trainable = 64 * 16 * job.model.n_embd * job.model.n_layer  # in and out of a block's matrices: 16 times its width
    other = replace(job.with_micro_batch(1), params=replace(job.params, trainable=trainable),
                    gradient_checkpointing=True, accumulate_locally=False)
    args = ["--batch_size=1", f"--gradient_accumulation_steps={other.batch.accumulation}",
            "--gradient_checkpointing=True", "--lora_rank=64", "--learning_rate=2e-4"]
    return [f"Or by LoRA (config/lora_xl_r64.py), {format_bytes(gpu_bytes(other))}:",
            f"    {' '.join([*command, *args])}"] * fits(other)
