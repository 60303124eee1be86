"""Load the model of a tag, for sampling, evaluating, export and further training."""

import os
import re
from dataclasses import replace

import torch
from torch import nn

from runtime.checkpoint.errors import OTHER_TAG, CheckpointError, UnreadableError
from runtime.checkpoint.model_config import config_of_tag
from runtime.checkpoint.model_source import check_file, check_tensors, note_edited
from runtime.checkpoint.tag_reader import TagReader, content_errors
from runtime.checkpoint.tags import TagStore
from runtime.checkpoint.verify import verify_files
from runtime.chosen_model import GPT, GPTConfig
from runtime.errors import UserError
from runtime.lora import LORA_A, LORA_B, merge
from runtime.model_parts import replace_parameters, without_memory
from runtime.weights import print_note


def open_tag(
    out_dir: str, tag: str | None = "latest", share: tuple[int, int] = (0, 1)
) -> tuple[TagReader, dict]:
    """Check a tag's files and return (TagReader, manifest).

    tag: see TagStore.find(). share: (rank, ranks) that hash. Raises CheckpointError.
    """
    store = TagStore(out_dir)
    name, manifest = store.find(tag)
    folder = store.path(name)
    rank, ranks = share
    try:
        problems = verify_files(folder, manifest["files"], rank, ranks)
        if problems:
            listed = "; ".join(problems)
            raise CheckpointError(f"{listed}: choose another checkpoint of {out_dir}")
        return TagReader(folder, manifest), manifest
    except OSError as error:  # a running job may also have pruned it
        raise UnreadableError.of(error, folder) from None


def check_claimed_size(where: str, manifest: dict, shapes: dict[str, torch.Size]) -> None:
    """Raise CheckpointError if a tag's model is too large for its tensors, or they for its files.

    Building such a model takes minutes or all memory, and somebody else may have written the tag.
    The factors leave room for an edited model.py, in which blocks share their weights.
    shapes: of the tag's tensors, by name.
    """
    model = manifest["state"]["model"]
    # More parameters than bytes: a tensor may repeat one number, and take no room in its file
    n_params = sum(shape.numel() for shape in shapes.values())
    n_bytes = sum(entry["bytes"] for entry in manifest["files"].values())
    if n_params > n_bytes:
        raise CheckpointError(
            f"{where} has {n_params:,} parameters in {n_bytes:,} bytes: {OTHER_TAG}"
        )

    # Another shape than the tensors have
    blocks = set()
    for name in shapes:
        number = re.search(r"\bh\.(\d+)\.", name)
        if number:
            blocks.add(number[1])
    largest = max(model["vocab_size"], model["n_embd"]) * model["n_embd"]
    if model["n_layer"] > 64 + 4 * len(blocks) or largest > 16 * n_params:
        raise CheckpointError(
            f"{where} has {len(blocks)} blocks and {n_params:,} parameters, but its manifest says "
            f"n_layer={model['n_layer']}, n_embd={model['n_embd']} and "
            f"vocab_size={model['vocab_size']}: {OTHER_TAG}"
        )


def check_sizes_of_tag(out_dir: str, tag: str, manifest: dict) -> None:
    """Call check_claimed_size() before a tag's files have been verified. Raises CheckpointError.

    A tag whose files can't be read passes: newest_intact() or open_tag() will say what is wrong.
    """
    folder = os.path.join(out_dir, tag)
    try:
        shapes = TagReader(folder, manifest).shapes
    except (UserError, OSError):
        return
    check_claimed_size(folder, manifest, shapes)


def load_model(
    out_dir: str,
    tag: str = "latest",
    of_run: GPTConfig | None = None,
    share: tuple[int, int] = (0, 1),
    device: torch.device | str = "cpu",
    model_class: type[nn.Module] | None = None,
) -> tuple[nn.Module, dict]:
    """Return (GPT in eval mode with a tag's fp32 weights, the tag's manifest).

    LoRA adapters are merged into the weights. Buffers that a tag doesn't hold are made on `device`.
    of_run: the configuration of a run that starts from the tag, whose block_size is that of the tag
    until the model is cropped. None: all of it is the tag's.
    model_class: None for the one of runtime/chosen_model.py, which must be that of the tag. A
    training script, which may use another one, gives its own. share, errors: as for
    open_tag().
    """
    # The model, without memory for its parameters
    reader, manifest = open_tag(out_dir, tag, share)
    state = manifest["state"]
    check_claimed_size(reader.folder, manifest, reader.shapes)
    with content_errors(reader.folder):
        config = config_of_tag(reader.folder, state["model"], print_note)
        if of_run is not None:
            config = replace(of_run, block_size=config.block_size)
        model = without_memory(lambda: (model_class or GPT)(config), device)
    if model_class is None:
        check_file(reader.folder, state, model)
    note_edited(reader.folder, state, model)

    # The weights, in memory of their own
    weights = {name: reader.get(name).clone() for name in reader.shapes}
    saved = reader.tensors()
    if state["lora"]:
        with content_errors(reader.folder):
            merge(weights, state["lora"])
        saved = saved.without(LORA_A, LORA_B)
    check_tensors(reader.folder, saved, reader.source, model)

    # Each parameter is set by all of its names, so what is shared stays so
    replace_parameters(model, lambda name, _: weights[reader.stored_as.get(name, name)])
    reader.copy_buffers(model)
    return model.to(device).eval(), manifest
