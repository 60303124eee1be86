"""Resolve init_from: training from scratch, pretrained weights, the weights of an earlier run, or a run to resume."""

import json
import os
import shlex
import sys
from dataclasses import asdict, dataclass, fields, replace

from torch import nn

from runtime.bring import has_our_forward, no_weights
from runtime.checkpoint.errors import CheckpointError, UnreadableError
from runtime.checkpoint.load import check_sizes_of_tag, open_tag
from runtime.checkpoint.model_config import SHAPE, config_of_tag, gpt_config
from runtime.checkpoint.model_source import source_of
from runtime.checkpoint.tags import TagStore, parse_run_path
from runtime.chosen_model import GPT, GPTConfig
from runtime.data.folder_tokenizer import check_ids, how_to_prepare
from runtime.data.loader import Batch
from runtime.data.mixture import same_data, same_tokenizer
from runtime.errors import UserError
from runtime.lora import as_options
from runtime.model_parts import count_elements, tensors_of, ties_of, without_memory
from runtime.output import counted
from runtime.pretrained import PRETRAINED
from runtime.weights import (
    check_sizes,
    fetch_from_hub,
    open_weights,
    print_note,
    read_config,
)

MAX_SHOWN = 200  # characters of a checkpoint's setting
NOT_COMPARED = {  # with a checkpoint's settings: they don't change the training, or are checked otherwise
    "out_dir", "init_from", "resume_tag", "overwrite", "eval_only", "dry_run", "target_gpu", "keep_last", "async_save",
    "always_save_checkpoint", "log_interval", "profile", "sample_interval", "sample_start", "sample_tokens",
    "on_rising_norms", "cuda_graph", "wandb_log", "wandb_project", "wandb_run_name", "tensorboard_log",
    "batch_size", "block_size",
    "gradient_accumulation_steps", *SHAPE, "lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules"}


@dataclass(frozen=True)
class Start:
    """Where the weights come from."""

    kind: str  # "scratch", "pretrained", "earlier run" or "resume"
    init_from: str  # the setting, with "auto" resolved
    model: GPTConfig
    sources: tuple[str, ...]  # what the weights came from, first to last: "gpt2-xl", "out-stage1/best"
    weights: str | None = None  # pretrained: folder or file; None if they weren't fetched
    optimizer: str | None = None  # that trained these weights
    parent: tuple[str, str] | None = None  # earlier run: (out_dir, tag)
    tag: str | None = None  # resume: the tag that resume_tag names, or the newest with a readable manifest


def find_start(settings, data, lora, batch, notes):
    """Return the Start of a run. Raises UserError if settings, data and weights contradict each other. data:
    {"tokenizer", "vocab_size"} or None; batch: a Batch. A dry run only checks that the weights of a GPT-2 on the
    hub can be fetched, and with target_gpu it doesn't."""
    init_from = settings.init_from
    if init_from == "auto":
        resumes = TagStore(settings.out_dir).newest() or settings.resume_tag != "latest"
        init_from = "resume" if resumes else settings.requested["init_from"]
    if init_from == "resume":
        return from_resume(settings, data, lora, batch, notes)
    shape = shape_settings(settings)
    if init_from == "scratch":
        model = gpt_config(
            block_size=settings.block_size,
            dropout=settings.dropout,
            vocab_size=data["vocab_size"] if data else 50257,
            **shape,
        )
        return Start("scratch", init_from, model, (init_from,))
    if not os.path.exists(init_from) and init_from not in PRETRAINED:
        raise UserError(f"init_from={init_from} is unknown: give scratch, resume, auto, {', '.join(PRETRAINED)}, a "
                        "folder of weights, the out_dir of an earlier run, or a nanoGPT ckpt.pt")
    shape.pop("bias", None)  # nanoGPT configs may set it, but the weights determine it
    if parent := parse_run_path(init_from):
        return from_earlier_run(init_from, parent, settings, data, shape, notes)
    return from_pretrained(init_from, settings, data, shape, notes)


def check_model(plan, model: nn.Module) -> None:
    """Print a note if the training script's model isn't what GPT makes of the plan's configuration:
    then its tags can't be loaded elsewhere. Raises UserError if this run couldn't resume from them.

    Call it before LoRA and DeepSpeed change the model.
    """
    planned = tensors_of(without_memory(lambda: type(model)(plan.model)))
    built = tensors_of(model)
    sizes = [name for name in planned.buffers if built.buffers.get(name) != planned.buffers[name]]
    if sizes and plan.start.kind != "resume":
        raise UserError(
            f"{', '.join(sizes[:3])} have another shape than GPT makes them at "
            f"block_size={plan.model.block_size}, so no run could resume: crop them in "
            "GPT.crop_block_size"
        )
    differing = built.differences(planned)
    if differing:
        print_note(
            f"the script's model differs from what GPT makes ({', '.join(differing[:3])}), so only this "
            "script can load its checkpoints"
        )


def shape_settings(settings):
    """Return {name: value} of the settings that have the name of a field of GPTConfig. None: its default."""
    shape = {}
    for name in SHAPE:
        value = getattr(settings, name, None)
        if value is not None:
            shape[name] = value
    return shape


def saved_state(plan, model):
    """Return what a tag records of the RunPlan and the model that it was trained with: from_resume() and load_model()
    read it."""
    base, *later = plan.start.sources
    return {
        "settings": asdict(plan.settings),
        "model": asdict(plan.model),
        "ties": ties_of(model),
        "model_source": source_of(model),
        "elements": count_elements(model),
        "sources": plan.start.sources,
        "eval_windows": plan.eval_windows,
        "lora": plan.lora and {**plan.lora, "base": None if later else base},
        "data": {key: plan.data[key] for key in ("tokenizer", "vocab_size", "template", "datasets")},
    }


def check_class(model_class: type[nn.Module]) -> None:
    """Print a note if the training script's GPT is not that of the other scripts.

    Raises UserError if it needs fields that the GPTConfig of the plan doesn't have.
    """
    if model_class is GPT:
        return
    module = sys.modules.get(model_class.__module__)
    own_config = getattr(module, "GPTConfig", GPTConfig)
    known = {field.name for field in fields(GPTConfig)}
    missing = [field.name for field in fields(own_config) if field.name not in known]
    place = "change the import in runtime/chosen_model.py, for all scripts"
    if not has_our_forward(model_class):
        raise UserError(
            f"the training script imports the GPT of {model_class.__module__}.py itself, without what "
            f"runtime/bring.py adds to it: {place}"
        )
    if missing:
        raise UserError(
            f"{model_class.__module__}.GPTConfig has {', '.join(missing)}, and the plan's GPTConfig, of "
            f"{GPTConfig.__module__}, has not: {place}"
        )
    print_note(
        f"this run trains {model_class.__module__}.{model_class.__name__}, and its plan, sample.py, "
        f"evaluate.py and export_hf.py take {GPT.__module__}.GPT: {place}"
    )


def check_block_size(settings, limit, where):
    if settings.block_size > limit:
        raise UserError(f"block_size={settings.block_size} is above the {limit} positions of {where}: use "
                        f"--block_size={limit}")


def check_shape(where, saved, wanted):
    """Raise CheckpointError unless the saved model has the wanted values, {name: value}."""
    differing = [f"--{name}={saved[name]}" for name, value in wanted.items() if saved[name] != value]
    if differing:
        raise CheckpointError(f"{where} holds a model of another shape: use {' '.join(differing)}")


def from_pretrained(init_from, settings, data, shape, notes):
    """Start from a GPT-2 on the hub, a folder of weights, or a nanoGPT ckpt.pt. shape: settings, of which the weights
    determine some."""
    if not hasattr(GPTConfig, "from_weights"):  # a model.py of others
        raise UserError(no_weights(init_from, GPTConfig.__module__))
    determined = dict(zip(("n_layer", "n_head", "n_embd"), PRETRAINED.get(init_from, ())))
    if os.path.exists(init_from):
        determined = read_config(init_from)
    refuse_shape(shape, determined, init_from)
    weights, config = None, gpt_config(**{"block_size": 1024, "vocab_size": 50257, **shape, **determined})
    if settings.target_gpu is None or os.path.exists(init_from):
        weights = init_from if os.path.exists(init_from) else fetch_from_hub(init_from, not settings.dry_run)
    if weights:
        refuse_shape(shape, read_config(weights), init_from)
        config = replace(config, **read_config(weights))
        open_weights(weights)  # raises UserError if they can't be read
        check_sizes(weights, config)
    check_block_size(settings, config.block_size, "the weights")
    if data:
        note = check_ids(settings.dataset, data, init_from, config.vocab_size)
        notes += [note] * (note != "")
    model = gpt_config(**{**asdict(config), "block_size": settings.block_size, "dropout": settings.dropout})
    return Start("pretrained", init_from, model, (init_from,), weights=weights, optimizer="adamw")


def refuse_shape(shape, determined, init_from):
    """Raise UserError if a setting in `shape` is one of those that the weights determine."""
    refused = [name for name in shape if name in determined]
    if refused:
        raise UserError(f"{', '.join(refused)} can't be set, because init_from={init_from} determines the shape: drop "
                        "them, or add --init_from=scratch")


def from_earlier_run(init_from, parent, settings, data, shape, notes):
    """Start from the weights of an earlier run's tag, with a fresh optimizer."""
    (folder, tag), where = parent, os.path.join(*parent)
    manifest = TagStore(folder).find(tag).manifest
    check_sizes_of_tag(folder, tag, manifest)
    state, model = manifest["state"], manifest["state"]["model"]
    config = config_of_tag(where, model, notes.append)
    check_shape(where, asdict(config), shape)
    check_block_size(settings, config.block_size, where)
    if data and not same_tokenizer(data, state["data"]):
        raise UserError(f"dataset={settings.dataset} has another tokenizer than {where}: "
                        f"{how_to_prepare(state['data']['tokenizer'])}")
    notes.append(f"weights from {where}, iteration {manifest['iter_num']}; the optimizer starts fresh")
    model = gpt_config(**{**asdict(config), "block_size": settings.block_size, "dropout": settings.dropout})
    return Start("earlier run", init_from, model, (*state["sources"], where), parent=parent,
                 optimizer=state["settings"]["optimizer"])


def from_resume(settings, data, lora, batch, notes):
    """Resume from the tag that resume_tag names, or from the newest with a readable manifest."""
    out_dir, named = settings.out_dir, settings.resume_tag != "latest"
    store, first_error = TagStore(out_dir), None
    for name in [settings.resume_tag] if named else store.newest_first() or ["latest"]:
        try:
            tag, manifest = store.find(name)
            if settings.dry_run:  # other runs check a tag's files when they read it
                open_tag(out_dir, tag)
            break
        except UnreadableError:  # an older tag would lose its iterations
            raise
        except CheckpointError as error:
            first_error = first_error or error
    else:
        raise first_error
    newer = store.newer_than(manifest["iter_num"])
    if newer and named and not settings.overwrite and not settings.eval_only:
        raise UserError(f"resuming from {out_dir}/{tag} deletes the newer {', '.join(newer)}: confirm with "
                        f"--overwrite=True, or copy {tag} into another folder")
    check_sizes_of_tag(out_dir, tag, manifest)
    state = manifest["state"]
    config = config_of_tag(f"{out_dir}/{tag}", state["model"], notes.append)
    check_compatible(settings, data, lora, tag, manifest, config)
    model = gpt_config(**{**asdict(config), "dropout": settings.dropout})
    before = state["settings"]
    changed = []
    for name, value in asdict(settings).items():
        if name not in NOT_COMPARED and value != before.get(name, value):
            was = repr(before[name])
            if len(was) > MAX_SHOWN:  # somebody else may have written it
                was = f"{was[:MAX_SHOWN]}..."
            changed.append(f"{name}={value!r}, was {was}")
    if changed:
        notes.append("\n           ".join([f"settings that differ from those of {out_dir}/{tag}:", *changed]))
    per_step = manifest["world_size"] * before["batch_size"] * before["gradient_accumulation_steps"]
    if per_step != batch.sequences:
        notes.append(f"{out_dir}/{tag} was trained with {counted(per_step, 'sequence')} per step, and this run has "
                     f"{batch.sequences:,}: it continues after the {state['sequences']:,} that were trained on")
    note_evaluations(f"{out_dir}/{tag}", state.get("eval_windows"), settings, batch, notes)
    return Start("resume", "resume", model, tuple(state["sources"]), tag=tag)


def note_evaluations(where: str, before: int | None, settings, batch: Batch, notes: list[str]) -> None:
    """Note that this run evaluates other windows than a tag's run did. before: their number, if it is known."""
    windows = settings.eval_iters * batch.micro
    if before in (None, windows):
        return
    how = f"{windows:,} windows of each split (eval_iters x batch_size), and {where} on {before:,}"
    fix = ""
    if before % batch.micro == 0:
        fix = f"; --eval_iters={before // batch.micro} takes the same"
    notes.append(f"this run is evaluated on {how}: its losses differ from earlier ones, also from the best one{fix}")


def check_compatible(settings, data, lora, tag, manifest, config):
    """Raise CheckpointError unless a tag has the model, tokenizer, LoRA settings and optimizer of this run, and the
    datasets and seed that its sequences follow."""
    state, where = manifest["state"], f"{settings.out_dir}/{tag}"
    check_shape(where, asdict(config), {"block_size": settings.block_size, **shape_settings(settings)})
    was, problems = state["settings"], []
    dataset = was["dataset"] if isinstance(was["dataset"], str) else json.dumps(was["dataset"])
    fix = "restore it" if str(settings.dataset) == str(was["dataset"]) else f"use --dataset={shlex.quote(dataset)}"
    stage = f"or start a new stage with --init_from={shlex.quote(where)} --out_dir=DIR"
    if data and not same_tokenizer(data, state["data"]):
        raise CheckpointError(f"dataset={settings.dataset} has another tokenizer than {where}: {fix}")
    if data and not same_data(data["datasets"], state["data"]["datasets"]):
        problems.append(f"dataset={settings.dataset} is not the data of {where}: {fix}, {stage}")
    if settings.seed != was["seed"]:
        problems.append(f"seed={settings.seed} is not the seed of {where}: use --seed={was['seed']}, {stage}")
    if problems and not settings.eval_only:
        raise CheckpointError("\n".join(problems))
    for saved, wanted in ((as_options(state.get("lora")), as_options(lora)),
                          (f"--optimizer={was['optimizer']}", f"--optimizer={settings.optimizer}")):
        if saved != wanted:
            raise CheckpointError(f"{where} was trained with {saved}, and this run has {wanted}: use the same, {stage}")
