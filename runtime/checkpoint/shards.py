"""Read weights and Adam's moments from the files of a tag, of any ZeRO stage and number of ranks.

The files are memory-mapped. DeepSpeed 0.19.8 shards them like this: stage 2 concatenates the parameters of a group and
cuts them into one piece per rank. Stage 3 cuts each parameter into equal, padded pieces."""

import contextlib
import math
import os
import pickle
import pkgutil
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from runtime.checkpoint.model_config import config_of_tag
from runtime.checkpoint.model_source import check_file, check_tensors, note_edited
from runtime.checkpoint.tags import (
    OTHER_TAG,
    CheckpointError,
    TagStore,
    UnreadableError,
    first_line,
    verify_files,
)
from runtime.chosen_model import GPT
from runtime.errors import UserError
from runtime.lora import LORA_A, LORA_B, merge
from runtime.model_parts import (
    ModelTensors,
    persistent_buffers,
    replace_parameters,
    without_memory,
)
from runtime.torch_files import check_torch_file
from runtime.untrusted import check_regular, open_regular
from runtime.weights import SAFE_GLOBALS, print_note

MOMENTS = ("exp_avg", "exp_avg_sq")


def mmap_load(path: str) -> dict:
    """Return the content of a .pt file, memory-mapped.

    Unpickles only SAFE_GLOBALS and tensors. Raises ValueError, and torch.load's exceptions.
    """
    with open_regular(path, follow_links=False) as file:
        check_torch_file(file, SAFE_GLOBALS)
    safe_classes = [pkgutil.resolve_name(name) for name in SAFE_GLOBALS]
    with torch.serialization.safe_globals(safe_classes):
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


@contextlib.contextmanager
def content_errors(folder: str) -> Iterator[None]:
    """Turn what reading unexpected content raises into a CheckpointError.

    The files are as their manifest says, but somebody else may have written both.
    """
    try:
        yield
    except (UserError, OSError):
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {first_line(error)}"
        if isinstance(error, pickle.UnpicklingError):  # its message advises to let the file run code
            why = "it is damaged, or contains what could run code"
        raise CheckpointError(
            f"{folder} does not hold what a checkpoint holds ({why}): {OTHER_TAG}"
        ) from error


class TagReader:
    """The tensors of a tag, whose files verify_files() has checked.

    shapes ({name: size}): of the parameters, by the name under which the files hold them. ties: a
    list of names for each parameter that has several. buffers ({name: tensor}): the persistent ones
    of rank 0. Also step, loss_scaler and model_state, the content of the first model file.
    """

    def __init__(self, folder, manifest):
        with content_errors(folder):
            self.read(folder, manifest)

    def read(self, folder, manifest):
        for name in manifest["files"]:
            check_regular(os.path.join(folder, name), follow_links=False)
        names = sorted(manifest["files"], key=lambda name: [int(n) for n in name.split("_") if n.isdigit()])
        models, optimizers = ([mmap_load(os.path.join(folder, name)) for name in names if kind in name]
                              for kind in ("model_states", "optim"))
        model, stage = models[0], manifest["stage"]
        self.folder, self.model_state, self.loss_scaler = folder, model, None
        self.source = manifest["state"].get("model_source")
        frozen = model["frozen_param_shapes"] or {}
        trained = {name: shape for group in model["param_shapes"] for name, shape in group.items()}
        if stage == 3:  # the model files hold the frozen parameters, sharded over the ranks
            weights = {name: [rank["frozen_param_fragments"][name] for rank in models] for name in frozen}
            shapes = {**trained, **frozen}
        else:  # also what the optimizer has, in its precision
            weights = {name: [model["module"][name]] for name in (*trained, *frozen)}
            shapes = {name: w.shape for name, (w,) in weights.items()}
        self.shapes = {name: torch.Size(shape) for name, shape in shapes.items()}
        self.buffers = {name: model["module"][name] for name in model["buffer_names"]}
        self.read_ties(manifest["state"].get("ties"))
        for name in model["module"]:
            if not any(name in known for known in (self.shapes, self.stored_as, self.buffers)):
                raise ValueError(f"{name} is no parameter and no buffer")
        self.pieces = {"weight": weights}  # [field][name]: a list of tensors
        self.add_flat([content["optimizer_state_dict"] for content in optimizers], stage)

    def read_ties(self, ties: list[list[str]] | None) -> None:
        """Set .ties, and .stored_as: {another name of a parameter: the one in the files}.

        ties: of the manifest. Before it had them, DeepSpeed's files alone had.
        """
        self.stored_as = {}
        if ties is None:
            self.stored_as = dict(self.model_state["shared_params"])
        for group in ties or []:
            stored = [name for name in group if name in self.shapes]
            if len(stored) != 1:
                raise ValueError(f"{' is '.join(group)} is {len(stored)} parameters")
            self.stored_as.update({name: stored[0] for name in group if name != stored[0]})
        groups = defaultdict(list)
        for name, stored in self.stored_as.items():
            groups[stored].append(name)
        self.ties = [[stored, *names] for stored, names in groups.items()]

    def tensors(self) -> ModelTensors:
        """Return the names and shapes of what the tag has."""
        params = dict(self.shapes)
        for name, stored in self.stored_as.items():
            params[name] = self.shapes[stored]
        buffers = {name: buffer.shape for name, buffer in self.buffers.items()}
        return ModelTensors(params, frozenset(map(frozenset, self.ties)), buffers)

    def fields(self, name):
        """Return what the tag has of a parameter: "weight", and the optimizer's tensors of its size, such as "exp_avg"
        and "exp_avg_sq" of AdamW."""
        name = self.stored_as.get(name, name)
        return [field for field in self.pieces if name in self.pieces[field]]

    def get(self, name, field="weight"):
        """Return one of the fields of a parameter in fp32 on the CPU. It may be a view of the file."""
        with content_errors(self.folder):
            name = self.stored_as.get(name, name)
            shape = self.shapes[name]
            pieces = [piece.flatten() for piece in self.pieces[field][name]]
            flat = slice_flat(pieces, 0, shape.numel())
            return flat.view(shape).detach().float()

    def copy_buffers(self, model: nn.Module) -> None:
        """Copy the persistent buffers into a model that has the same ones."""
        with content_errors(self.folder), torch.no_grad():
            for name, buffer in persistent_buffers(model).items():
                buffer.copy_(self.buffers[name])

    def add_flat(self, optimizers, stage):
        """Add what the files keep flat: one fp32 tensor per field, rank and group. At stage 2 the ranks'
        tensors make up a group's parameters. At stage 3 each rank has its piece of every parameter."""
        weights, states = (("fp32_flat_groups", "optimizer_state_dict") if stage == 3 else
                           ("single_partition_of_fp32_groups", "base_optimizer_state"))
        groups = self.model_state["param_shapes"]
        # [rank][group]; an optimizer without a state has no entry
        saved = [[rank[states]["state"].get(i, {}) for i in range(len(groups))] for rank in optimizers]
        self.loss_scaler = optimizers[0].get("loss_scaler")
        self.read_numbers(saved[0], optimizers[0][weights], len(optimizers))
        parts, trained = len(optimizers) if stage == 3 else 1, [name for group in groups for name in group]
        for field in ["weight", *self.state_fields]:
            flat = [rank[weights] for rank in optimizers] if field == "weight" else [
                [group.get(field) for group in rank] for rank in saved]  # Muon's group has no exp_avg_sq
            pieces = defaultdict(list)
            for names, tensors in [(trained, rank) for rank in flat] if stage == 3 else zip(groups, zip(*flat)):
                start = 0
                for name in names if tensors[0] is not None else ():
                    size = math.ceil(self.shapes[name].numel() / parts)  # with the last rank's padding
                    pieces[name].append(slice_flat(tensors, start, size))
                    start += size
            self.pieces[field] = {**self.pieces.get(field, {}), **pieces}

    def read_numbers(self, groups, weights, ranks):
        """Tell the optimizer's numbers from its tensors, by the first rank's state of each parameter group and its flat
        weights.

        Sets .state_fields, {name of a tensor: its dtype}, .numbers, {name: number or tensor of one} of each group, and
        .step, that of the first group."""
        self.state_fields = {}
        self.numbers = []
        for state, flat in zip(groups, weights, strict=True):
            numbers = {}
            # DeepSpeed pads a group to a multiple of twice the ranks, and saves the weights without that
            sizes = range(flat.numel(), flat.numel() + 2 * ranks)
            for key, value in state.items():
                if torch.is_tensor(value) and value.dim() == 1 and value.numel() in sizes:
                    self.state_fields.setdefault(key, value.dtype)
                elif torch.is_tensor(value) and value.numel() != 1:
                    raise CheckpointError(f"{self.folder} has the optimizer's '{key}' in an unknown shape: {OTHER_TAG}")
                else:
                    numbers[key] = value
            self.numbers.append(numbers)
        self.step = float(self.numbers[0].get("step", 0.0))


def slice_flat(tensors, start, length):
    """Return `length` elements from `start` of the concatenation of 1-dimensional tensors."""
    parts = []
    for tensor in tensors:
        if len(part := tensor[max(start, 0):max(start + length, 0)]):
            parts.append(part)
        start -= tensor.numel()
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def open_tag(out_dir, tag="latest", share=(0, 1)):
    """Check a tag's files and return (TagReader, manifest). share: (rank, ranks) that hash. Raises CheckpointError."""
    store = TagStore(out_dir)
    tag, manifest = store.find(tag)
    try:
        if problems := verify_files(store.path(tag), manifest["files"], *share):
            raise CheckpointError("; ".join(problems) + f": choose another checkpoint of {out_dir}")
        return TagReader(store.path(tag), manifest), manifest
    except OSError as error:  # a running job may also have pruned it
        raise UnreadableError.of(error, store.path(tag)) from None


def check_sizes(where: str, manifest: dict, shapes: dict[str, torch.Size]) -> None:
    """Raise CheckpointError if a tag's model is far larger than its tensors, or they than its files.

    Building such a model takes minutes or all memory, and somebody else may have written the tag.
    The factors leave room for an edited model.py, in which blocks share their weights.
    shapes: of the tag's tensors, by name.
    """
    model = manifest["state"]["model"]
    blocks = {match[1] for name in shapes if (match := re.search(r"\bh\.(\d+)\.", name))}
    n_params = sum(shape.numel() for shape in shapes.values())
    n_bytes = sum(entry["bytes"] for entry in manifest["files"].values())
    if n_params > n_bytes:  # a tensor may repeat one number, and take no room in its file
        raise CheckpointError(
            f"{where} has {n_params:,} parameters in {n_bytes:,} bytes: {OTHER_TAG}")
    largest = max(model["vocab_size"], model["n_embd"]) * model["n_embd"]
    if model["n_layer"] > 64 + 4 * len(blocks) or largest > 16 * n_params:
        raise CheckpointError(
            f"{where} has {len(blocks)} blocks and {n_params:,} parameters, but its manifest says "
            f"n_layer={model['n_layer']}, n_embd={model['n_embd']} and "
            f"vocab_size={model['vocab_size']}: {OTHER_TAG}"
        )


def check_sizes_of_tag(out_dir: str, tag: str, manifest: dict) -> None:
    """Call check_sizes() before a tag's files have been verified. Raises CheckpointError.

    A tag whose files can't be read passes: newest_intact() or open_tag() will say what is wrong.
    """
    folder = os.path.join(out_dir, tag)
    try:
        shapes = TagReader(folder, manifest).shapes
    except (UserError, OSError):
        return
    check_sizes(folder, manifest, shapes)


def load_model(
    out_dir: str,
    tag: str = "latest",
    dropout: float | None = None,
    share: tuple[int, int] = (0, 1),
    device: torch.device | str = "cpu",
    model_class: type[nn.Module] | None = None,
) -> tuple[nn.Module, dict]:
    """Return (GPT in eval mode with a tag's fp32 weights, the tag's manifest).

    LoRA adapters are merged into the weights. Buffers that a tag doesn't hold are made on `device`.
    model_class: None for the one of runtime/chosen_model.py, which must be that of the tag. A
    training script, which may use another one, gives its own. share, errors: as for
    open_tag().
    """
    reader, manifest = open_tag(out_dir, tag, share)
    state = manifest["state"]
    check_sizes(reader.folder, manifest, reader.shapes)
    with content_errors(reader.folder):
        config = config_of_tag(reader.folder, state["model"], print_note)
        if dropout is not None:
            config = replace(config, dropout=dropout)
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
    replace_parameters(model, lambda name, _: weights[reader.stored_as.get(name, name)])
    reader.copy_buffers(model)
    return model.to(device).eval(), manifest
