"""Copy a checkpoint's state into DeepSpeed's engine, at any stage and number of ranks."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from runtime.checkpoint.errors import CheckpointError
from runtime.checkpoint.model_source import check_tensors
from runtime.checkpoint.tag_reader import TagReader
from runtime.engine.any_optimizer import is_adamw
from runtime.engine.compact import CHUNK, placeholder
from runtime.engine.layout import Layout, shape_of
from runtime.engine.muon import moments_of
from runtime.engine.shard import Shard


@torch.no_grad()
def copy_into(layout: Layout, reader: TagReader) -> None:
    """Copy a tag's weights, buffers, optimizer state, loss scale and counters into a new engine.

    Raises CheckpointError if the tag has another model, or not all that the optimizer keeps.
    """
    # Everything is checked before the first weight is copied
    params = dict(layout.module.named_parameters())
    check_tensors(reader.folder, reader.tensors(), reader.source, layout.module, shape_of)
    init_state(layout, reader)
    for shard in layout.shards:
        check_state(layout, reader, shard)

    # The weights as forward and backward use them
    for name, param in params.items():
        weight = reader.get(name).flatten()
        for target, start in layout.weight_pieces(param):
            target.copy_(weight[start : start + target.numel()])
    reader.copy_buffers(layout.module)

    # The fp32 weights, and what the optimizer keeps of each
    for shard in layout.shards:
        if shard.compact:
            copy_compact(layout, reader, shard)
            continue
        for piece in shard.pieces:
            name = layout.names[piece.param]
            for field in reader.fields(name):
                flat = shard.master.data if field == "weight" else shard.state[field]
                saved = reader.get(name, field).flatten()
                target = flat.narrow(0, piece.offset, piece.numel)
                target.copy_(saved[piece.start : piece.start + piece.numel])

    if any(shard.compact for shard in layout.shards):  # other ranks may have rounded ties
        layout.gather_weights()

    # What is the same on all ranks
    layout.restore_scale(reader.loss_scaler)
    layout.restore_counters(reader.model_state)


def copy_compact(layout: Layout, reader: TagReader, shard: Shard) -> None:
    """Copy a tag's fp32 weights and moments into a shard with compact state, by chunks."""
    size = shard.half.numel()
    for field in ("weight", *moments_of(shard.options)):
        for begin in range(0, size, CHUNK):
            values = torch.zeros(min(CHUNK, size - begin))  # also of the padding
            for piece in shard.pieces:
                # What of the piece is in this chunk
                first = max(begin, piece.offset)
                end = min(begin + len(values), piece.offset + piece.numel)
                if first < end:
                    saved = reader.get(layout.names[piece.param], field).flatten()
                    start = piece.start + first - piece.offset
                    values[first - begin : end - begin] = saved[start : start + end - first]
            shard.compact.write(field, begin, values.to(shard.half.device))


def init_state(layout: Layout, reader: TagReader) -> None:
    """Create the optimizer's state as the tag's parameters had it, with tensors of zeros.

    The optimizer would do so itself at its first step. A parameter may have been in another group
    than now. Raises CheckpointError.
    """
    for shard in layout.shards:
        # What the tag has for this shard's parameters
        names = [layout.names[param] for param in shard.params]
        saved = reader.group_state_of(names)
        if is_adamw(layout.optimizer):
            init_adam_state(shard, saved.numbers.get("step", 0.0))
        else:
            dtypes = dict(saved.dtypes)
            for name in names:
                dtypes = {**reader.group_state_of_parameter(name).dtypes, **dtypes}
            init_other_state(shard, saved.numbers, dtypes)
    layout.show_state()


def init_adam_state(shard: Shard, step: Tensor | float) -> None:
    """Create the state of AdamW, DeepSpeed's CPU Adam or Muon for a shard."""
    # The number of steps, where and as the optimizer would keep it
    if isinstance(shard.optimizer, torch.optim.AdamW):
        is_fused = shard.options.get("fused")
        device = shard.master.device if is_fused else "cpu"
        shard.state["step"] = torch.tensor(float(step), dtype=torch.float32, device=device)
    else:
        shard.state["step"] = int(step)  # DeepSpeed's: a number

    # The moments; compact state has its own tensors for them
    for field in moments_of(shard.options):  # in AdamW's order
        if shard.compact:
            shard.state[field] = placeholder(shard.half.numel(), shard.half.device)
        else:
            shard.state[field] = torch.zeros_like(shard.master)


def init_other_state(
    shard: Shard, numbers: Mapping[str, Any], dtypes: Mapping[str, torch.dtype]
) -> None:
    """Create the state of an optimizer that we don't implement: the tag's numbers, and tensors of
    zeros."""
    # Tensors like the weights, which copy_into() fills
    for field, dtype in dtypes.items():
        shard.state[field] = torch.zeros_like(shard.master, dtype=dtype)

    # Numbers, such as the step, on the device only where PyTorch wants them there
    on_device = shard.options.get("capturable") or shard.options.get("fused")
    for key, value in numbers.items():
        if torch.is_tensor(value):
            device = shard.master.device if on_device else "cpu"
            value = value.clone().to(device)
        shard.state[key] = value


def check_state(layout: Layout, reader: TagReader, shard: Shard) -> None:
    """Raise CheckpointError unless the tag has just the tensors that the optimizer keeps for a
    parameter."""
    # The fields that the optimizer keeps for each element
    kept = ["weight"]
    for key, value in shard.state.items():
        if torch.is_tensor(value) and value.shape == shard.master.shape:
            kept.append(key)
    advice = (
        "use the settings and the optimizer that it was trained with, or start a new stage with "
        f"--init_from={reader.folder} --out_dir=DIR"
    )
    for piece in shard.pieces:
        name = layout.names[piece.param]
        saved = reader.fields(name)

        # A moment of zeros would resume wrongly without a word
        missing = [key for key in kept if key not in saved]
        if missing:
            raise CheckpointError(
                f"{reader.folder} has no {missing[0]} of {name}, which the optimizer keeps: "
                f"{advice}"
            )

        # And so would a moment that is dropped
        unknown = [key for key in saved if key not in kept]
        if unknown:
            raise CheckpointError(
                f"{reader.folder} has an {unknown[0]} of {name}, which the optimizer doesn't keep: "
                f"{advice}"
            )
