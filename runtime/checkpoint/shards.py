"""What tags hold: weights and Adam's moments, parameter by parameter, from files of any ZeRO stage and number of ranks.

Nothing is converted on disk, and the files are mapped: no more is read than is asked for. DeepSpeed 0.19.8 lays them
out so: stage 0 cuts nothing; stages 1 and 2 string a group's parameters together and cut the string into one piece per
rank; stage 3 cuts each parameter into equal pieces, the last one padded.

    from runtime.checkpoint import load_model
    model, manifest = load_model("out-shakespeare-xl-deepspeed", "best")
    logits = model(tokens)
"""

import contextlib
import importlib
import math
import os
import shutil

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
    """A reader of a tag's files, which verify_files() has checked.

    weights_only: below stage 3, the weights as the model's file has them, in half precision perhaps. A reader has
    .shapes {name: size}, .get(name, field), and of what is no tensor .step, .loss_scaler and .model_state.
    """
    names = sorted(manifest["files"], key=lambda name: [int(n) for n in name.split("_") if n.isdigit()])
    models = [mmap_load(os.path.join(folder, name)) for name in names if "model_states" in name]
    if manifest["stage"] == 0 or weights_only and manifest["stage"] < 3:
        return PlainReader(models[0], manifest, weights_only)
    optimizers = [mmap_load(os.path.join(folder, name))["optimizer_state_dict"] for name in names if "optim" in name]
    return (Zero3Reader if manifest["stage"] == 3 else Zero12Reader)(models, optimizers, manifest)


class TagReader:
    """get(name, field) is a parameter's "weight", "exp_avg" or "exp_avg_sq": whole, in fp32, on the CPU, and a view of
    the mapped file if it is in one piece there."""

    loss_scaler = None

    def __init__(self, model_state, manifest):
        self.model_state, self.lora = model_state, manifest["state"].get("lora")

    def is_trainable(self, name):
        return not self.lora or is_adapter(name)

    def get(self, name, field="weight"):
        flat = self.read_flat(name, field)
        return flat[:self.shapes[name].numel()].view(self.shapes[name]).detach().float()


class PlainReader(TagReader):
    """Stage 0: whole parameters; torch's optimizer numbers their states by its groups: matrices, then all else."""

    def __init__(self, model_state, manifest, weights_only):
        super().__init__(model_state, manifest)
        weights = {name: w for name, w in model_state["module"].items() if name != "lm_head.weight"}
        self.shapes, self.fields = {name: w.shape for name, w in weights.items()}, {"weight": weights}
        if not weights_only:
            order = sorted(filter(self.is_trainable, weights), key=lambda name: weights[name].dim() < 2)
            state = model_state["optimizer"]["state"]
            self.step = float(state[0]["step"])
            self.fields |= {field: {name: state[i][field] for i, name in enumerate(order)} for field in MOMENTS}

    def read_flat(self, name, field):
        return self.fields[field][name].flatten()


class ZeroReader(TagReader):
    """What stages 1 to 3 have in common: of each rank and group flat fp32 tensors; frozen parameters in pieces."""

    def __init__(self, models, optimizers, manifest, weights, states):
        super().__init__(models[0], manifest)
        self.world_size, self.loss_scaler = manifest["world_size"], optimizers[0].get("loss_scaler")
        self.groups = self.model_state["param_shapes"]
        self.shapes = {name: torch.Size(shape) for group in self.groups for name, shape in group.items()}
        adam = [[rank[states]["state"][i] for i in range(len(self.groups))] for rank in optimizers]
        self.step = float(adam[0][0]["step"])
        self.flat = {"weight": [rank[weights] for rank in optimizers],  # [rank][group]
                     **{field: [[group[field] for group in rank] for rank in adam] for field in MOMENTS}}
        self.offsets, self.frozen = {}, {}

    def read_flat(self, name, field):
        if name in self.frozen:
            return torch.cat([piece.flatten() for piece in self.frozen[name]])
        return self.read_trained(name, field)


class Zero12Reader(ZeroReader):
    """Stages 1 and 2: a group's parameters are strung together and cut into one piece per rank."""

    def __init__(self, models, optimizers, manifest):
        super().__init__(models, optimizers, manifest, "single_partition_of_fp32_groups", "base_optimizer_state")
        for i, group in enumerate(self.groups):
            start = 0
            for name in group:
                self.offsets[name] = i, start
                start += self.shapes[name].numel()
        self.frozen = {name: [w] for name, w in self.model_state["module"].items()
                       if not self.is_trainable(name) and name != "lm_head.weight"}  # which is the token embedding
        self.shapes |= {name: w.shape for name, (w,) in self.frozen.items()}

    def read_trained(self, name, field):
        i, start = self.offsets[name]
        return slice_flat([rank[i] for rank in self.flat[field]], start, self.shapes[name].numel())


class Zero3Reader(ZeroReader):
    """Stage 3: each parameter is cut into one piece per rank; a rank strings its pieces together."""

    def __init__(self, models, optimizers, manifest):
        super().__init__(models, optimizers, manifest, "fp32_flat_groups", "optimizer_state_dict")
        start = 0
        for name, shape in self.shapes.items():
            self.offsets[name] = start
            start += self.stored_numel(shape)
        frozen = self.model_state["frozen_param_shapes"] or {}
        self.frozen = {name: [model["frozen_param_fragments"][name] for model in models] for name in frozen}
        self.shapes |= {name: torch.Size(shape) for name, shape in frozen.items()}

    def stored_numel(self, shape):
        """Elements of a parameter on each rank, with the last rank's padding."""
        return math.ceil(shape.numel() / self.world_size)

    def read_trained(self, name, field):
        size = self.stored_numel(self.shapes[name])
        pieces = [slice_flat(rank, self.offsets[name], size) for rank in self.flat[field]]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


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
    manifest_file = os.path.join(path, "manifest.json")
    sha256 = file_digest(manifest_file)["sha256"]
    weights = read_cache(cache, sha256)
    if not weights:
        manifest = store.find(tag).manifest
        if problems := verify_files(path, manifest["files"]):
            raise CheckpointError("\n".join(problems))
        reader = open_tag(path, manifest)
        weights = {name: reader.get(name).contiguous() for name in reader.shapes}
        with contextlib.suppress(OSError, SafetensorError):  # a folder that is full or read-only can be sampled from
            write_cache(cache, weights, sha256, like=manifest_file)
        weights = read_cache(cache, sha256) or {name: weight.clone() for name, weight in weights.items()}
    weights["lm_head.weight"] = weights["transformer.wte.weight"]  # tied; the files hold it once
    return weights


def read_cache(cache, manifest_sha256):
    """The weights in a cache of the tag with this manifest; None if there are none."""
    with contextlib.suppress(Exception), safe_open(cache, framework="pt") as f:  # a bad cache is made again
        if f.metadata() == {"manifest": manifest_sha256}:
            return {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118 (no mapping)


def write_cache(cache, weights, manifest_sha256, like):
    """Write the weights as safetensors, for whoever may read the file `like`: save_file's are its owner's alone."""
    temp = cache + ".tmp"
    try:
        save_file(weights, temp, metadata={"manifest": manifest_sha256})
        shutil.copymode(like, temp)
        os.replace(temp, cache)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temp)


def load_model(out_dir, tag="latest", dropout=None):
    """(GPT in eval mode with a tag's fp32 weights, on the CPU; the tag's manifest). Holds the weights once. Tags of any
    stage, precision and number of ranks; LoRA adapters are merged into the weights. Raises CheckpointError."""
    store = TagStore(out_dir)
    tag, manifest = store.find(tag)
    with torch.device("meta"):
        kept = {} if dropout is None else {"dropout": dropout}
        model = GPT(GPTConfig(**{**manifest["state"]["model"], **kept}))
    try:
        weights = load_fp32(store, tag)
        if manifest["state"]["lora"]:
            merge(weights, manifest["state"]["lora"])
        model.load_state_dict(weights, assign=True)
    except FileNotFoundError as error:  # a run that writes there has pruned or replaced it
        raise CheckpointError(f"{out_dir}/{tag} went away while it was read ({error.strerror}): try again") from None
    except OSError as error:
        raise UnreadableError.of(error, store.path(tag)) from None
    model.lm_head.weight = model.transformer.wte.weight
    return model.eval(), manifest
