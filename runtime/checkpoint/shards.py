"""What tags hold: weights and Adam's moments, parameter by parameter, from files of any ZeRO stage and number of ranks.

Nothing is converted on disk, and the files are mapped: no more is read than is asked for. DeepSpeed 0.19.8 lays them
out so: stage 0 cuts nothing; stages 1 and 2 string a group's parameters together and cut the string into one piece per
rank; stage 3 cuts each parameter into equal pieces, the last one padded.
"""

import contextlib
import importlib
import math
import os
import shutil
from collections import defaultdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from model import GPT, GPTConfig
from runtime.checkpoint.tags import SAFE_GLOBALS, CheckpointError, TagStore, UnreadableError, verify_files
from runtime.files import file_digest
from runtime.lora import is_adapter, merge

MOMENTS = ("exp_avg", "exp_avg_sq")


def mmap_load(path):
    """The content of a .pt file with mapped tensors. Only tensors, plain containers and DeepSpeed's few classes are
    made, whatever the file names."""
    names = [name.rpartition(".") for name in SAFE_GLOBALS]
    with torch.serialization.safe_globals([getattr(importlib.import_module(file), name) for file, _, name in names]):
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def open_tag(folder, manifest, weights_only=False):
    """A TagReader of a tag's files, which verify_files() has checked. weights_only: below stage 3, the weights as the
    model's file has them, in half precision perhaps."""
    names = sorted(manifest["files"], key=lambda name: [int(n) for n in name.split("_") if n.isdigit()])
    models = [mmap_load(os.path.join(folder, name)) for name in names if "model_states" in name]
    optimizers = [] if weights_only and manifest["stage"] < 3 else [
        mmap_load(os.path.join(folder, name))["optimizer_state_dict"] for name in names if "optim" in name]
    return TagReader(models, optimizers, manifest)


class TagReader:
    """A tag's parameters: .shapes {name: size} and get(name, field). What is no tensor: .step, .loss_scaler and
    .model_state, the first model file's content."""

    def __init__(self, models, optimizers, manifest):
        model, stage = models[0], manifest["stage"]
        self.model_state, self.lora, self.loss_scaler = model, manifest["state"].get("lora"), None
        if stage == 3:  # the models' files hold the frozen parameters, in one piece per rank
            frozen = model["frozen_param_shapes"] or {}
            weights = {name: [rank["frozen_param_fragments"][name] for rank in models] for name in frozen}
            shapes = {name: shape for group in (*model["param_shapes"], frozen) for name, shape in group.items()}
        else:  # lm_head is the token embedding
            weights = {name: [w] for name, w in model["module"].items() if name != "lm_head.weight"}
            shapes = {name: w.shape for name, (w,) in weights.items()}
        self.shapes = {name: torch.Size(shape) for name, shape in shapes.items()}
        self.pieces = {"weight": weights, **{field: {} for field in MOMENTS}}  # [field][name]: a list of tensors
        if stage == 0:
            state = model["optimizer"]["state"]
            self.step = float(state[0]["step"])
            # torch's optimizer numbers its states by its groups: matrices, then all else
            names = sorted(filter(self.is_trainable, shapes), key=lambda name: len(shapes[name]) < 2)
            for field in MOMENTS:
                self.pieces[field] = {name: [state[i][field]] for i, name in enumerate(names)}
        elif optimizers:
            self.add_flat(optimizers, stage)

    def is_trainable(self, name):
        return not self.lora or is_adapter(name)

    def get(self, name, field="weight"):
        """A parameter's "weight", "exp_avg" or "exp_avg_sq": whole, in fp32, on the CPU, and a view of the mapped file
        if it is in one piece there."""
        shape = self.shapes[name]
        flat = slice_flat([piece.flatten() for piece in self.pieces[field][name]], 0, shape.numel())
        return flat.view(shape).detach().float()

    def add_flat(self, optimizers, stage):
        """Stages 1 to 3: of each rank and group one flat fp32 tensor per field, in which parameters follow one another:
        a group's over all ranks, or at stage 3 this rank's part of each, over all groups."""
        weights, states = (("fp32_flat_groups", "optimizer_state_dict") if stage == 3 else
                           ("single_partition_of_fp32_groups", "base_optimizer_state"))
        groups = self.model_state["param_shapes"]
        adam = [[rank[states]["state"][i] for i in range(len(groups))] for rank in optimizers]
        self.step, self.loss_scaler = float(adam[0][0]["step"]), optimizers[0].get("loss_scaler")
        parts, trained = len(optimizers) if stage == 3 else 1, [name for group in groups for name in group]
        for field in self.pieces:
            flat = [rank[weights] for rank in optimizers] if field == "weight" else [
                [group[field] for group in rank] for rank in adam]  # [rank][group]
            pieces = defaultdict(list)
            for names, tensors in [(trained, rank) for rank in flat] if stage == 3 else zip(groups, zip(*flat)):
                start = 0
                for name in names:
                    size = math.ceil(self.shapes[name].numel() / parts)  # with the last rank's padding
                    pieces[name].append(slice_flat(tensors, start, size))
                    start += size
            self.pieces[field] |= pieces


def slice_flat(tensors, start, length):
    """The elements from start to start + length of 1-dimensional tensors that follow one another."""
    parts = []
    for tensor in tensors:
        if length and start < tensor.numel():
            parts.append(tensor[start:start + length])
            start, length = start + parts[-1].numel(), length - parts[-1].numel()
        start -= tensor.numel()
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def load_fp32(store, tag):
    """{name: fp32 tensor} of a tag's model, for GPT.load_state_dict. The weights are cached as safetensors next to the
    tag and mapped from there. Every file is checked before it is read. Raises CheckpointError."""
    path, cache = store.path(tag), store.cache_path(tag)
    manifest_file, temp = os.path.join(path, "manifest.json"), Path(cache + ".tmp")
    sha256 = file_digest(manifest_file)["sha256"]
    weights = read_cache(cache, sha256)
    if not weights:
        manifest = store.find(tag).manifest
        if problems := verify_files(path, manifest["files"]):
            raise CheckpointError("\n".join(problems))
        reader = open_tag(path, manifest)
        weights = {name: reader.get(name).contiguous() for name in reader.shapes}
        with contextlib.suppress(OSError, SafetensorError):  # a folder that is full or read-only can be sampled from
            try:
                save_file(weights, temp, metadata={"manifest": sha256})
                shutil.copymode(manifest_file, temp)  # save_file's own is for its owner alone
                os.replace(temp, cache)
            finally:
                temp.unlink(missing_ok=True)
        weights = read_cache(cache, sha256) or {name: weight.clone() for name, weight in weights.items()}
    weights["lm_head.weight"] = weights["transformer.wte.weight"]  # tied; the files hold it once
    return weights


def read_cache(cache, manifest_sha256):
    """The weights in a cache of the tag with this manifest; None if there are none."""
    with contextlib.suppress(Exception), safe_open(cache, framework="pt") as f:  # a bad cache is made again
        if f.metadata() == {"manifest": manifest_sha256}:
            return {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118 (no mapping)


def load_model(out_dir, tag="latest", dropout=None):
    """(GPT in eval mode with a tag's fp32 weights, on the CPU; the tag's manifest). Holds the weights once. Tags of any
    stage, precision and number of ranks; LoRA adapters are merged into the weights. Raises CheckpointError."""
    store = TagStore(out_dir)
    tag, manifest = store.find(tag)
    state = manifest["state"]
    with torch.device("meta"):
        model = GPT(GPTConfig(**state["model"] | ({} if dropout is None else {"dropout": dropout})))
    try:
        weights = load_fp32(store, tag)
        if state["lora"]:
            merge(weights, state["lora"])
        model.load_state_dict(weights, assign=True)
    except FileNotFoundError as error:  # a run that writes there has pruned or replaced it
        raise CheckpointError(f"{out_dir}/{tag} went away while it was read ({error.strerror}): try again") from None
    except OSError as error:
        raise UnreadableError.of(error, store.path(tag)) from None
    model.lm_head.weight = model.transformer.wte.weight
    return model.eval(), manifest
