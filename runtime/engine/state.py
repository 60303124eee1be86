"""Copy a checkpoint's state into DeepSpeed's engine, at any stage and number of ranks."""

import torch

from runtime.checkpoint.shards import check_shapes
from runtime.checkpoint.tags import CheckpointError
from runtime.engine.any_optimizer import is_adamw
from runtime.engine.muon import moments_of


@torch.no_grad()
def copy_into(deepspeed, reader):
    """Copy a tag's weights, moments, step and loss scale into a new engine. Raises CheckpointError."""
    stage, params = deepspeed.zero_optimization_stage(), dict(deepspeed.module.named_parameters())
    check_shapes(reader.folder, reader.shapes, params)
    if is_adamw(deepspeed.optimizer.optimizer):
        init_adam_state(deepspeed.optimizer, stage, reader.step)
    else:
        init_other_state(deepspeed.optimizer, stage, reader)
    for name, param in params.items():
        check_moments(reader, name, param, deepspeed.optimizer, stage)
        for field in reader.fields(name):
            flat = reader.get(name, field).flatten()
            for target, offset in local_slices(deepspeed.optimizer, stage, param, field):
                target.copy_(flat[offset:offset + target.numel()])
    scaler, saved = getattr(deepspeed.optimizer, "loss_scaler", None), reader.loss_scaler
    if getattr(scaler, "dynamic", False) and getattr(saved, "dynamic", False):  # the window stays this run's
        for name in ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis"):
            setattr(scaler, name, getattr(saved, name))
    for counter in ("global_steps", "global_samples", "skipped_steps"):
        setattr(deepspeed, counter, int(reader.model_state[counter]))


def init_adam_state(optimizer, stage, step):
    """Create the optimizer's state at `step`, with moments of zeros. It would do so itself at its first step."""
    inner = optimizer.optimizer
    flats = ([(flat, {}) for flat in optimizer.fp32_partitioned_groups_flat] if stage == 3
             else [(param, group) for group in inner.param_groups for param in group["params"]])
    fused = inner.param_groups[0].get("fused")
    for flat, group in flats:
        count = torch.tensor(step, dtype=torch.float32, device=flat.device if fused else "cpu")
        inner.state[flat] = {"step": count if isinstance(inner, torch.optim.AdamW) else int(step),  # DeepSpeed's: ints
                             **{field: torch.zeros_like(flat) for field in moments_of(group)}}  # in AdamW's order
    if stage < 3:
        optimizer._lazy_init_hp_params_optimizer_state()


def init_other_state(optimizer, stage, reader):
    """Create the state of an optimizer that we don't implement: the tag's numbers, and tensors of zeros."""
    inner = optimizer.optimizer
    flats = []  # (flat weights, number of their parameter group)
    if stage == 3:
        for i, flat in enumerate(optimizer.fp32_partitioned_groups_flat):
            flats.append((flat, optimizer.sub_group_to_group_id[i]))
    else:
        for i, group in enumerate(inner.param_groups):
            flats += [(flat, i) for flat in group["params"]]

    for flat, i in flats:
        on_device = inner.param_groups[i].get("capturable") or inner.param_groups[i].get("fused")
        state = {field: torch.zeros_like(flat) for field in reader.state_fields}
        for key, value in reader.numbers[min(i, len(reader.numbers) - 1)].items():
            if torch.is_tensor(value):
                value = value.clone().to(flat.device if on_device else "cpu")
            state[key] = value
        inner.state[flat] = state
    if stage < 3:
        optimizer._lazy_init_hp_params_optimizer_state()


def check_moments(reader, name, param, optimizer, stage):
    """Raise CheckpointError if the tag has no tensor that the optimizer keeps for a parameter."""
    if not param.requires_grad:
        return
    if stage == 3:
        sub_group, _, _ = optimizer.grad_position[optimizer.get_param_id(param)]
        flat = optimizer.fp32_partitioned_groups_flat[sub_group]
        state = optimizer.optimizer.state[flat]
        kept = [key for key, value in state.items() if torch.is_tensor(value) and value.shape == flat.shape]
    else:
        mapping = getattr(param, "_hp_mapping", None)  # None: other ranks have this parameter
        kept = mapping.get_optim_state_keys() if mapping else []
    if missing := [key for key in kept if key not in reader.fields(name)]:
        raise CheckpointError(
            f"{reader.folder} has no {missing[0]} of {name}, which the optimizer keeps: use the settings and the "
            f"optimizer that it was trained with, or start a new stage with --init_from={reader.folder} --out_dir=DIR")


def local_slices(optimizer, stage, param, field):
    """Return [(flat tensor of this rank, its offset in the parameter)] to fill for one field of a parameter."""
    is_weight = field == "weight"
    if stage == 3:
        flats = [param.ds_tensor.data] if is_weight else []
        if param.requires_grad:
            key = None if is_weight else field
            flats.append(optimizer._get_fp32_opt_state_partition(param, False, optim_state_key=key)[0])
        start = param.ds_tensor.ds_numel * optimizer._get_param_partition_rank(param)
        slices = [(flat[:max(0, param.ds_numel - start)], start) for flat in flats]  # the rest is padding
        return [(flat, start) for flat, start in slices if flat.numel()]
    slices = [(param.data.view(-1), 0)] if is_weight else []
    if mapping := getattr(param, "_hp_mapping", None):
        slices.append((mapping.get_hp_fragment(None if is_weight else field), mapping.lp_fragment_address.start))
    return slices
