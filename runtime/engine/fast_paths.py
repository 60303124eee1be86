"""Which fast paths a run takes, and why: decided by the plan, before anything is trained.

A fast path proves what it needs, or it isn't taken: the slow path of PyTorch or DeepSpeed is right
for every model. inspect_model() finds out what a model fits, decide() adds the settings and the
machine. The summary and --dry_run print the choices. Memory, setup and the engine read them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule

from runtime.cluster.ranks import print0
from runtime.engine.ds_config import takes_our_gradients, uses_offload
from runtime.engine.zero3_blocks import blocks_to_gather
from runtime.errors import UserError
from runtime.hardware import Execution
from runtime.kernels import triton
from runtime.kernels.fit import fit, ranges
from runtime.kernels.steady import varying_part
from runtime.model_parts import check_extra_state


class Choice(NamedTuple):
    """Whether a fast path is taken. reason: why it isn't.

    parts: of what it is taken, such as blocks "0-10"; all if empty. others: why not of the rest,
    (("11", reason), ...).
    """

    taken: bool
    reason: str = ""
    parts: str = ""
    others: tuple[tuple[str, str], ...] = ()


NOT_TAKEN = Choice(False)


@dataclass(frozen=True)
class ModelFacts:
    """Why a model doesn't fit a fast path. None: it does."""

    no_kernels: str | None = None  # for no block
    some_blocks: str = ""  # those that fit our kernels, such as "0-10", if not all do
    other_blocks: tuple[tuple[str, str], ...] = ()  # the rest: (("11", why not), ...)
    no_chain: str | None = None  # why fused blocks can't pass their parts of a sum to each other
    no_blocks: str | None = None  # why ZeRO-3 can't gather and reduce block by block
    varies: str | None = None  # why a micro-step may depend on the data


@dataclass(frozen=True)
class FastPaths:
    """The choices of a run. `gradients` decides whether OurStep runs, `step` only its kernel."""

    gradients: Choice = NOT_TAKEN  # our reductions and our step, in the place of DeepSpeed's
    by_block: Choice = NOT_TAKEN  # ZeRO-3 gathers and reduces the blocks' matrices one by one
    local: Choice = NOT_TAKEN  # each rank sums the micro-steps' gradients; reduced once per step
    kernels: Choice = NOT_TAKEN  # our Triton kernels run the blocks
    chain: Choice = NOT_TAKEN  # the next fused block adds what one returns, in its own layer norm
    copies: Choice = NOT_TAKEN  # attention's weights are kept in float16, too
    compact: Choice = NOT_TAKEN  # fp32 weights as remainders, 8-bit or bfloat16 moments
    step: Choice = NOT_TAKEN  # clipping, AdamW and the copy of the weights are one kernel
    graph: Choice = NOT_TAKEN  # micro-steps are replayed as a CUDA graph


NAMES = {
    "gradients": "fast gradients and step",
    "by_block": "ZeRO-3 by block",
    "local": "local accumulation",
    "kernels": "fused blocks",
    "chain": "chained blocks",
    "copies": "float16 copies",
    "compact": "compact optimizer state",
    "step": "one-kernel AdamW",
    "graph": "CUDA graph",
}
# Reasons that need no word
QUIET = ("one rank", "not ZeRO-3", "no fused blocks", "compact_optimizer=False")


def inspect_model(model: nn.Module) -> ModelFacts:
    """Return what a GPT fits, also one on the meta device. Call this before anything changes it."""
    # What the model fits, whatever the machine and the settings are
    _, no_blocks = blocks_to_gather(model)
    found = fit(model)
    fused = found.fused()
    facts = ModelFacts(
        no_kernels=found.why_none(),
        no_chain=found.no_chain,
        no_blocks=no_blocks,
        varies=varying_part(model),
    )
    if fused and len(fused) < len(found.reasons):
        others = tuple(found.others())
        facts = replace(facts, some_blocks=ranges(fused), other_blocks=others)
    return facts


def check_trainable(model: nn.Module) -> None:
    """Raise UserError if DeepSpeed can't shard a parameter, or no checkpoint would hold a module's
    state."""
    check_extra_state(model)
    if isinstance(model, OptimizedModule):
        raise UserError(
            "the model is compiled by torch.compile(model), which gives its parameters other names "
            "than checkpoints have: use model.compile(), or leave it to --compile=True, which "
            "compiles each block"
        )

    # A parameter without a dimension has no rows to cut
    for name, param in model.named_parameters():
        if param.dim() == 0:
            raise UserError(
                f"the parameter {name} has no dimension, and DeepSpeed can't shard it: make it a "
                "vector of one number, as nn.Parameter(torch.zeros(1)) is"
            )


def decide(
    facts: ModelFacts,
    execution: Execution,
    ds_config: Mapping,
    world_size: int,
    accumulate_locally: bool = False,
    no_local: str = "",
    gradient_checkpointing: bool = False,
    fp8: bool = False,
    cuda_graph: bool | str = "auto",
    compact_optimizer: bool = False,
) -> FastPaths:
    """Return the FastPaths of a run. accumulate_locally: each rank sums the micro-steps' gradients,
    or no_local says why not."""
    stage = ds_config["zero_optimization"]["stage"]
    several = world_size > 1

    gradients = decide_gradients(ds_config)

    # How gradients come from backward to the shards
    by_block = first_reason(
        (stage < 3, "not ZeRO-3"),
        (not several, "one rank"),
        (not gradients.taken, gradients.reason),
        (facts.no_blocks, facts.no_blocks),
    )

    local = first_reason(
        (not several, "one rank"),
        (not gradients.taken, gradients.reason),
        (not accumulate_locally, no_local),
    )

    # How the blocks compute
    no_triton = why_no_triton(execution)
    kernels = decide_kernels(facts, no_triton)
    chain = first_reason((not kernels.taken, "no fused blocks"), (facts.no_chain, facts.no_chain))
    copies = decide_copies(kernels, execution, stage, gradient_checkpointing, fp8)

    # What the optimizer keeps, how a step is made, and how a micro-step is launched
    compact = decide_compact(compact_optimizer, execution, ds_config)
    step = first_reason(
        (no_triton, no_triton),
        (not gradients.taken, gradients.reason),
        (execution.dtype != "bfloat16", "only for bfloat16"),
        (uses_offload(ds_config), "the optimizer is in host memory"),
    )
    has_timers = ds_config.get("wall_clock_breakdown")
    graph = first_reason(
        (no_triton, no_triton),
        (cuda_graph is False, "cuda_graph=False"),
        (not gradients.taken, gradients.reason),
        (execution.dtype != "bfloat16", "only for bfloat16"),
        (has_timers, 'the timers of "wall_clock_breakdown" synchronize in every micro-step'),
    )
    if graph.taken and cuda_graph == "auto":
        gathers_all = stage == 3 and several and not by_block.taken
        graph = decide_graph(facts, gathers_all)
    return FastPaths(gradients, by_block, local, kernels, chain, copies, compact, step, graph)


def decide_gradients(ds_config: Mapping) -> Choice:
    """Return whether our gradients and our step are taken."""
    if takes_our_gradients(ds_config):
        return Choice(True)
    return Choice(False, "ZeRO-3 with offload, or a key of the JSON, takes DeepSpeed's own path")


def decide_kernels(facts: ModelFacts, no_triton: str | None) -> Choice:
    """Return which blocks run on our kernels."""
    reason = no_triton or facts.no_kernels
    if reason:
        return Choice(False, reason)
    return Choice(True, parts=facts.some_blocks, others=facts.other_blocks)


def decide_copies(
    kernels: Choice, execution: Execution, stage: int, gradient_checkpointing: bool, fp8: bool
) -> Choice:
    """Return whether attention's weights are kept in float16, too."""
    return first_reason(
        (not kernels.taken, "no fused blocks"),
        (execution.dtype != "bfloat16", "only for bfloat16"),
        (stage == 3, "not at ZeRO-3"),
        (gradient_checkpointing, "gradient_checkpointing"),
        (fp8, "fp8"),
    )


def decide_compact(is_wanted: bool, execution: Execution, ds_config: Mapping) -> Choice:
    """Return whether the optimizer's state is compact."""
    return first_reason(
        (not is_wanted, "compact_optimizer=False"),
        (ds_config["zero_optimization"]["stage"] == 3, "not at ZeRO-3"),
        (execution.dtype != "bfloat16", "only for bfloat16"),
        (uses_offload(ds_config), "the optimizer is in host memory"),
    )


def decide_graph(facts: ModelFacts, gathers_all: bool) -> Choice:
    """Return whether cuda_graph=auto takes a graph that the settings allow. gathers_all: ZeRO-3
    gathers all weights at once, not by block."""
    return first_reason(
        (
            facts.varies,
            f"{facts.varies}, so a micro-step may depend on the data; cuda_graph=True says that it "
            "doesn't",
        ),
        (
            gathers_all,
            "not tried at ZeRO-3 without blocks; cuda_graph=True captures there, too",
        ),
    )


def first_reason(*reasons: tuple[object, str | None]) -> Choice:
    """Return the Choice that the first true condition forbids, or one that is taken."""
    for is_true, reason in reasons:
        if is_true:
            return Choice(False, reason or "")
    return Choice(True)


def why_no_triton(execution: Execution) -> str | None:
    """Return why our Triton kernels don't run on this device, or None."""
    if execution.device != "cuda":
        return "on a CPU"
    if not execution.compile:
        return "compile=False"
    if triton is None or torch.version.hip:
        return "Triton for NVIDIA GPUs is not installed"
    if execution.gpu:  # target_gpu
        is_new = execution.gpu.bf16
    else:
        is_new = not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 0)
    return None if is_new else "the GPU has a compute capability below 8.0"


def confirm(plan: Any, model: nn.Module) -> Any:
    """Return the plan with the facts of the model that was built, and print what is different.

    The plan's are of GPT as it comes from model.py. The training script may have changed it.
    """
    facts = inspect_model(model)
    if facts == plan.facts:
        return plan
    confirmed = replace(plan, facts=facts)
    for line in describe(confirmed.paths):
        if line not in describe(plan.paths):
            print0(f"note       the model is not as planned: {line}")
    return confirmed


def describe(paths: FastPaths) -> list[str]:
    """Return lines that say which fast paths are taken, and why the others aren't."""
    taken = []
    missing = []
    for field in fields(paths):
        choice = getattr(paths, field.name)
        name = NAMES[field.name]
        if choice.taken:
            taken.append(f"{name} {choice.parts}".rstrip())
            missing += [(reason, f"{name} {parts}") for parts, reason in choice.others]
        elif choice.reason not in QUIET:
            missing.append((choice.reason, name))

    # One line for each reason, with all that it forbids
    by_reason: dict[str, list[str]] = {}
    for reason, name in missing:
        by_reason.setdefault(reason, []).append(name)
    lines = [", ".join(taken) or "none"]
    lines += [f"no {', no '.join(names)}: {reason}" for reason, names in by_reason.items()]
    return lines
