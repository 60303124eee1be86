"""A tag's weights and Adam's moments, parameter by parameter, from files of any ZeRO stage and any number of ranks, and
into an engine of any other. Nothing is converted on disk, and no more is read than is asked for: the files are mapped.

How DeepSpeed 0.19.8 lays them out: stages 1 and 2 string a group's parameters together and cut the string into as many
pieces as there are ranks; stage 3 cuts each parameter into equal pieces, the last one padded; stage 0 cuts nothing.
"""

import importlib
import math
import os
import time

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

from runtime.checkpoint.tags import SAFE_GLOBALS
from runtime.cluster.ranks import print0
from runtime.lora import A, B

MOMENTS = ("exp_avg", "exp_avg_sq")


def mapped(path):
    """A .pt file's content, its tensors mapped and not loaded; only tensors, plain containers and DeepSpeed's few
    classes are made, whatever the file names."""
    places = [name.rpartition(".") for name in SAFE_GLOBALS]
    with torch.serialization.safe_globals([getattr(importlib.import_module(file), name) for file, _, name in places]):
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


class Shards:
    """get(name, kind) gives a parameter's "weight" in fp32, or a moment of it, whole; shapes: {name: size}."""

    def __init__(self, folder, manifest, weights_only=False):
        files = sorted(manifest["files"], key=lambda name: [int(n) for n in name.split("_") if n.isdigit()])
        self.stage, self.world_size = manifest["stage"], manifest["world_size"]
        self.frozen = {}  # name: the pieces that the ranks have
        lora = manifest["state"].get("lora")
        self.learns = lambda name: not lora or name.endswith((A, B))
        models = [mapped(os.path.join(folder, name)) for name in files if "model_states" in name]
        self.model = models[0]
        if weights_only and self.stage < 3:  # the weights as they were trained with, in half precision perhaps
            self.stage, self.scaler = 0, None
            self.take_plain(weights_only)
            return
        shards = [mapped(os.path.join(folder, name))["optimizer_state_dict"] for name in files if "optim" in name]
        self.scaler = shards[0].get("loss_scaler") if shards else None
        if self.stage == 0:
            self.take_plain()
            return
        flat, inner = {3: ("fp32_flat_groups", "optimizer_state_dict")}.get(
            self.stage, ("single_partition_of_fp32_groups", "base_optimizer_state"))
        states = [[shard[inner]["state"][i] for i in range(len(shard[flat]))] for shard in shards]
        self.step = float(states[0][0]["step"])
        self.groups = self.model["param_shapes"]
        self.shapes = {name: torch.Size(shape) for group in self.groups for name, shape in group.items()}
        if self.stage == 3:
            frozen = self.model["frozen_param_shapes"] or {}
            self.shapes |= {name: torch.Size(shape) for name, shape in frozen.items()}
        else:
            self.shapes |= {name: w.shape for name, w in self.model["module"].items() if not self.learns(name)}
            self.shapes.pop("lm_head.weight", None)  # the token embedding
        self.frozen = {name: [model["frozen_param_fragments"][name] for model in models] if self.stage == 3
                       else [self.model["module"][name]] for name in self.shapes if not self.learns(name)}
        # pieces[kind][rank][group]: flat tensors
        self.pieces = {"weight": [shard[flat] for shard in shards],
                       **{kind: [[state[kind] for state in rank] for rank in states] for kind in MOMENTS}}
        self.place()

    def take_plain(self, weights_only=False):
        """Stage 0: torch's own optimizer state, whose numbers follow the groups: matrices, then all else."""
        weights = {name: w for name, w in self.model["module"].items() if name != "lm_head.weight"}
        self.shapes = {name: w.shape for name, w in weights.items()}
        self.plain = {"weight": weights}
        if weights_only:
            return
        order = sorted(filter(self.learns, weights), key=lambda name: weights[name].dim() < 2)
        state = self.model["optimizer"]["state"]
        self.step = float(state[0]["step"])
        self.plain |= {kind: {name: state[i][kind] for i, name in enumerate(order)} for kind in MOMENTS}

    def place(self):
        """Where each parameter begins: in its group's string, or at stage 3 in each rank's."""
        self.at = {}
        for i, group in enumerate(self.groups):
            if i == 0 or self.stage != 3:
                start = 0
            for name in group:
                self.at[name] = i, start
                numel = self.shapes[name].numel()
                start += math.ceil(numel / self.world_size) if self.stage == 3 else numel

    def get(self, name, kind="weight"):
        """(shape) fp32 tensor; a view of the file where it lies there in one piece."""
        shape = self.shapes[name]
        if self.stage == 0:
            return self.plain[kind][name].detach().float()
        if name in self.frozen:
            whole = torch.cat([piece.flatten() for piece in self.frozen[name]])
            return whole[:shape.numel()].view(shape).detach().float()
        i, start = self.at[name]
        if self.stage == 3:
            size = math.ceil(shape.numel() / self.world_size)
            parts = [cut(rank, start, size) for rank in self.pieces[kind]]
        else:
            parts = [cut([rank[i] for rank in self.pieces[kind]], start, shape.numel())]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return whole[:shape.numel()].view(shape).detach().float()


def cut(strings, start, length):
    """The elements from start to start + length of 1-dimensional tensors that follow one another."""
    found = []
    for string in strings:
        if length and start < string.numel():
            part = string[start:start + length]
            found.append(part)
            start, length = start + part.numel(), length - part.numel()
        start -= string.numel()
    return found[0] if len(found) == 1 else torch.cat(found)


@torch.no_grad()
def put(engine, shards, weights_only=False):
    """Give a fresh engine, of any stage and number of ranks, the weights, moments, step and loss scale of a tag. No
    collective: each rank reads what it holds a part of."""
    began, told, done = time.time(), time.time(), 0
    total = sum(shape.numel() for shape in shards.shapes.values())
    stage, kinds = engine.zero_optimization_stage(), ("weight",) if weights_only else ("weight", *MOMENTS)
    if not weights_only:
        make_states(engine, stage, shards.step)
    for name, param in engine.module.named_parameters():
        for kind in kinds if shards.learns(name) else kinds[:1]:
            whole = shards.get(name, kind)
            for target, start in targets(engine, stage, param, kind):
                target.copy_(whole.flatten()[start:start + target.numel()])
        done += shards.shapes[name].numel()
        if time.time() - told > 5:
            told = time.time()
            print0(f"re-sharding: {100 * done / total:.0f}% after {told - began:.0f} s")
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if isinstance(scaler, DynamicLossScaler) and isinstance(shards.scaler, DynamicLossScaler):
        vars(scaler).update({key: value for key, value in vars(shards.scaler).items() if key != "scale_window"})
    for counter in ("global_steps", "global_samples", "skipped_steps"):
        setattr(engine, counter, shards.model[counter])


def make_states(engine, stage, step):
    """Give the optimizer inside an engine states of zeros at `step`, which it would make itself at its first."""
    inner = engine.optimizer if stage == 0 else engine.optimizer.optimizer
    flats = (engine.optimizer.fp32_partitioned_groups_flat if stage == 3
             else [param for group in inner.param_groups for param in group["params"]])
    fused = inner.param_groups[0].get("fused")
    for flat in flats:
        count = torch.tensor(step, dtype=torch.float32, device=flat.device if fused else "cpu")
        state = {"step": count if isinstance(inner, torch.optim.AdamW) else int(step)}  # DeepSpeed's counts in ints
        inner.state[flat] = {**state, **{kind: torch.zeros_like(flat) for kind in MOMENTS}}


def targets(engine, stage, param, kind):
    """[(flat tensor of this rank's, where in the parameter it begins)] to be filled for one kind of a parameter."""
    if stage == 0:
        return [(param.data.view(-1) if kind == "weight" else engine.optimizer.state[param][kind].view(-1), 0)]
    optimizer = engine.optimizer
    if stage == 3:
        key, part = None if kind == "weight" else kind, param.ds_tensor.data
        if param.requires_grad:
            part, _ = optimizer._get_fp32_opt_state_partition(param, release_swap_buffers=False, optim_state_key=key)
        start = param.ds_tensor.ds_numel * optimizer._get_param_partition_rank(param)
        mine = max(0, min(part.numel(), param.ds_numel - start))  # the rest is padding
        found = [(part[:mine], start)]
        if kind == "weight":
            found += [(param.ds_tensor.data[:mine], start)] if param.requires_grad else []
            if param.data.numel() == param.ds_numel:  # gathered, and kept so
                found.append((param.data.view(-1), 0))
        return [(flat, start) for flat, start in found if flat.numel()]
    found = [(param.data.view(-1), 0)] if kind == "weight" else []
    if getattr(param, "_hp_mapping", None) is not None:
        mapping = param._hp_mapping
        flat = optimizer.optimizer.param_groups[mapping.param_group_index]["params"][0]
        flat = flat.data if kind == "weight" else optimizer.optimizer.state[flat][kind]
        address = mapping.get_hp_fragment_address()
        found.append((flat[address.start:address.start + address.numel], mapping.lp_fragment_address.start))
    return found
