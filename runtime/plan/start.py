"""Resolve init_from: training from scratch, pretrained weights, the weights of an earlier run, or a
run to resume."""

import os
import sys
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from torch import nn

from runtime.bring import has_our_forward, no_weights
from runtime.checkpoint.errors import CheckpointError, UnreadableError
from runtime.checkpoint.load import check_sizes_of_tag, open_tag
from runtime.checkpoint.model_config import config_of_tag, gpt_config
from runtime.checkpoint.model_source import source_of
from runtime.checkpoint.tags import TagStore, parse_run_path
from runtime.chosen_model import GPT, GPTConfig
from runtime.data.folder_tokenizer import check_ids, how_to_prepare
from runtime.data.loader import BatchSizes
from runtime.data.mixture import same_tokenizer
from runtime.engine.layout import shape_of
from runtime.errors import UserError
from runtime.model_parts import count_elements, tensors_of, ties_of, without_memory
from runtime.plan.compare import (
    check_compatible,
    check_shape,
    note_batch,
    note_evaluations,
    note_settings,
    note_template,
    shape_settings,
)
from runtime.plan.own_fields import take_own_fields
from runtime.pretrained import PRETRAINED
from runtime.sample.source import template_of_weights
from runtime.weights import (
    check_sizes,
    fetch_from_hub,
    open_weights,
    print_note,
    read_config,
)


@dataclass(frozen=True)
class Start:
    """Where the weights come from."""

    kind: str  # "scratch", "pretrained", "earlier run" or "resume"
    init_from: str  # the setting, with "auto" resolved
    model: GPTConfig  # the configuration: the training script makes the module
    sources: tuple[str, ...]  # of the weights, first to last: "gpt2-xl", "out-stage1/best"
    weights: str | None = None  # pretrained: folder or file; None if they weren't fetched
    optimizer: str | None = None  # that trained these weights
    parent: tuple[str, str] | None = None  # earlier run: (out_dir, tag)
    tag: str | None = None  # resume: that of resume_tag, or the newest with a readable manifest


def find_start(
    settings: Any, data: dict | None, lora: dict | None, batch: BatchSizes, notes: list[str]
) -> Start:
    """Return the Start of a run. Raises UserError if settings, data and weights contradict each
    other.

    data: {"tokenizer", "vocab_size"} or None. A dry run only checks that the weights of a GPT-2 on
    the hub can be fetched, and with target_gpu it doesn't.
    """
    init_from = settings.init_from
    # A run to resume
    if init_from == "auto":
        resumes = TagStore(settings.out_dir).newest() or settings.resume_tag != "latest"
        init_from = "resume" if resumes else settings.requested["init_from"]
    if init_from == "resume":
        return from_resume(settings, data, lora, batch, notes)

    # No weights, or those of somebody else, or of an earlier run
    shape = shape_settings(settings)
    if init_from == "scratch":
        if lora and settings.init_from == "auto":  # of scratch itself, RULES say it
            raise UserError(
                f"lora_rank={settings.lora_rank} needs pretrained weights, but init_from=auto "
                "starts from scratch here: set init_from to some in the config"
            )

        # Without a dataset, in a dry run, that of GPT-2
        vocab_size = data["vocab_size"] if data else 50257
        model = gpt_config(
            block_size=settings.block_size,
            dropout=settings.dropout,
            vocab_size=vocab_size,
            **shape,
        )
        return Start("scratch", init_from, model, (init_from,))
    if not os.path.exists(init_from) and init_from not in PRETRAINED:
        raise UserError(
            f"init_from={init_from} is unknown: give scratch, resume, auto, "
            f"{', '.join(PRETRAINED)}, a folder of weights, the out_dir of an earlier run, or a "
            "nanoGPT ckpt.pt"
        )
    shape.pop("bias", None)  # nanoGPT configs may set it, but the weights determine it
    parent = parse_run_path(init_from)
    if parent:
        return from_earlier_run(init_from, parent, settings, data, shape, notes)
    return from_pretrained(init_from, settings, data, shape, notes)


def check_model(plan: Any, model: nn.Module) -> None:
    """Print a note if the training script's model isn't what GPT makes of the plan's configuration:
    then its tags can't be loaded elsewhere. Raises UserError if this run couldn't resume from them.

    Call it before LoRA and DeepSpeed change the model.
    """
    # Buffers that a run could not take from its own tags
    planned = tensors_of(without_memory(lambda: type(model)(plan.model)))
    built = tensors_of(model)
    sizes = [name for name in planned.buffers if built.buffers.get(name) != planned.buffers[name]]
    if sizes and plan.start.kind != "resume":
        raise UserError(
            f"{', '.join(sizes[:3])} have another shape than GPT makes them at "
            f"block_size={plan.model.block_size}, so no run could resume: crop them in "
            "GPT.crop_block_size"
        )

    # All other differences
    differing = built.differences(planned)
    if differing:
        print_note(
            f"the script's model differs from what GPT makes ({', '.join(differing[:3])}), so only "
            "this script can load its checkpoints"
        )


def saved_state(plan: Any, model: nn.Module) -> dict[str, Any]:
    """Return what a tag records of the RunPlan and the model that it was trained with:
    from_resume() and load_model() read it."""
    base, *later = plan.start.sources
    lora = None
    if plan.lora:
        lora = {**plan.lora, "base": None if later else base}
    kept = ("tokenizer", "vocab_size", "template", "datasets")
    return {
        "settings": asdict(plan.settings),
        "model": asdict(plan.model),
        "ties": ties_of(model),
        "model_source": source_of(model),
        "elements": count_elements(model, shape_of),
        "sources": plan.start.sources,
        "eval_windows": plan.eval_windows,
        "lora": lora,
        "data": {key: plan.data[key] for key in kept},
    }


def check_class(model_class: type[nn.Module]) -> None:
    """Print a note if the training script's GPT is not that of the other scripts.

    Raises UserError if it needs fields that the GPTConfig of the plan doesn't have.
    """
    if model_class is GPT:
        return

    # A script may import its own model.py, with fields of its own
    module = sys.modules.get(model_class.__module__)
    own_config = getattr(module, "GPTConfig", GPTConfig)
    known = {field.name for field in fields(GPTConfig)}
    missing = [field.name for field in fields(own_config) if field.name not in known]
    place = "change the import in runtime/chosen_model.py, for all scripts"
    if not has_our_forward(model_class):
        raise UserError(
            f"the training script imports the GPT of {model_class.__module__}.py itself, without "
            f"what runtime/bring.py adds to it: {place}"
        )
    if missing:
        raise UserError(
            f"{model_class.__module__}.GPTConfig has {', '.join(missing)}, and the plan's "
            f"GPTConfig, of {GPTConfig.__module__}, has not: {place}"
        )
    print_note(
        f"this run trains {model_class.__module__}.{model_class.__name__}, and its plan, "
        f"sample.py, evaluate.py and export_hf.py take {GPT.__module__}.GPT: {place}"
    )


def check_block_size(settings: Any, limit: int, where: str) -> None:
    """Raise UserError if block_size is above the positions of the weights."""
    if settings.block_size > limit:
        raise UserError(
            f"block_size={settings.block_size} is above the {limit} positions of {where}: use "
            f"--block_size={limit}"
        )


def from_pretrained(
    init_from: str, settings: Any, data: dict | None, shape: dict, notes: list[str]
) -> Start:
    """Start from a GPT-2 on the hub, a folder of weights, or a nanoGPT ckpt.pt.

    shape: settings, of which the weights determine some.
    """
    if not hasattr(GPTConfig, "from_weights"):  # a model.py of others
        raise UserError(no_weights(init_from, GPTConfig.__module__))

    # What the weights determine, before they are fetched
    is_local = os.path.exists(init_from)
    if is_local:
        determined = read_config(init_from, GPTConfig)
    else:
        sizes = PRETRAINED.get(init_from, ())
        determined = dict(zip(("n_layer", "n_head", "n_embd"), sizes))
    refuse_shape(shape, determined, init_from)
    config = gpt_config(**{"block_size": 1024, "vocab_size": 50257, **shape, **determined})

    # The weights themselves
    weights = None
    if is_local:
        weights = init_from
    elif settings.target_gpu is None:
        weights = fetch_from_hub(init_from, not settings.dry_run)
    if weights:
        refuse_shape(shape, read_config(weights, GPTConfig), init_from)
        config = replace(config, **read_config(weights, GPTConfig))
        open_weights(weights)  # raises UserError if they can't be read
        check_sizes(weights, config)
    check_block_size(settings, config.block_size, "the weights")
    if data:
        note = check_ids(settings.dataset, data, init_from, config.vocab_size)
        if note:
            notes.append(note)
        # Text needs no template, so that of the weights isn't read
        if weights and data["template"]:
            own_template = template_of_weights(Path(weights))
            note_template(init_from, own_template, data, settings.dataset, notes)
    model = with_settings(config, settings)
    return Start("pretrained", init_from, model, (init_from,), weights=weights, optimizer="adamw")


def with_settings(config: GPTConfig, settings: Any) -> GPTConfig:
    """Return a GPTConfig with the settings' block_size and dropout."""
    own = {"block_size": settings.block_size, "dropout": settings.dropout}
    return gpt_config(**{**asdict(config), **own})


def refuse_shape(shape: dict, determined: dict, init_from: str) -> None:
    """Raise UserError if a setting in `shape` is one of those that the weights determine."""
    refused = [name for name in shape if name in determined]
    if refused:
        raise UserError(
            f"{', '.join(refused)} can't be set, because init_from={init_from} determines the "
            "shape: drop them, or add --init_from=scratch"
        )


def from_earlier_run(
    init_from: str,
    parent: tuple[str, str],
    settings: Any,
    data: dict | None,
    shape: dict,
    notes: list[str],
) -> Start:
    """Start from the weights of an earlier run's tag, with a fresh optimizer."""
    # The tag's files and sizes, before anything is allocated
    folder, tag = parent
    where = os.path.join(folder, tag)
    manifest = TagStore(folder).find(tag).manifest
    check_sizes_of_tag(folder, tag, manifest)
    state = manifest["state"]
    config = config_of_tag(where, state["model"], notes.append)
    config = take_own_fields(where, config, state, settings, notes)
    # Does its model fit this run's settings and data?
    check_shape(where, asdict(config), shape)
    check_block_size(settings, config.block_size, where)
    if data and not same_tokenizer(data, state["data"]):
        raise UserError(
            f"dataset={settings.dataset} has another tokenizer than {where}: "
            f"{how_to_prepare(state['data']['tokenizer'])}"
        )
    note_template(where, state["data"]["template"], data, settings.dataset, notes)
    notes.append(
        f"weights from {where}, iteration {manifest['iter_num']}; the optimizer starts fresh"
    )
    if config.dropout != settings.dropout:
        notes.append(
            f"this run has dropout={settings.dropout}, and {where} had dropout={config.dropout}"
        )
    return Start(
        "earlier run",
        init_from,
        with_settings(config, settings),
        (*state["sources"], where),  # an exported model names all its sources
        parent=parent,
        optimizer=state["settings"]["optimizer"],
    )


def from_resume(
    settings: Any, data: dict | None, lora: dict | None, batch: BatchSizes, notes: list[str]
) -> Start:
    """Resume from the tag that resume_tag names, or from the newest with a readable manifest."""
    out_dir = settings.out_dir
    named = settings.resume_tag != "latest"
    store = TagStore(out_dir)
    tag, manifest = find_tag(store, settings)
    where = f"{out_dir}/{tag}"

    # A resume is never to delete tags that the user hasn't given up
    newer = store.newer_than(manifest["iter_num"])
    if newer and named and not settings.overwrite and not settings.eval_only:
        raise UserError(
            f"resuming from {where} deletes the newer {', '.join(newer)}: confirm with "
            f"--overwrite=True, or copy {tag} into another folder"
        )

    # The files of the tag, then the settings that have to be the same
    check_sizes_of_tag(out_dir, tag, manifest)
    state = manifest["state"]
    config = config_of_tag(where, state["model"], notes.append)
    config = take_own_fields(where, config, state, settings, notes)
    check_compatible(settings, data, lora, where, state, config)

    # What may differ
    note_settings(where, state["settings"], settings, notes)
    note_batch(where, manifest, batch, notes)
    note_evaluations(where, state.get("eval_windows"), settings, batch, notes)

    # Dropout may change, because no weight depends on it
    model = gpt_config(**{**asdict(config), "dropout": settings.dropout})
    return Start("resume", "resume", model, tuple(state["sources"]), tag=tag)


def find_tag(store: TagStore, settings: Any) -> tuple[str, dict]:
    """Return (tag, manifest) of the tag to resume from. Raises CheckpointError if none can be
    read."""
    # Without a tag, "latest" gives the right error
    names = [settings.resume_tag]
    if settings.resume_tag == "latest":
        names = store.newest_first() or ["latest"]

    # The first error counts: it is of the newest tag
    errors = []
    for name in names:
        try:
            tag, manifest = store.find(name)
            if settings.dry_run:  # other runs check a tag's files when they read it
                open_tag(settings.out_dir, tag)
            return tag, manifest
        except UnreadableError:  # an older tag would lose its iterations
            raise
        except CheckpointError as error:
            errors.append(error)
    raise errors[0]
