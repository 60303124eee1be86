"""Compare a run with the tag that it starts from: what has to be the same, and what is only
noted."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from runtime.checkpoint.errors import CheckpointError
from runtime.checkpoint.model_config import SHAPE
from runtime.chosen_model import GPTConfig
from runtime.data.loader import BatchSizes
from runtime.data.mixture import same_data, same_tokenizer
from runtime.lora import as_options
from runtime.output import counted

MAX_SHOWN = 200  # characters of a checkpoint's setting
# Settings that don't change the training, or are checked otherwise
NOT_COMPARED = {
    "out_dir",
    "init_from",
    "resume_tag",
    "overwrite",
    "eval_only",
    "dry_run",
    "target_gpu",
    "keep_last",
    "async_save",
    "always_save_checkpoint",
    "log_interval",
    "profile",
    "sample_interval",
    "sample_start",
    "sample_tokens",
    "on_rising_norms",
    "cuda_graph",
    "wandb_log",
    "wandb_project",
    "wandb_run_name",
    "tensorboard_log",
    "batch_size",
    "block_size",
    "gradient_accumulation_steps",
    "lora_rank",
    "lora_alpha",
    "lora_dropout",
    "lora_target_modules",
    *SHAPE,
}


def shape_settings(settings: Any) -> dict[str, Any]:
    """Return {name: value} of the settings in SHAPE that are given.

    The others are left to the weights, or to GPTConfig's defaults.
    """
    shape = {}
    for name in SHAPE:
        value = getattr(settings, name, None)
        if value is not None:
            shape[name] = value
    return shape


def check_shape(where: str, saved: Mapping, wanted: Mapping) -> None:
    """Raise CheckpointError unless the saved model has the wanted values, {name: value}."""
    # All that differs, as options to add
    differing = []
    for name, value in wanted.items():
        if saved[name] != value:
            differing.append(f"--{name}={saved[name]}")
    if differing:
        raise CheckpointError(f"{where} holds a model of another shape: use {' '.join(differing)}")


def check_compatible(
    settings: Any,
    data: dict | None,
    lora: dict | None,
    where: str,
    state: Mapping,
    config: GPTConfig,
) -> None:
    """Raise CheckpointError unless a tag has the model, tokenizer, LoRA settings and optimizer of
    this run, and the datasets and seed that its sequences follow.

    data, lora: of the run. where: out_dir/tag. state: of its manifest. config: of its model.
    """
    # The model first: with another one, nothing else can be compared
    was = state["settings"]
    shape = {"block_size": settings.block_size, **shape_settings(settings)}
    check_shape(where, asdict(config), shape)
    new_stage = f"or start a new stage with --init_from={shlex.quote(where)} --out_dir=DIR"

    # The data
    if str(settings.dataset) == str(was["dataset"]):
        fix = "restore it"
    else:
        dataset = was["dataset"]
        if not isinstance(dataset, str):
            dataset = json.dumps(dataset)
        fix = f"use --dataset={shlex.quote(dataset)}"
    if data and not same_tokenizer(data, state["data"]):
        raise CheckpointError(
            f"dataset={settings.dataset} has another tokenizer than {where}: {fix}"
        )
    problems = []
    if data and not same_data(data["datasets"], state["data"]["datasets"]):
        problems.append(
            f"dataset={settings.dataset} is not the data of {where}: {fix}, {new_stage}"
        )
    if data and data["template"] != state["data"]["template"]:
        problems.append(
            f"dataset={settings.dataset} has another chat template than {where}: {fix}, {new_stage}"
        )
    if settings.seed != was["seed"]:
        problems.append(
            f"seed={settings.seed} is not the seed of {where}: use --seed={was['seed']}, "
            f"{new_stage}"
        )
    if problems and not settings.eval_only:
        raise CheckpointError("\n".join(problems))

    # What is trained, and how
    pairs = [
        (as_options(state.get("lora")), as_options(lora)),
        (f"--optimizer={was['optimizer']}", f"--optimizer={settings.optimizer}"),
    ]
    for saved, wanted in pairs:
        if saved != wanted:
            raise CheckpointError(
                f"{where} was trained with {saved}, and this run has {wanted}: use the same, "
                f"{new_stage}"
            )


def note_template(
    where: str, before: str | None, data: Mapping | None, dataset: str, notes: list[str]
) -> None:
    """Note that a dataset has another chat template than the weights of `where` were trained with.

    before: the template of these, or None.
    """
    if data and data["template"] and before and data["template"] != before:
        notes.append(
            f"dataset={dataset} has another chat template than {where}: from here on, samples and "
            "exports take that of the dataset"
        )


def note_settings(where: str, before: Mapping, settings: Any, notes: list[str]) -> None:
    """Note which settings differ from those of a tag, `before`."""
    changed = []
    for name, value in asdict(settings).items():
        if name in NOT_COMPARED or value == before.get(name, value):
            continue
        was = repr(before[name])
        if len(was) > MAX_SHOWN:  # somebody else may have written it
            was = f"{was[:MAX_SHOWN]}..."
        changed.append(f"{name}={value!r}, was {was}")
    if changed:
        lines = [f"settings that differ from those of {where}:", *changed]
        notes.append("\n           ".join(lines))


def note_batch(where: str, manifest: Mapping, batch: BatchSizes, notes: list[str]) -> None:
    """Note that the steps of this run have another number of sequences than those of a tag's
    run."""
    state = manifest["state"]
    before = state["settings"]

    # The tag's own sequences per step, over all of its ranks
    per_rank = before["batch_size"] * before["gradient_accumulation_steps"]
    per_step = manifest["world_size"] * per_rank
    if per_step != batch.sequences:
        after_ramp = " after its batch_ramp" if before.get("batch_ramp") else ""
        notes.append(
            f"{where} was trained with {counted(per_step, 'sequence')} per step{after_ramp}, and "
            f"this run has {batch.sequences:,}: it continues after the {state['sequences']:,} that "
            "were trained on"
        )


def note_evaluations(
    where: str, before: int | None, settings: Any, batch: BatchSizes, notes: list[str]
) -> None:
    """Note that this run evaluates other windows than a tag's run did. before: their number, if it
    is known."""
    windows = settings.eval_iters * batch.micro
    if before in (None, windows):
        return
    how = f"{windows:,} windows of each split (eval_iters x batch_size), and {where} on {before:,}"
    fix = ""
    # With other micro-batches, no eval_iters may give as many
    if batch.micro > 0 and before % batch.micro == 0:
        fix = f"; --eval_iters={before // batch.micro} takes the same"
    notes.append(
        f"this run is evaluated on {how}: its losses differ from earlier ones, also from the best "
        f"one{fix}"
    )
