"""Estimate the memory of a run on each GPU and on the host, and find settings that fit.

ZeRO shards optimizer states and gradients (stage 2), and weights (3) over the ranks. Every rank holds all of the rest.
RESULTS.md compares the estimate with measurements of GPT-2 XL on H200."""

import itertools
import math
from collections import namedtuple
from collections.abc import Mapping
from dataclasses import dataclass, replace

from runtime.chosen_model import GPTConfig
from runtime.data.loader import Batch
from runtime.engine.ds_config import complete_config, uses_offload
from runtime.engine.fast_paths import FastPaths, ModelFacts, decide
from runtime.engine.muon import MAX_BATCH
from runtime.files import format_bytes, format_time
from runtime.hardware import GPUS, Execution
from runtime.loss import EAGER_LOSS_CHUNK, LOSS_CHUNK
from runtime.output import counted

CUDA_CONTEXT_BYTES = (1.3e9, 1.6e9)  # CUDA, cuBLAS, cuDNN and NCCL outside PyTorch's tensors: 1 H200, each of 2
H200_FLOPS = GPUS["H200"].tflops * 1e12
USABLE_FRACTION = 0.9  # of a GPU's memory; the rest is lost to fragmentation
PRESETS = ("ds_config_zero2.json", "ds_config_zero3.json", "config/ds/zero2_offload.json",
           "config/ds/zero3_offload.json")
# stored: with the padded vocabulary; flops: of forward and backward per token; muon: those that Muon trains; block:
# those of a block that ZeRO-3 gathers by itself
ParamCount = namedtuple("ParamCount", ("total", "stored", "trainable", "flops", "muon", "block"), defaults=[0, 0, 0])


@dataclass(frozen=True)
class MemoryInputs:
    """Everything that the memory of a run depends on."""

    model: GPTConfig
    execution: Execution
    batch: Batch
    params: ParamCount
    ds_config: Mapping  # for deepspeed.initialize; read-only
    gradient_checkpointing: bool = False
    accumulate_locally: bool = False
    no_local: str = ""  # why accumulate_locally is False
    fp8: bool = False
    pretrained: bool = True  # from GPT-2's weights or a folder, loaded in execution's dtype; else in float32
    facts: ModelFacts = ModelFacts()  # which fast paths the model fits
    cuda_graph: bool | str = "auto"
    whole_logits: bool = False  # those of a micro-batch are in memory at one time, as in a model.py of others

    @property
    def stage(self):
        return self.ds_config["zero_optimization"]["stage"]

    @property
    def paths(self) -> FastPaths:
        """The fast paths that the run takes."""
        return decide(
            self.facts,
            self.execution,
            self.ds_config,
            world_size=self.batch.world_size,
            accumulate_locally=self.accumulate_locally,
            no_local=self.no_local,
            gradient_checkpointing=self.gradient_checkpointing,
            fp8=self.fp8,
            cuda_graph=self.cuda_graph,
        )

    def splits(self):
        """Return the run with each micro-batch that divides its sequences per step, the largest first."""
        n = self.batch.micro * self.batch.accumulation
        small = [micro for micro in range(1, math.isqrt(n) + 1) if n % micro == 0]
        return [replace(self, batch=replace(self.batch, micro=micro, accumulation=n // micro))
                for micro in sorted({*small, *(n // micro for micro in small)}, reverse=True)]


def estimate(run):
    """Return the peak bytes per GPU by use: {"weights": ..., "activations": ..., ...}."""
    zero, stage, ranks = run.ds_config["zero_optimization"], run.stage, run.batch.world_size
    stored, trainable = run.params.stored, run.params.trainable
    itemsize, offload = run.execution.torch_dtype.itemsize, uses_offload(run.ds_config)
    buckets = 0 if stage == 2 and ranks == 1 else min(trainable, int(zero.get("reduce_bucket_size", 5e8))) * itemsize
    if stage == 2 and zero.get("overlap_comm", True):
        buckets *= 2
    if run.accumulate_locally:
        buckets = trainable * 4
    if stage == 3 and run.paths.gradients.taken:
        buckets = zero3_buffers(run)
    elif stage == 3:  # gathered weights of the blocks in use, and of those prefetched
        buckets += min(stored, int(zero.get("stage3_max_live_parameters", 1e9))) * itemsize
    # Values that a block saves per token for backward, in units of n_embd: input, layer norms, q, k, v, attention, and
    # GELU's input and output (4 each). 15.9 were measured with our kernels. Without them, dropout adds its masks
    saved_per_token = 16 if run.execution.compile else 18 + 2 * (run.model.dropout > 0)
    saved_per_token += 5 * (trainable < stored)  # LoRA's share, measured at rank 64
    saved_per_token -= 3 * run.fp8  # layer norms and GELU's output, saved in FP8
    tokens = run.batch.micro * run.model.block_size
    block_input = tokens * run.model.n_embd * itemsize
    activations = block_input * run.model.n_layer * (1 if run.gradient_checkpointing else saved_per_token)
    loss = loss_bytes(run)
    if run.gradient_checkpointing:
        loss = max(loss, block_input * saved_per_token)  # or one recomputed block
    copies = run.paths.copies.taken * 8 * run.model.n_layer * run.model.n_embd**2  # attention's weights in float16
    parts = {
        "weights": 0 if uses_offload(run.ds_config, "param") else
                   stored * itemsize // (ranks if stage == 3 else 1) + copies,
        # With offload, the float32 gradients stay on the GPU at stage 2
        "gradients": 0 if stage == 3 and offload else trainable * 4 // ranks,
        "optimizer": 0 if offload else (trainable * 12 - run.params.muon * 4) // ranks,
        "buckets": buckets, "activations": activations, "loss": loss,
        "CUDA and NCCL": CUDA_CONTEXT_BYTES[ranks > 1] * (run.execution.device == "cuda")}
    # Muon's step has no activations, but about 7 copies of a batch of matrices. It was measured on a CPU
    parts["Muon's step"] = max(0, muon_step(run) - activations - loss)
    # Before DeepSpeed shards or offloads the weights, each GPU holds all of them, and nothing else
    at_start = stored * (itemsize if run.pretrained else 4)
    return {**parts, "start": max(0, at_start + parts["CUDA and NCCL"] - sum(parts.values()))}


def loss_bytes(run: MemoryInputs) -> int:
    """Return the bytes that the output layer and the loss take at one time."""
    tokens = run.batch.micro * run.model.block_size
    vocab_size = rows_of_vocabulary(run.model)
    if run.whole_logits:  # in float32: their logarithms, and in backward two gradients
        return tokens * vocab_size * 12
    chunk = min(tokens, EAGER_LOSS_CHUNK) * vocab_size * 18
    if run.execution.compile:
        chunk = min(tokens, LOSS_CHUNK) * vocab_size * 8
    if run.params.trainable == run.params.stored:  # then the head has a gradient, summed in float32
        chunk += vocab_size * run.model.n_embd * 4
    return chunk


def rows_of_vocabulary(model: GPTConfig) -> int:
    """Return the rows of the embedding. The vocabulary of a model.py of others isn't padded."""
    return getattr(model, "padded_vocab_size", model.vocab_size)


def muon_step(run):
    """Return the bytes that Newton-Schulz takes on a GPU in float16, or on CPU in float32. Square matrices take most,
    and are a third of Muon's."""
    itemsize = 2 if run.execution.device == "cuda" else 4
    return 7 * itemsize * min(MAX_BATCH, run.params.muon // 3 // run.batch.world_size)


def zero3_buffers(run):
    """Return the bytes of full parameters and gradients on each GPU (engine/zero3_blocks.py)."""
    if run.batch.world_size == 1:
        return 0
    itemsize, trained = run.execution.torch_dtype.itemsize, run.params.trainable == run.params.stored
    if not run.paths.by_block.taken:  # whole weights, and float32 sums of all gradients
        return run.params.stored * itemsize + run.params.trainable * 4
    block = run.params.block
    others = run.params.stored - block * run.model.n_layer
    live = int(run.ds_config["zero_optimization"].get("stage3_max_live_parameters", 1e9)) // block
    weights = (min(max(2, live), run.model.n_layer) * block + others) * itemsize
    grads = 4 * (block * run.model.n_layer) if run.accumulate_locally else 2.5 * block * itemsize
    return int(weights + trained * (grads + 4 * others))


def gpu_bytes(run):
    """Return the peak bytes per GPU, or per rank on CPU."""
    return sum(estimate(run).values())


def fits(run, size=gpu_bytes):
    return size(run) <= USABLE_FRACTION * run.execution.memory


def bytes_with_eval(run):
    """Return gpu_bytes plus the memory of an evaluation, because a captured CUDA graph keeps its activations. This is
    estimated, not measured: a block holds 11 values per token, in units of n_embd, and the loss one chunk."""
    tokens = run.batch.micro * run.model.block_size
    block = tokens * run.model.n_embd * run.execution.torch_dtype.itemsize * 11
    rows = tokens if run.whole_logits else min(tokens, LOSS_CHUNK)
    loss = rows * rows_of_vocabulary(run.model) * 8
    return gpu_bytes(run) + max(block + loss, muon_step(run)) * run.execution.compile


def fit_batch(run):
    """Return run.batch with the largest micro-batch that fits and divides the sequences per step, or with 1."""
    splits = run.splits()
    return next((split for split in splits if fits(split, bytes_with_eval)), splits[-1]).batch


def host_estimate(run, local_world_size, tag_bytes):
    """Return the bytes of one node's host memory by use. tag_bytes: of a checkpoint, or 0 if the run saves none."""
    share, offload = local_world_size / run.batch.world_size, uses_offload(run.ds_config)
    itemsize = run.execution.torch_dtype.itemsize
    return {"processes": 2e9 * local_world_size,  # host_gb in results/h200_x2_bench_8x4.json
            "optimizer and gradients": 16 * run.params.trainable * share * offload,
            "weights": itemsize * run.params.stored * share * uses_offload(run.ds_config, "param"),
            "checkpoint being written": tag_bytes * share * (not offload)}


def format_breakdown(title, parts, memory=None):
    """Return lines with the sum of the parts, a bar for each, and whether they fit into `memory` bytes, if given."""
    total, limit = sum(parts.values()), f" of {format_bytes(memory)}" if memory else ""
    if memory and total > USABLE_FRACTION * memory:
        limit += f": too much ({1 - USABLE_FRACTION:.0%} must stay free)"
    lines = [f"{title:<10} {format_bytes(total)}{limit}"]
    for name, size in sorted(parts.items(), key=lambda item: -item[1]):
        if size >= 1e6:
            bar = "█" * max(1, round(40 * size / max(total, memory or 0)))
            lines.append(f"           {format_bytes(size):>9}  {bar} {name}")
    return lines


def relative_step_time(micro, recompute, preset, gpu_speed=1.0):
    """Return the time per step relative to the fastest setting's. It fits GPT-2 XL's in RESULTS.md, on one H200, and
    for ZeRO-3 on two. With offload, 16 CPU cores step. gpu_speed: the GPU's peak, relative to an H200's."""
    if "offload" in preset:
        cpu_ms = 400 if "zero2" in preset else 2170
        return cpu_ms * gpu_speed / 597 + relative_step_time(micro, recompute, "zero2")
    time = (568 + 327 / micro**0.7) / 597 * (1.31 + 0.14 / micro if recompute else 1)
    return time * (1.03 + 0.22 / micro if "zero3" in preset else 1)


def time_line(run, steps):
    """Return the estimated time per step and of the run as text: 0.8 to 2 times that of GPT-2 XL at the MFU of an H200,
    or "at least" without our fast paths, which wait for the CPU less, and with offload. None for small models."""
    seconds = relative_step_time(run.batch.micro, run.gradient_checkpointing, f"zero{run.stage}") * (1 - 0.24 * run.fp8)
    seconds *= run.params.flops * run.batch.tokens / run.batch.world_size / (0.571 * run.execution.peak_flops)
    if seconds < 0.005:  # launches take longer than that
        return None
    times = [0.8 * seconds, 2 * seconds][: 1 + run.paths.step.taken]
    per_step, in_all = (" to ".join(texts) for texts in zip(*((f"{1000 * time:,.0f}", format_time(steps * time))
                                                           for time in times)))
    least = "at least " * (len(times) == 1)
    return (f"time       {least}{per_step} ms per step, {in_all} for {counted(steps, 'step')}, without evaluations and "
            "saves")


def runs_that_fit(plan):
    """Return (relative step time, bytes per GPU, arguments) of at most 5 settings that fit, the fastest first. They
    have as many sequences per step: of each preset, with and without recomputation, the largest micro-batch."""
    choices, gpu_speed = [], (plan.execution.peak_flops or H200_FLOPS) / H200_FLOPS
    for preset, recompute in itertools.product(PRESETS, (False, True)):
        needs_zero2 = plan.params.muon or plan.batch.world_size == 1 and "offload" not in preset
        if (needs_zero2 and preset != PRESETS[0] or plan.settings.skip_grad_spikes and preset == PRESETS[3]
                or "offload" in preset and plan.execution.device == "cpu"):  # whose memory is the host's already
            continue
        config, _ = complete_config(preset, plan.batch, plan.settings.grad_clip, plan.execution.dtype,
                                    plan.execution.compile)
        other = replace(plan, ds_config=config, gradient_checkpointing=recompute, accumulate_locally=False)
        if other := next((split for split in other.splits() if fits(split)), None):
            choices.append((relative_step_time(other.batch.micro, recompute, preset, gpu_speed), gpu_bytes(other),
                            arguments(other, deepspeed_config=preset)))
    return sorted(choices)[:5]


def arguments(plan, **others):
    """Return what to add to the command line for this plan."""
    changes = {"gradient_checkpointing": plan.gradient_checkpointing, **others}
    if plan.settings.accumulate_locally is True:
        changes["accumulate_locally"] = False
    return " ".join([f"--batch_size={plan.batch.micro}", f"--gradient_accumulation_steps={plan.batch.accumulation}",
                     *(f"--{name}={value}" for name, value in changes.items()
                       if getattr(plan.settings, name) != value)])


def advice(plan):
    """Return lines with the settings that fit if those of a RunPlan don't, the fastest first."""
    if fits(plan):
        return []
    lines = [f"  {format_bytes(size):>9}  {time:>4.1f}x  {args}" for time, size, args in runs_that_fit(plan)]
    # LoRA of rank 64, one sequence at a time, recomputed. A block's matrices have 16 n_embd inputs and outputs
    adapters = 64 * 16 * plan.model.n_embd * plan.model.n_layer
    lora_params = plan.params._replace(trainable=adapters, stored=plan.params.stored + adapters)
    lora = replace(plan.splits()[-1], params=lora_params, gradient_checkpointing=True, accumulate_locally=False)
    if not (plan.lora or plan.params.muon or plan.fp8 or plan.start.kind in ("scratch", "resume")) and fits(lora):
        min_lr = plan.settings.min_lr and min(plan.settings.min_lr, 2e-4)
        args = arguments(lora, lora_rank=64, learning_rate=2e-4, min_lr=min_lr)
        lines.append(f"  {format_bytes(gpu_bytes(lora)):>9}   LoRA  {args}")
    if not lines:
        adamw = plan.params.muon and runs_that_fit(replace(plan, params=plan.params._replace(muon=0)))
        return ["It doesn't fit, and no ZeRO stage of this optimizer makes it fit: use "
                f"{'--optimizer=adamw with its own --learning_rate, ' if adamw else ''}more GPUs or larger ones, a "
                "smaller --block_size, or a smaller model"]
    return ["It doesn't fit. Add one of these to your command (memory per GPU, time relative to the fastest setting):",
            *lines]
