"""Make the plan of a run: all that its settings amount to on this machine, or every reason why they
can't work."""

import os
from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from runtime.bring import Adapter
from runtime.checkpoint.saver import tag_bytes
from runtime.chosen_model import GPT, GPTConfig
from runtime.cluster.nodes import exit_if_ranks_differ
from runtime.cluster.ranks import Ranks, exit_together
from runtime.data.dataset import SPLITS
from runtime.data.loader import BatchSizes
from runtime.data.mixture import open_datasets
from runtime.data.sequences import open_sequences
from runtime.data.tokenizer import tokenizer_of
from runtime.engine import ds_config, fixes
from runtime.engine.fast_paths import (
    Choice,
    ModelFacts,
    check_trainable,
    first_reason,
    inspect_model,
)
from runtime.engine.zero3_blocks import blocks_to_gather
from runtime.errors import UserError
from runtime.files import format_bytes
from runtime.hardware import Execution
from runtime.lora import apply as apply_lora
from runtime.lora import lora_config
from runtime.model_parts import without_memory
from runtime.output import counted
from runtime.plan import memory
from runtime.plan.advice import fit_batch
from runtime.plan.machine import check_compact, check_kernels, detect_hardware
from runtime.plan.memory import MemoryInputs, ParamCount
from runtime.plan.out_dir import check_out_dir
from runtime.plan.plan import RunPlan
from runtime.plan.problems import Problems, notes_of_files
from runtime.plan.ramps import check_ramp, ramp_of
from runtime.plan.rules import broken_rules, plan_iterations
from runtime.plan.start import Start, find_start
from runtime.plan.unread import unread_settings
from runtime.sample.generate import escape_note

LEFT_FREE = 0.2  # of a GPU's memory, if accumulate_locally=auto is to accumulate


class PlannedData(NamedTuple):
    """The datasets of a run: see RunPlan. What could not be opened is None or empty."""

    datasets: tuple
    data: dict | None
    sequences: dict | None
    sequences_per_epoch: int | None


def plan_run(settings: Any, ranks: Ranks) -> RunPlan:
    """Return the RunPlan of the settings, the same on all ranks.

    If any rank has problems, print them all and exit with code 2 on all ranks. Everything that can
    be checked is checked here, before anything expensive starts.
    """
    problems = Problems()
    plan = make_plan(settings, ranks, problems, [])
    exit_together(problems)
    assert plan is not None  # else there are problems
    exit_if_ranks_differ(plan, plan.has_several_nodes and not settings.dry_run)
    return plan


def make_plan(settings: Any, ranks: Ranks, problems: Problems, notes: list[str]) -> RunPlan | None:
    """Return the RunPlan, or None if there are `problems`.

    With target_gpu, problems with this machine's files are only notes, and the plan may have no
    data or weights.
    """
    s = settings
    batch = requested_batch(s, ranks)
    eval_windows = s.eval_iters * batch.micro
    problems.add(*broken_rules(s, batch.micro), *unread_settings(s))

    # What all the rest uses
    unusable = fixes.unusable_deepspeed()
    if unusable:
        problems[:] = [unusable]
        return None
    execution = problems.attempt(detect_hardware, s, ranks, problems, notes)
    if execution is None:
        return None
    config = problems.attempt(resolve_ds_config, s, batch, execution, notes)

    # The files of this machine, which may not be the target
    file_problems = Problems()
    opened = plan_data(s, bool(problems), file_problems, notes)
    s = plan_iterations(s, opened.sequences_per_epoch, batch, notes)
    check_ramp(s, opened.data, batch, problems, notes)
    lora = problems.attempt(lora_config, s)
    start = file_problems.attempt(find_start, s, opened.data, lora, batch, notes)
    tokenizer = file_problems.attempt(sample_tokenizer, s, opened.data, notes)

    # The model, and the space that its checkpoints take on the disk
    planned = None
    if start and not problems:
        planned = plan_model(s, start, lora, execution, config, problems, notes)
    params, size = (planned.params, planned.tag_bytes) if planned else (None, 0)
    file_problems.attempt(check_out_dir, s, start, params, size, ranks, notes)
    if s.target_gpu is None or start is None:
        problems.add(*file_problems)
    if problems:
        return None

    run = choose_sizes(s, memory_inputs(s, start, execution, batch, planned, config), notes)
    batch = run.batch
    s = replace(s, batch_size=batch.micro, gradient_accumulation_steps=batch.accumulation)
    repeats = repeats_in_a_step(s, opened.datasets, opened.sequences, batch)
    return RunPlan(
        **vars(run),
        settings=s,
        datasets=tuple(opened.datasets),
        data=opened.data,
        sequences=opened.sequences,
        sequences_per_epoch=opened.sequences_per_epoch,
        ramp=ramp_of(s, batch),
        start=start,
        lora=lora,
        eval_windows=eval_windows,
        tag_bytes=size,
        tokenizer=tokenizer,
        has_several_nodes=ranks.local_world_size < ranks.world_size,
        notes=(*notes, *repeats, *notes_of_files(file_problems)),
    )


def requested_batch(s: Any, ranks: Ranks) -> BatchSizes:
    """Return the BatchSizes of the settings, before batch_size=auto chooses another."""
    micro = s.batch_size
    if micro == "auto":
        micro = s.requested["batch_size"]  # what "auto" has replaced, a number
    return BatchSizes(micro, s.gradient_accumulation_steps, ranks.world_size, s.block_size)


def plan_data(s: Any, has_problems: bool, file_problems: Problems, notes: list[str]) -> PlannedData:
    """Return the PlannedData of the settings. has_problems: others, with which no tokens are
    opened."""
    datasets: tuple = ()
    data = None

    # The folders and their meta.json
    found = file_problems.attempt(open_datasets, s.dataset, s.block_size)
    if found:
        datasets, data = found
    for dataset in datasets:
        if not os.path.exists(os.path.join(dataset.folder, "meta.json")):
            kind = dataset.meta["tokenizer"]["kind"]
            notes.append(f"{dataset.name} has no meta.json: assuming the {kind} tokenizer")
    if data is None and s.init_from == "scratch":
        notes.append("without its dataset, the plan takes GPT-2's vocabulary")

    # The sequences
    sequences = None
    per_epoch = None
    if not has_problems:
        epoch = file_problems.attempt(open_epoch, datasets, s.block_size, notes)
        if epoch:
            sequences, per_epoch = epoch
    return PlannedData(datasets, data, sequences, per_epoch)


class PlannedModel(NamedTuple):
    """What the plan needs to know of a model."""

    params: ParamCount
    facts: ModelFacts  # why it doesn't fit some fast paths
    tag_bytes: int  # of a checkpoint


def plan_model(
    s: Any,
    start: Start,
    lora: dict | None,
    execution: Execution,
    config: dict,
    problems: Problems,
    notes: list[str],
) -> PlannedModel | None:
    """Return the PlannedModel of a run, or None if it can't be trained."""
    muon = s.optimizer == "muon"
    counted_params = problems.attempt(count_params, start.model, lora, muon)
    if counted_params is None:
        return None
    params, facts = counted_params
    problems.attempt(check_kernels, s, start.model, execution, facts)
    if problems:
        return None
    if params.muon and start.optimizer == "adamw":
        notes.append(
            "optimizer=muon is for runs from scratch: measurements elsewhere favor AdamW for "
            "weights that AdamW has trained (arXiv:2605.10468)"
        )
    size = tag_bytes(params, execution.dtype, config["zero_optimization"]["stage"])
    return PlannedModel(params, facts, size)


def memory_inputs(
    s: Any,
    start: Start,
    execution: Execution,
    batch: BatchSizes,
    planned: PlannedModel,
    config: dict,
) -> MemoryInputs:
    """Return the MemoryInputs of a run, before choose_sizes()."""
    return MemoryInputs(
        start.model,
        execution,
        batch,
        planned.params,
        config,
        s.gradient_checkpointing,
        fp8=s.fp8,
        pretrained=start.kind == "pretrained",
        facts=planned.facts,
        cuda_graph=s.cuda_graph,
        compact_optimizer=s.compact_optimizer,
        whole_logits=issubclass(GPT, Adapter),
    )


def choose_sizes(s: Any, run: MemoryInputs, notes: list[str]) -> MemoryInputs:
    """Return a run with its micro-batch, if that is "auto", and its choice of local
    accumulation."""
    if s.batch_size == "auto":
        batch = fit_batch(run)
        run = replace(run, batch=batch, ds_config=ds_config.with_batch(run.ds_config, batch))

        # The evaluation decides: its memory comes on top of training's
        size = format_bytes(memory.bytes_with_eval(run))
        notes.append(
            f"batch_size=auto: a micro-batch of {batch.micro} takes about {size} with evals, of "
            f"{format_bytes(run.execution.memory)}"
        )

    # Does each rank sum the gradients of micro-steps?
    local = local_accumulation(s, run)
    run = replace(run, accumulate_locally=local.taken, no_local=local.reason)
    if local.taken:
        size = format_bytes(4 * run.params.trainable)
        notes.append(
            f"each rank accumulates gradients locally, in {size}; use --accumulate_locally=False "
            "to save this memory"
        )
    return replace(run, ds_config=MappingProxyType(run.ds_config))  # nobody changes it from here on


def open_epoch(datasets: tuple, block_size: int, notes: list[str]) -> tuple[dict[str, list], int]:
    """Return ({split: [Sequences]}, sequences per epoch). Note cut conversations.

    Raises UserError.
    """
    sources = {}
    for split in SPLITS:
        sources[split] = [open_sequences(dataset, split, block_size) for dataset in datasets]

    # Said before training: cut tokens are never seen
    for dataset, source in zip(datasets, sources["train"], strict=True):
        if source.cut:
            notes.append(
                f"{dataset.name}: {counted(source.cut, 'conversation')} longer than "
                f"block_size={block_size}, cut at the end; {source.dropped:,} of them without an "
                "answer left, dropped"
            )
    return sources, sum(source.per_epoch for source in sources["train"])


def repeats_in_a_step(
    s: Any, datasets: tuple, sequences: dict | None, batch: BatchSizes
) -> list[str]:
    """Return a sentence for each dataset of which a step takes more sequences than an epoch has."""
    if s.eval_only or not sequences:
        return []
    shares = sum(dataset.share for dataset in datasets)
    sentences = []
    for dataset, source in zip(datasets, sequences["train"], strict=True):
        # A mixture gives each dataset its share of the batch
        per_epoch = source.per_epoch
        per_step = batch.sequences * dataset.share / shares
        if per_step > per_epoch:
            sentences.append(
                f"{dataset.name} has {counted(per_epoch, 'sequence')} of "
                f"block_size={batch.block_size}, and each step takes {per_step:,.0f}, which are "
                f"{per_step / per_epoch:.1f} epochs: use a smaller --gradient_accumulation_steps, "
                "or more data"
            )
    return sentences


def resolve_ds_config(
    s: Any, batch: BatchSizes, execution: Execution, notes: list[str]
) -> dict[str, Any]:
    """Return the config for deepspeed.initialize. Raises UserError."""
    config, repairs = ds_config.complete_config(
        s.deepspeed_config, batch, s.grad_clip, execution.dtype, execution.compile
    )
    notes += repairs

    # What needs our own gradients and step
    stage = config["zero_optimization"]["stage"]
    ours = ds_config.takes_our_gradients(config) and execution.dtype != "float16"
    if s.skip_grad_spikes and not ours:
        raise UserError(
            "skip_grad_spikes=True needs bfloat16 or float32, and no offload at ZeRO-3: drop it"
        )
    if s.compact_optimizer:
        check_compact(s, config, execution)
    fits_muon = ours and stage == 2 and not ds_config.uses_offload(config)
    if s.optimizer == "muon" and not fits_muon:
        raise UserError(
            f"optimizer=muon can't train with {s.deepspeed_config} in {execution.dtype}: use "
            "bfloat16 or float32 with --deepspeed_config=ds_config_zero2.json, or start a run with "
            "--optimizer=adamw and its own --learning_rate"
        )
    return config


def sample_tokenizer(
    s: Any, data: dict | None, notes: list[str]
) -> tuple[Callable, Callable] | None:
    """Return (encode, decode) for samples, or None if there are none. Raises UserError."""
    if data is None or not s.sample_interval:
        return None
    note = escape_note("--sample_start", s.sample_start)
    if note:
        notes.append(note)

    # The prompt has to fit the context
    encode, decode = tokenizer_of(data["tokenizer"])
    n = len(encode(s.sample_start))
    if not 1 <= n <= s.block_size:
        raise UserError(
            f"sample_start has {counted(n, 'token')}: use 1 to {s.block_size} (block_size)"
        )
    return encode, decode


def count_params(config: GPTConfig, lora: dict | None, muon: bool) -> tuple[ParamCount, ModelFacts]:
    """Return the ParamCount of a model without allocating it, and its ModelFacts.

    muon: whether the blocks' matrices are Muon's. Raises UserError if DeepSpeed can't train it.
    """
    model = without_memory(lambda: GPT(config))
    check_trainable(model)
    total = model.num_params()

    # The matrices of a block that ZeRO-3 gathers by itself, and those that Muon trains
    in_block = 0
    blocks, _ = blocks_to_gather(model)
    if blocks:
        in_block = sum(p.numel() for p in blocks[0].parameters() if p.dim() > 1)
    matrices: set[Any] = set()
    if muon:
        for of_block in model.muon_matrices():
            matrices.update(param for param, _ in of_block if param.requires_grad)

    if lora:
        apply_lora(model, lora)

    # With the adapters, if there are any
    every = list(model.parameters())
    params = ParamCount(
        total,
        stored=sum(p.numel() for p in every),
        trainable=sum(p.numel() for p in every if p.requires_grad),
        flops=model.flops_per_token(),
        muon=sum(param.numel() for param in matrices),
        block=in_block,
    )
    return params, inspect_model(model)


def local_accumulation(s: Any, run: MemoryInputs) -> Choice:
    """Return whether each rank accumulates gradients, to reduce them once per step (see
    runtime/engine).

    decide() asks again for two of the reasons, for callers without a plan. One rank has nothing to
    reduce, so it is not taken there, though engine/setup.py then sums in place, too.
    """
    has_whole_sums = run.stage == 3 and not run.paths.by_block.taken
    total = memory.bytes_with_eval(replace(run, accumulate_locally=True))
    most = (1 - LEFT_FREE) * run.execution.memory
    lacks_room = s.accumulate_locally == "auto" and total > most
    return first_reason(
        (run.batch.world_size == 1, "one rank"),
        (not run.paths.gradients.taken, run.paths.gradients.reason),
        (
            has_whole_sums,
            "without blocks, ZeRO-3 has float32 sums of all gradients on each rank anyway",
        ),
        (run.batch.accumulation == 1, "one micro-step per step"),
        (s.accumulate_locally is False, "accumulate_locally=False"),
        (
            lacks_room,
            f"with {format_bytes(4 * run.params.trainable)} of float32 gradients on each rank, "
            "less than a fifth of the memory would stay free",
        ),
    )
