"""Find the model that sample.py or evaluate.py loads, and its tokenizer."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from runtime.bring import no_weights
from runtime.checkpoint.load import load_model
from runtime.checkpoint.tags import TagStore, parse_run_path
from runtime.chosen_model import GPT, GPTConfig
from runtime.data.dataset import read_meta
from runtime.data.folder_tokenizer import assumed_tokenizer, check_ids, tokenizer_of_weights
from runtime.data.folders import dataset_dir
from runtime.data.meta import MAX_TEMPLATE_CHARS
from runtime.errors import UserError
from runtime.output import counted
from runtime.untrusted import read_regular
from runtime.weights import print_note, read_json_of_weights, weights_errors


@dataclass(frozen=True)
class Source:
    """Where a model comes from, and what is known of it before it is loaded."""

    name: str
    description: str  # what follows its name
    data: dict[str, Any]  # "tokenizer", "vocab_size", "template" or None, "block_size"


def find_model(
    init_from: str, out_dir: str, tag: str | None, dataset: str | None
) -> tuple[str, str, dict[str, Any], Callable[[str, torch.dtype], GPT]]:
    """Return (name, description, data, load(device, dtype)) of the model that the settings name.

    init_from: "resume" for a tag of out_dir, otherwise as for GPT.from_pretrained. dataset: what
    other weights were trained on, or None. data: see Source. Raises UserError.
    """
    if init_from == "resume":
        tag, source = source_of_tag(out_dir, tag)
    else:
        source = source_of_weights(init_from, tag, dataset)

    def load(device: str, dtype: torch.dtype) -> GPT:
        if init_from == "resume":
            model, _ = load_model(out_dir, tag, device=device)
            for param in model.parameters():  # not buffers, which training keeps in float32, too
                param.data = param.data.to(dtype)
        else:
            model = GPT.from_pretrained(init_from, device=device, dtype=dtype)
        model.crop_vocab_size(source.data["vocab_size"])
        return model.eval()

    return source.name, source.description, source.data, load


def source_of_tag(out_dir: str, tag: str | None) -> tuple[str, Source]:
    """Return (the tag's name, its Source). Raises UserError."""
    tag, manifest = TagStore(out_dir).find(tag)
    state = manifest["state"]
    description = f" after {counted(manifest['iter_num'], 'iteration')}"
    data = {**state["data"], "block_size": state["model"]["block_size"]}
    return tag, Source(f"{out_dir}/{tag}", description, data)


def source_of_weights(init_from: str, tag: str | None, dataset: str | None) -> Source:
    """Return the Source of weights that GPT.from_pretrained takes.

    tag: the setting, which such weights don't have. Raises UserError.
    """
    # What has another way, or none
    run = parse_run_path(init_from)
    if run:
        raise UserError(f"init_from={init_from} has checkpoints of train_deepspeed.py: use "
                        f"--out_dir={run[0]} --tag={run[1]}")
    if tag is not None:
        raise UserError(f"tag={tag} is a checkpoint of out_dir, and init_from={init_from} names "
                        "other weights: drop one of the two")
    if not hasattr(GPTConfig, "from_weights"):  # a model.py of others
        raise UserError(no_weights(init_from, GPTConfig.__module__))
    # The sizes, before anything is downloaded
    config = GPTConfig()  # of a GPT-2 on the hub
    if os.path.exists(init_from):
        config = GPTConfig.from_weights(init_from)

    # The tokenizer, which must be the weights' own
    if dataset:
        own = read_meta(dataset_dir(dataset))
        check_ids(dataset, own, init_from, config.vocab_size)
    else:
        own = data_of_weights(init_from, config.vocab_size)
    # A dataset of conversations has a template of its own
    template = template_of_weights(Path(init_from))
    if template and own.get("template", template) != template:
        print_note(
            f"dataset={dataset} has another chat template than {init_from}: that of the dataset is "
            "taken"
        )
    data = {"template": template, "block_size": config.block_size, **own}
    return Source(init_from, "", data)


def template_of_weights(folder: Path) -> str | None:
    """Return the chat template in a folder of transformers, or None. Raises UserError."""
    jinja = folder / "chat_template.jinja"
    if jinja.exists():
        with weights_errors(jinja):
            return read_regular(jinja, MAX_TEMPLATE_CHARS).decode("utf-8")
    file = folder / "tokenizer_config.json"
    if not file.exists():
        return None
    template = read_json_of_weights(file).get("chat_template")
    if isinstance(template, list):  # of templates with names
        with weights_errors(file):
            by_name = {each["name"]: each["template"] for each in template}
            template = by_name.get("default")
    if not isinstance(template, str):
        return None
    return template


def data_of_weights(source: str, vocab_size: int) -> dict[str, Any]:
    """Return {"tokenizer", "vocab_size"} of a name on the hub, a folder of weights or a ckpt.pt.

    Raises UserError.
    """
    data = tokenizer_of_weights(source, vocab_size)
    if data is None:
        data, note = assumed_tokenizer(source, vocab_size)
        if data is None:
            raise UserError(f"the tokenizer of {source} is unknown ({vocab_size} tokens): name the "
                            "dataset that it was trained on with --dataset=NAME or a path")
        print_note(note)
    return data
