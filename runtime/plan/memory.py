"""How much memory a run takes on each GPU and on the host, whether it fits, and which commands would.

ZeRO divides optimizer states (stage 1), gradients (2) and weights (3) over the ranks; every rank holds the rest.
RESULTS.md compares the estimate with what was measured for GPT-2 XL on H200.
"""

import itertools
from dataclasses import dataclass, replace

import torch

from model import LOSS_CHUNK, GPTConfig
from runtime.engine.ds_config import find, resolve, uses_offload
from runtime.files import format_bytes
from runtime.hardware import Gpu

CUDA_CONTEXT_BYTES = (1.3e9, 1.6e9)  # CUDA, cuBLAS, cuDNN and NCCL beside PyTorch's tensors: one H200, each of two
USABLE_FRACTION = 0.9  # of a card; the rest is lost between tensors
PRESETS = ("ds_config_zero2.json", "ds_config_zero3.json", "config/ds/zero2_offload.json",
           "config/ds/zero3_offload.json")
BAR_WIDTH = 40


@dataclass(frozen=True)
class Hardware:
    """What each rank runs on: here, or with target_gpu elsewhere."""

    device: str  # "cuda" or "cpu"
    dtype: str  # "bfloat16", "float16" or "float32"
    compile: bool
    memory: int  # bytes that a rank may use
    gpu: Gpu | None = None  # target_gpu's; None: the card that is here

    @property
    def torch_dtype(self):
        return getattr(torch, self.dtype)


@dataclass(frozen=True)
class Batch:
    """The sequences of one optimizer step."""

    micro: int  # per GPU and micro-step
    accumulation: int  # micro-steps per GPU
    world_size: int
    block_size: int

    @property
    def sequences(self):
        return self.micro * self.accumulation * self.world_size

    @property
    def tokens(self):
        return self.sequences * self.block_size


@dataclass(frozen=True)
class ParamCount:
    total: int  # as printed
    stored: int  # with the vocabulary's padding
    trainable: int


@dataclass(frozen=True)
class Job:
    """What the memory of a run depends on."""

    model: GPTConfig
    hardware: Hardware
    batch: Batch
    params: ParamCount
    ds_config: dict  # for deepspeed.initialize
    gradient_checkpointing: bool = False
    accumulate_locally: bool = False

    @property
    def stage(self):
        return self.ds_config["zero_optimization"]["stage"]

    def splits(self):
        """The job with each micro-batch that divides its sequences per step, the largest first."""
        n = self.batch.micro * self.batch.accumulation
        return [replace(self, batch=replace(self.batch, micro=micro, accumulation=n // micro))
                for micro in range(n, 0, -1) if n % micro == 0]


def estimate(job):
    """Return the bytes on each GPU at the peak of a step, by what they hold: {"weights": ..., "activations": ...}."""
    zero, stage, ranks, vocab_size = (job.ds_config["zero_optimization"], job.stage, job.batch.world_size,
                                      job.model.padded_vocab_size)
    stored, trainable = job.params.stored, job.params.trainable
    itemsize, offload = job.hardware.torch_dtype.itemsize, uses_offload(job.ds_config)
    shards = [ranks if stage >= lowest else 1 for lowest in (3, 2, 1)]  # of weights, gradients, optimizer states
    buckets = min(trainable, int(zero.get("reduce_bucket_size", 5e8))) * itemsize
    if stage == 0 or (stage < 3 and ranks == 1):
        buckets = 0
    if stage in (1, 2) and zero.get("overlap_comm", True):
        buckets *= 2
    if job.accumulate_locally:
        buckets = trainable * 4
    if stage == 3:  # gathered weights of the blocks in use, and of those prefetched
        buckets += min(stored, int(zero.get("stage3_max_live_parameters", 1e9))) * itemsize
    # Values that a block saves per token for its backward, in units of n_embd: input, layer norms, q, k, v, attention,
    # and both sides of GELU (4 each). 15.9 were measured with our kernels; without, dropout's masks come on top
    saved_per_token = 16 if job.hardware.compile else 18 + 2 * (job.model.dropout > 0)
    saved_per_token += 5 * (trainable < stored)  # LoRA's share, measured at rank 64
    tokens = job.batch.micro * job.model.block_size
    block_input = tokens * job.model.n_embd * itemsize
    activations = block_input * job.model.n_layer * (1 if job.gradient_checkpointing else saved_per_token)
    loss = min(tokens, LOSS_CHUNK) * vocab_size * 8 + (trainable == stored) * vocab_size * job.model.n_embd * 4
    # Stage 1 keeps bfloat16 gradients beside the float32 ones, and its step copies as many again
    bf16_gradients = trainable * 2 * (stage == 1 and job.hardware.dtype == "bfloat16" and not offload)
    activations = max(activations, bf16_gradients - loss)
    if job.gradient_checkpointing:
        loss = max(loss, block_input * saved_per_token)  # or a block that is recomputed
    return {
        "weights": 0 if uses_offload(job.ds_config, "param") else stored * itemsize // shards[0],
        # With offload, the float32 gradients stay on the GPU below stage 3
        "gradients": 0 if stage == 3 and offload else trainable * 4 // shards[1] + bf16_gradients,
        "optimizer": 0 if offload else trainable * (8 if stage == 0 else 12) // shards[2],
        "buckets": buckets, "activations": activations, "loss": loss,
        "CUDA and NCCL": CUDA_CONTEXT_BYTES[ranks > 1] * (job.hardware.device == "cuda")}


def gpu_bytes(job):
    """Return the bytes of each GPU, or of each rank on CPU, at the peak."""
    return sum(estimate(job).values())


def torch_bytes(job):
    """Return the bytes of PyTorch's tensors at the peak: what torch.cuda.max_memory_allocated should show."""
    return sum(size for name, size in estimate(job).items() if name != "CUDA and NCCL")


def fits(job, size=gpu_bytes):
    return size(job) <= USABLE_FRACTION * job.hardware.memory


def bytes_with_eval(job):
    """Return gpu_bytes, and what an evaluation takes beside a captured CUDA graph, which keeps its activations.

    Estimated, not measured: a block holds 11 values per token at one time, in units of n_embd, and the loss its chunk.
    """
    tokens = job.batch.micro * job.model.block_size
    block = tokens * job.model.n_embd * job.hardware.torch_dtype.itemsize * 11
    loss = min(tokens, LOSS_CHUNK) * job.model.padded_vocab_size * 8
    return gpu_bytes(job) + (block + loss) * job.hardware.compile


def fit_batch(job):
    """Return job.batch with the largest micro-batch that divides the sequences per step and fits; 1 if none does."""
    splits = job.splits()
    return next((one for one in splits if fits(one, bytes_with_eval)), splits[-1]).batch


def host_estimate(job, local_world_size, tag_bytes):
    """Return the bytes of one machine's memory, by what they hold. tag_bytes: of a checkpoint; 0 if none is saved. A
    process with PyTorch takes 2 GB (host_gb in results/h200_x2_bench_8x4.json)."""
    share, offload = local_world_size / job.batch.world_size, uses_offload(job.ds_config)
    parts = {"processes": 2e9 * local_world_size,
             "optimizer and gradients": 16 * job.params.trainable * share * offload,
             "weights": 2 * job.params.stored * share * uses_offload(job.ds_config, "param"),
             "checkpoint being written": tag_bytes * share * (not offload)}
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
    """Return the time of a step in units of the fastest setting's, for GPT-2 XL on H200 (docs/numbers.md).

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
    """Return [(arguments, job, relative step time)] with as many sequences per step, the fastest first, at most 5: of
    each preset, with and without recomputation, the largest micro-batch that fits."""
    found = []
    for preset, recompute in itertools.product(PRESETS, (False, True)):
        if preset == "ds_config_zero3.json" and job.batch.world_size == 1:
            continue
        config, _ = resolve(find(preset), job.batch, grad_clip, job.hardware.dtype, job.hardware.compile)
        other = replace(job, ds_config=config, gradient_checkpointing=recompute, accumulate_locally=False)
        if other := next(filter(fits, other.splits()), None):
            args = split_arguments(other.batch) + ["--gradient_checkpointing=True"] * recompute
            args += [f"--deepspeed_config={preset}"] * (preset != PRESETS[0])
            found.append((args, other, relative_step_time(other.batch.micro, recompute, preset)))
    return sorted(found, key=lambda item: item[2])[:5]


def split_arguments(batch):
    return [f"--batch_size={batch.micro}", f"--gradient_accumulation_steps={batch.accumulation}"]


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
    """Return lines with the commands that fit where `job`, with the arguments argv, does not, the fastest first."""
    if fits(job):
        return []
    choices, ranks = jobs_that_fit(job, settings.grad_clip), job.batch.world_size
    kept = drop_arguments(argv, "dry_run", "target_gpu", "batch_size", "gradient_accumulation_steps")
    command = " ".join(["python" if ranks == 1 else f"torchrun --nproc_per_node={ranks}", "train_deepspeed.py", *kept])
    lines = ["It does not fit. What does, the fastest first:"]
    for args, other, time in choices:
        lines += [f"  {format_bytes(gpu_bytes(other))}, about {time:.1f} times the fastest step's time:",
                  f"    {command} {' '.join(args)}"]
    # LoRA of rank 64, one sequence at a time, recomputed. In and out of a block's matrices: 16 times its width
    lora_params = replace(job.params, trainable=64 * 16 * job.model.n_embd * job.model.n_layer)
    lora = replace(job.splits()[-1], params=lora_params, gradient_checkpointing=True, accumulate_locally=False)
    if lora_possible and fits(lora):
        lines = lines if choices else ["It does not fit, but with LoRA it does."]
        lines += [f"Or by LoRA (config/lora_xl_r64.py), {format_bytes(gpu_bytes(lora))}:",
                  f"    {command} {' '.join(split_arguments(lora.batch))} --gradient_checkpointing=True --lora_rank=64 "
                  "--learning_rate=2e-4"]
    elif not choices:
        lines = [f"It does not fit, and nothing does {what_would_fit(job, settings.grad_clip)}"]
    return lines


def what_would_fit(job, grad_clip):
    """Return the end of the sentence that nothing fits: which number of GPUs, or shorter sequences, would."""
    full, ranks = job.model.block_size, job.batch.world_size

    def longest_block(ranks):
        """The longest of block_size, half of it, ... that fits on so many GPUs, or 0."""
        batch = replace(job.batch, world_size=ranks)
        shorter = (replace(job, model=replace(job.model, block_size=full >> i), batch=batch) for i in range(5))
        return next((one.model.block_size for one in shorter if jobs_that_fit(one, grad_clip)), 0)

    counts = {2**i for i in range(7)} if job.hardware.device == "cuda" else set()  # on CPU, ranks share the memory
    longest = {n: longest_block(n) for n in sorted({*counts, ranks}, key=lambda n: (n < ranks, abs(n - ranks)))}
    best = max(longest, key=longest.get)  # of equals, the nearest number
    found = [f"--block_size={longest[ranks]} would"] * (longest[ranks] > 0)
    if longest[best] > longest[ranks]:
        found.append(f"{best} GPU{'s' * (best > 1)} would"
                     + f" with --block_size={longest[best]}" * (longest[best] < full))
    return (f"on {ranks} GPU{'s' * (ranks > 1)} of {format_bytes(job.hardware.memory)}: "
            f"{', and '.join(found) or 'larger ones are needed, or a smaller model'}")
