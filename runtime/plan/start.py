"""Where a run's weights come from: init_from as scratch, pretrained weights, an earlier run, or the run to resume."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from model import GPTConfig
from runtime.checkpoint.tags import TAG_NAME, CheckpointError, TagStore, UnreadableError, parse_run_path
from runtime.data.dataset import same_tokenizer
from runtime.files import UserError, file_digest
from runtime.lora import changed_settings
from runtime.weights import PRETRAINED, fetch_from_hub, open_weights

SHAPE = ("n_layer", "n_head", "n_embd", "bias")  # settings that pretrained weights bring themselves


@dataclass(frozen=True)
class Start:
    """Where the weights come from."""

    kind: str  # "scratch", "pretrained", "earlier run" or "resume"
    init_from: str  # as the settings say it, with "auto" resolved
    model: GPTConfig
    weights: str | None = None  # pretrained: folder or file; None for a plan without them
    parent: tuple[str, str] | None = None  # earlier run: (out_dir, tag)
    candidates: tuple[str, ...] = ()  # resume: tags, the newest first, or the one that is named
    tag: str | None = None  # resume: the first of them with a readable manifest
    lineage: tuple[dict, ...] = ()  # the runs before this one
    check_compatible: Callable | None = None  # resume: raises CheckpointError for a Tag that does not fit


def find_start(settings, data, lora, sequences, notes, fetch=True):
    """Return the Start of a run. data: {"tokenizer", "vocab_size"}, or None if there is none; sequences: per step;
    fetch: whether a GPT-2 is fetched from the hub, or only its shape is known.

    Raises UserError where settings, data and weights contradict each other, and UnreadableError where out_dir cannot
    be read.
    """
    init_from = settings.init_from
    if init_from == "auto":
        resumes = TagStore(settings.out_dir).newest() or settings.resume_tag != "latest"
        init_from = "resume" if resumes else settings.before_auto["init_from"]
    if init_from == "resume":
        return from_resume(settings, data, lora, sequences, notes)
    shape = {name: getattr(settings, name) for name in SHAPE if getattr(settings, name) is not None}
    if init_from == "scratch":
        return Start("scratch", init_from, GPTConfig(block_size=settings.block_size, dropout=settings.dropout,
                                                     vocab_size=data["vocab_size"] if data else 50257, **shape))
    folder, name = os.path.split(os.path.normpath(init_from))
    if TAG_NAME.fullmatch(name) and TagStore(folder).list():
        TagStore(folder).find(name)  # raises if there is no such tag
    if not os.path.exists(init_from) and init_from not in PRETRAINED:
        raise UserError(f"init_from={init_from} is neither 'scratch', 'resume', 'auto', one of {', '.join(PRETRAINED)},"
                        " nor a folder of weights or of an earlier run, nor a ckpt.pt of nanoGPT's")
    if "bias" in shape:  # a nanoGPT config may name it
        notes.append(f"bias={shape.pop('bias')} is for training from scratch: these weights bring their own, or none")
    if parent := parse_run_path(init_from):
        return from_earlier_run(init_from, parent, settings, data, shape, notes)
    if shape:
        raise UserError(f"{', '.join(shape)} given, but init_from={init_from} brings its own shape: remove them, or "
                        "add --init_from=scratch")
    return from_pretrained(init_from, settings, data, notes, fetch)


def check_block_size(settings, known, what):
    if settings.block_size > known:
        raise UserError(f"block_size={settings.block_size} is beyond the {known} positions that {what}: "
                        f"--block_size={known}")


def check_shape(where, saved, wanted):
    """Raise CheckpointError unless a tag's model, {name: value}, is the wanted one."""
    if differing := [f"{name}={saved[name]}" for name, value in wanted.items() if saved[name] != value]:
        raise CheckpointError(f"{where} holds a model with {', '.join(differing)}: the settings say otherwise; give "
                              f"{' '.join(f'--{one}' for one in differing)}")


def from_pretrained(init_from, settings, data, notes, fetch):
    """Start from a hub's GPT-2, a folder of weights or nanoGPT's ckpt.pt."""
    weights, config = None, GPTConfig(1024, 50257, *PRETRAINED.get(init_from, ()))
    if fetch or init_from not in PRETRAINED:
        weights = init_from if os.path.exists(init_from) else fetch_from_hub(init_from)
        config = GPTConfig.from_weights(weights)
        open_weights(weights)  # refuses what cannot be read
    check_block_size(settings, config.block_size, "the weights know")
    if data and data["vocab_size"] > config.vocab_size:
        raise UserError(f"the data set's vocabulary of {data['vocab_size']} is beyond the weights' {config.vocab_size}:"
                        " prepare the data with the weights' tokenizer")
    if weights and data and data["tokenizer"]["kind"] != "gpt2" and not has_tokenizer_of(weights, data["tokenizer"]):
        notes.append(f"the data's tokens are not GPT-2's ({data['tokenizer']['kind']}), and the weights' folder does "
                     "not hold their tokenizer: the weights' knowledge of words is lost")
    model = replace(config, block_size=settings.block_size, dropout=settings.dropout)
    return Start("pretrained", init_from, model, weights=weights)


def has_tokenizer_of(weights, tokenizer):
    """Whether a folder of weights holds the tokenizer.json that data was prepared with, or its characters.

    A ckpt.pt holds none, and may well be of this data.
    """
    path = os.path.join(weights, "tokenizer.json")
    if not os.path.exists(path):
        return os.path.isfile(weights)
    if tokenizer["kind"] != "char":
        return file_digest(path)["sha256"] == tokenizer.get("sha256")
    from tokenizers import Tokenizer

    try:
        vocab = Tokenizer.from_file(path).get_vocab()
    except Exception as error:  # the library has no class for its own
        raise UserError(f"{path} is not a tokenizer ({error}): restore it, or remove it") from None
    return vocab == {c: i for i, c in enumerate(tokenizer["chars"])}


def from_earlier_run(init_from, parent, settings, data, shape, notes):
    """Start from the weights of an earlier run's tag, with a fresh optimizer."""
    (folder, tag), where = parent, os.path.join(*parent)
    manifest = TagStore(folder).find(tag).manifest
    state, model = manifest["state"], manifest["state"]["model"]
    if os.path.realpath(folder) == os.path.realpath(settings.out_dir):
        raise UserError(f"init_from={init_from} is out_dir itself: resume it with --init_from=resume, or choose "
                        "another --out_dir=DIR")
    check_shape(where, model, shape)
    check_block_size(settings, model["block_size"], f"{where} knows")
    if data and not same_tokenizer(data, state["data"]):
        raise UserError(f"{where} was trained on another tokenizer's data than data set '{settings.dataset}': prepare "
                        "it with that one")
    before = {"out_dir": folder, "tag": manifest["tag"], "iter_num": manifest["iter_num"],
              "dataset": state["settings"]["dataset"], "val_loss": state["best_val_loss"]}
    notes.append(f"the weights are those of {where}, iteration {manifest['iter_num']}; the optimizer starts fresh")
    model = GPTConfig(**{**model, "block_size": settings.block_size, "dropout": settings.dropout})
    return Start("earlier run", init_from, model, parent=parent, lineage=(*state["lineage"], before))


def from_resume(settings, data, lora, sequences, notes):
    """Start from a tag of out_dir, with everything in it: the one named, or the newest with a readable manifest."""
    out_dir, named = settings.out_dir, settings.resume_tag != "latest"
    store, first_error = TagStore(out_dir), None
    candidates = [settings.resume_tag] if named else store.newest_first() or ["latest"]
    for name in candidates:
        try:
            tag, manifest = store.find(name)
            break
        except UnreadableError:  # what it holds would be lost to an older one
            raise
        except CheckpointError as error:
            first_error = first_error or error
    else:
        raise first_error
    newer = store.newer_than(manifest["iter_num"])
    if newer and named and not settings.overwrite and not settings.eval_only:
        raise UserError(f"resuming from {out_dir}/{tag} gives up {', '.join(newer)}, which are newer: confirm with "
                        "--overwrite=True, or copy the tag into a folder of its own")
    state = manifest["state"]
    model = GPTConfig(**{**state["model"], "dropout": settings.dropout})
    check = partial(check_compatible, model, settings, data, lora)
    check(tag, manifest)
    before = state["settings"]
    per_step = manifest["world_size"] * before["batch_size"] * before["gradient_accumulation_steps"]
    if str(before["dataset"]) != str(settings.dataset):
        notes.append(f"{out_dir}/{tag} was trained on {before['dataset']}: this run continues in the order of "
                     f"{settings.dataset}")
    elif per_step != sequences:
        notes.append(f"{out_dir}/{tag} was trained with {per_step:,} sequences per step, this run has {sequences:,}: "
                     "some are seen again, or skipped")
    return Start("resume", "resume", model, candidates=tuple(candidates), tag=tag, check_compatible=check,
                 lineage=tuple(state["lineage"]))


def check_compatible(model, settings, data, lora, tag, manifest):
    """Raise CheckpointError unless this run's model and data are those of a tag's manifest."""
    state, where = manifest["state"], f"{settings.out_dir}/{tag}"
    given = {name: getattr(settings, name) for name in ("block_size", *SHAPE)}
    check_shape(where, state["model"], {name: getattr(model, name) if value is None else value
                                        for name, value in given.items()})
    if data and data["vocab_size"] != state["data"]["vocab_size"]:
        raise CheckpointError(f"{where} was trained on another vocabulary than data set '{settings.dataset}' has")
    was, now = changed_settings(state.get("lora"), lora)
    if was != now:
        raise CheckpointError(f"{where} was trained with {was}, and the settings say {now}")
