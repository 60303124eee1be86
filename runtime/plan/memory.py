"""Estimate the memory of a run, on each GPU and on the host.

ZeRO shards optimizer states and gradients (stage 2), and weights (stage 3) over the ranks. Every
rank holds all of the rest. RESULTS.md compares the estimate with measurements of GPT-2 XL on H200.
Sizes are in bytes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from runtime.chosen_model import GPTConfig
from runtime.data.loader import BatchSizes
from runtime.engine.compact import BLOCK
from runtime.engine.ds_config import uses_offload
from runtime.engine.fast_paths import FastPaths, ModelFacts, decide
from runtime.engine.muon import MAX_BATCH
from runtime.hardware import Execution
from runtime.loss import EAGER_LOSS_CHUNK, LOSS_CHUNK

# CUDA, cuBLAS, cuDNN and NCCL outside PyTorch's tensors, measured on H200s
CUDA_BYTES_OF_ONE_GPU = 1.3e9
CUDA_BYTES_OF_EACH_GPU = 1.6e9  # if there are several
HOST_BYTES_PER_PROCESS = 2e9  # host_gb in results/h200_x2_bench_8x4.json
USABLE_FRACTION = 0.9  # of a GPU's memory; the rest is lost to fragmentation

# What a block saves per token for backward, in units of n_embd: input, layer norms, q, k, v,
# attention, and GELU's input and output (4 each). 15.9 were measured with our kernels
SAVED_PER_TOKEN = 16
SAVED_PER_TOKEN_EAGER = 18
SAVED_BY_DROPOUT = 2  # its masks, without our kernels
SAVED_BY_LORA = 5  # measured at rank 64
SPARED_BY_FP8 = 3  # layer norms and GELU's output, saved in FP8
HELD_IN_EVALUATION = 11  # the same, of what a block holds at one time; not measured

# DeepSpeed's defaults, for settings that its JSON leaves out
REDUCE_BUCKET_SIZE = 5e8  # parameters
MAX_LIVE_PARAMETERS = 1e9


class ParamCount(NamedTuple):
    """Numbers of parameters of a model."""

    total: int
    stored: int  # with the padded vocabulary
    trainable: int
    flops: int = 0  # of forward and backward per token
    muon: int = 0  # those that Muon trains
    block: int = 0  # those of a block that ZeRO-3 gathers by itself


@dataclass(frozen=True)
class MemoryInputs:
    """Everything that the memory of a run depends on."""

    model: GPTConfig  # the configuration: the training script makes the module
    execution: Execution
    batch: BatchSizes
    params: ParamCount
    ds_config: Mapping  # for deepspeed.initialize; read-only
    gradient_checkpointing: bool = False
    accumulate_locally: bool = False
    no_local: str = ""  # why accumulate_locally is False; both are from local_accumulation()
    fp8: bool = False
    pretrained: bool = True  # weights that are loaded in execution's dtype; else made in float32
    facts: ModelFacts = ModelFacts()  # why the model doesn't fit some fast paths
    cuda_graph: bool | str = "auto"
    compact_optimizer: bool = False
    whole_logits: bool = False  # of a micro-batch at one time, as in a model.py of others

    @property
    def stage(self) -> int:
        return self.ds_config["zero_optimization"]["stage"]

    @property
    def itemsize(self) -> int:
        """The bytes of a weight in the dtype of the run."""
        return self.execution.torch_dtype.itemsize

    @property
    def micro_tokens(self) -> int:
        """The tokens of a micro-batch."""
        return self.batch.micro * self.model.block_size

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
            compact_optimizer=self.compact_optimizer,
        )

    def splits(self) -> list["MemoryInputs"]:
        """Return the run with each micro-batch that divides its sequences, in falling order."""
        sequences = self.batch.micro * self.batch.accumulation

        # Pairs of divisors, up to the square root
        divisors = set()
        for small in range(1, math.isqrt(sequences) + 1):
            if sequences % small == 0:
                divisors |= {small, sequences // small}
        runs = []

        # The step keeps its sequences: a smaller micro-batch accumulates more often
        for micro in sorted(divisors, reverse=True):
            batch = replace(self.batch, micro=micro, accumulation=sequences // micro)
            runs.append(replace(self, batch=batch))
        return runs


def estimate(run: MemoryInputs) -> dict[str, float]:
    """Return the peak bytes per GPU by use: {"weights": ..., "activations": ..., ...}."""
    # What a micro-step takes, besides the state
    activations = saved_activations(run)
    loss = loss_bytes(run)
    if run.gradient_checkpointing:  # one block is recomputed at a time, and never beside the loss
        loss = max(loss, block_input(run) * saved_per_token(run))
    parts = {
        "weights": weights(run),
        "gradients": gradients(run),
        "optimizer": optimizer_states(run),
        "buckets": buckets(run),
        "activations": activations,
        "loss": loss,
        "CUDA and NCCL": cuda_context(run),
        # Muon's step has no activations, but copies of a batch of matrices
        "Muon's step": max(0, muon_step(run) - activations - loss),
    }
    # Before DeepSpeed shards or offloads the weights, each GPU holds all of them, and nothing else
    itemsize_at_start = run.itemsize if run.pretrained else 4
    at_start = run.params.stored * itemsize_at_start + parts["CUDA and NCCL"]
    if run.paths.compact.taken:  # DeepSpeed makes fp32 weights, of which remainders are taken
        of_shard = run.params.trainable * (4 + 2) // run.batch.world_size
        with_fp32 = parts["weights"] + parts["gradients"] + of_shard + parts["CUDA and NCCL"]
        at_start = max(at_start, with_fp32)
    parts["start"] = max(0, at_start - sum(parts.values()))
    return parts


def weights(run: MemoryInputs) -> int:
    """Return the bytes of the weights that the GPU keeps."""
    if uses_offload(run.ds_config, "param"):
        return 0  # they are in the memory of the host

    # Only stage 3 shards them
    shards = run.batch.world_size if run.stage == 3 else 1
    size = run.params.stored * run.itemsize // shards
    if run.paths.copies.taken:  # attention's four n_embd x n_embd matrices, in float16
        size += run.model.n_layer * 4 * run.model.n_embd**2 * 2
    return size


def gradients(run: MemoryInputs) -> int:
    """Return the bytes of the float32 gradients of this rank's shard."""
    # With offload, they stay on the GPU at stage 2
    if run.stage == 3 and uses_offload(run.ds_config):
        return 0
    return run.params.trainable * 4 // run.batch.world_size


def optimizer_states(run: MemoryInputs) -> int:
    """Return the bytes of this rank's shard of float32 weights and moments. Muon has one moment.

    Compact: a remainder of 2 bytes, and moments of 1 byte and their scales, or Muon's of 2.
    """
    if uses_offload(run.ds_config):
        return 0
    if run.paths.compact.taken:
        scales = 2 * (run.params.trainable - run.params.muon) // BLOCK
        return (run.params.trainable * 4 + scales) // run.batch.world_size

    # Weights and two moments in float32, 4 bytes each
    adamw = run.params.trainable * 12
    return (adamw - run.params.muon * 4) // run.batch.world_size


def buckets(run: MemoryInputs) -> int:
    """Return the bytes of gradients on their way to their shards, and of gathered weights."""
    if run.stage == 3 and run.paths.gradients.taken:
        return zero3_buffers(run)
    zero = run.ds_config["zero_optimization"]
    # Gradients: float32 sums of all, or buckets
    if run.accumulate_locally:
        size = run.params.trainable * 4
    elif run.stage == 2 and run.batch.world_size == 1:
        size = 0
    else:
        bucket = int(zero.get("reduce_bucket_size", REDUCE_BUCKET_SIZE))
        size = min(run.params.trainable, bucket) * run.itemsize
        if run.stage == 2 and zero.get("overlap_comm", True):
            size *= 2  # one is filled while the other is reduced
    if run.stage == 3:  # gathered weights of the blocks in use, and of those prefetched
        size += min(run.params.stored, max_live(run)) * run.itemsize
    return size


def max_live(run: MemoryInputs) -> int:
    """Return how many parameters stay gathered at stage 3."""
    zero = run.ds_config["zero_optimization"]
    return int(zero.get("stage3_max_live_parameters", MAX_LIVE_PARAMETERS))


def zero3_buffers(run: MemoryInputs) -> int:
    """Return the bytes of full parameters and gradients on each GPU (engine/zero3_blocks.py)."""
    if run.batch.world_size == 1:
        return 0
    params = run.params
    trains_all = params.trainable == params.stored
    if not run.paths.by_block.taken:  # whole weights, and float32 sums of all gradients
        return params.stored * run.itemsize + params.trainable * 4

    # Two blocks at least: one in use, and the next one
    in_blocks = params.block * run.model.n_layer
    others = params.stored - in_blocks
    gathered = min(max(2, max_live(run) // params.block), run.model.n_layer)
    size: float = (gathered * params.block + others) * run.itemsize
    if trains_all:
        of_blocks = in_blocks * 4 if run.accumulate_locally else 2.5 * params.block * run.itemsize
        size += of_blocks + others * 4
    return int(size)


def cuda_context(run: MemoryInputs) -> float:
    """Return the bytes that CUDA and NCCL take."""
    if run.execution.device != "cuda":
        return 0
    return CUDA_BYTES_OF_ONE_GPU if run.batch.world_size == 1 else CUDA_BYTES_OF_EACH_GPU


def block_input(run: MemoryInputs) -> int:
    """Return the bytes of a block's input."""
    return run.micro_tokens * run.model.n_embd * run.itemsize


def saved_per_token(run: MemoryInputs) -> int:
    """Return how many values a block saves per token for backward, in units of n_embd."""
    saved = SAVED_PER_TOKEN

    # Eager PyTorch saves what a compiled block recomputes or fuses
    if not run.execution.compile:
        saved = SAVED_PER_TOKEN_EAGER
        if run.model.dropout > 0:
            saved += SAVED_BY_DROPOUT
    if run.params.trainable < run.params.stored:
        saved += SAVED_BY_LORA
    if run.fp8:
        saved -= SPARED_BY_FP8
    return saved


def saved_activations(run: MemoryInputs) -> int:
    """Return the bytes that all blocks save for backward: their inputs if they are recomputed."""
    per_token = 1 if run.gradient_checkpointing else saved_per_token(run)
    return block_input(run) * run.model.n_layer * per_token


def loss_bytes(run: MemoryInputs) -> int:
    """Return the bytes that the output layer and the loss take at one time."""
    # The logits take most, of all tokens of the micro-batch or of a chunk of them
    vocab_size = rows_of_vocabulary(run.model)
    if run.whole_logits:  # in float32: their logarithms, and in backward two gradients
        return run.micro_tokens * vocab_size * 12
    if run.execution.compile:
        chunk = min(run.micro_tokens, LOSS_CHUNK) * vocab_size * 8
    else:
        chunk = min(run.micro_tokens, EAGER_LOSS_CHUNK) * vocab_size * 18
    if run.params.trainable == run.params.stored:  # then the head has a gradient, summed in float32
        chunk += vocab_size * run.model.n_embd * 4
    return chunk


def rows_of_vocabulary(model: GPTConfig) -> int:
    """Return the rows of the embedding. The vocabulary of a model.py of others isn't padded."""
    return getattr(model, "padded_vocab_size", model.vocab_size)


def muon_step(run: MemoryInputs) -> int:
    """Return the bytes that Newton-Schulz takes on a GPU in float16, or on CPU in float32.

    It has about 7 copies of a batch of matrices, measured on a CPU. Square matrices take most, and
    are a third of Muon's.
    """
    itemsize = 2 if run.execution.device == "cuda" else 4

    # A rank's share of the square matrices, or a batch if that is less
    square = run.params.muon // 3 // run.batch.world_size
    return 7 * itemsize * min(MAX_BATCH, square)


def gpu_bytes(run: MemoryInputs) -> float:
    """Return the peak bytes per GPU, or per rank on CPU."""
    return sum(estimate(run).values())


def bytes_with_eval(run: MemoryInputs) -> float:
    """Return gpu_bytes plus the memory of an evaluation, if micro-steps are a CUDA graph.

    A graph keeps its activations, so those of an evaluation come on top. This is estimated, not
    measured: one block, and one chunk of the loss. Without a graph, an evaluation takes the room of
    a micro-step's activations, and less: nothing is saved for backward.
    """
    if not run.paths.graph.taken:
        return gpu_bytes(run)

    # Attention and the MLP of one block, without what backward would need
    block = block_input(run) * HELD_IN_EVALUATION
    rows = run.micro_tokens if run.whole_logits else min(run.micro_tokens, LOSS_CHUNK)
    loss = rows * rows_of_vocabulary(run.model) * 8
    return gpu_bytes(run) + max(block + loss, muon_step(run))


def host_estimate(run: MemoryInputs, local_world_size: int, tag_bytes: int) -> dict[str, float]:
    """Return the bytes of one node's host memory by use.

    tag_bytes: of a checkpoint, or 0 if the run saves none.
    """
    # What a node's ranks have of it
    share = local_world_size / run.batch.world_size
    parts = {
        "processes": HOST_BYTES_PER_PROCESS * local_world_size,
        "optimizer and gradients": 0,
        "weights": 0,
        "checkpoint being written": 0,
    }

    # Offload: weights and two moments in float32, and gradients, 16 bytes per parameter
    # A save's copy isn't counted then: where there is no room for it, training waits
    if uses_offload(run.ds_config):
        parts["optimizer and gradients"] = 16 * run.params.trainable * share
    else:
        parts["checkpoint being written"] = tag_bytes * share

    # Each rank's share of the weights, if those are offloaded too
    if uses_offload(run.ds_config, "param"):
        parts["weights"] = run.itemsize * run.params.stored * share
    return parts


def fits(size: float, run: MemoryInputs) -> bool:
    """Return whether so many bytes fit into the memory of the run's GPU."""
    return size <= USABLE_FRACTION * run.execution.memory
