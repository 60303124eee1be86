"""Optimizers that this project does not implement: they are stepped by their own step().

ZeRO gives each rank a flat piece of all weights. So an optimizer has to work element by element:
what it does to an element may not depend on the others. check_elementwise() proves that on a small
tensor before training. This file knows nothing about DeepSpeed.
"""

import copy
from collections import defaultdict
from collections.abc import Sequence

import torch

from runtime.engine.clip import Clip
from runtime.engine.shard import Shard
from runtime.errors import UserError

# What the fused step implements. These options of torch.optim.AdamW change what it computes
ADAMW_OPTIONS = ("amsgrad", "maximize", "differentiable")
TEST_PIECES = (5, 7, 12)  # elements
TEST_STEPS = 7  # RAdam's first five differ from the others
TEST_LR = 1e-2


def is_adamw(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the fused step computes the same as this optimizer: PyTorch's AdamW, or
    DeepSpeed's on the CPU, with options that the fused step implements."""
    kind = type(optimizer)
    is_cpu_adam = kind.__name__ == "DeepSpeedCPUAdam" and kind.__module__.startswith("deepspeed.")
    if kind is not torch.optim.AdamW and not is_cpu_adam:
        return False
    if is_cpu_adam and not optimizer.adam_w_mode:
        return False
    for group in optimizer.param_groups:
        if any(group.get(option) for option in ADAMW_OPTIONS):
            return False
        if not group.get("decoupled_weight_decay", True):  # as in Adam
            return False
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    has_own_step = "step" in vars(optimizer)  # replaced in this object
    return not any(hooks) and not has_own_step


def optimizer_name(optimizer: torch.optim.Optimizer) -> str:
    """Return the name that a tag records: an optimizer's state means nothing to another one."""
    if is_adamw(optimizer):
        return "AdamW"
    options = [name for name in ADAMW_OPTIONS if optimizer.param_groups[0].get(name)]
    return "+".join([type(optimizer).__name__, *options])


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Raise UserError unless an optimizer gives the same weights for a tensor and for its pieces,
    and its state consists of numbers and of tensors like the weights."""
    name = type(optimizer).__name__
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(sum(TEST_PIECES), generator=generator)
    grads = torch.randn(TEST_STEPS, sum(TEST_PIECES), generator=generator)
    try:
        whole = make_steps(optimizer, [weights], [grads])
        pieces = make_steps(
            optimizer, weights.split(TEST_PIECES), grads.split(TEST_PIECES, dim=1)
        )
    except UserError:
        raise
    except Exception as error:  # whatever a step() that wants something else raises
        raise UserError(
            f"the optimizer {name} can't be stepped on flat tensors "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}): "
            "choose one that works element by element, or give it a stepper of its own as "
            "runtime/engine/muon.py is one"
        ) from None
    if not torch.allclose(whole[0], torch.cat(pieces), rtol=1e-6, atol=1e-8):
        raise UserError(
            f"the optimizer {name} needs whole tensors, but ZeRO gives each rank a flat piece of "
            "them: choose one that works element by element, or give it a stepper of its own as "
            "runtime/engine/muon.py is one"
        )


def make_steps(
    optimizer: torch.optim.Optimizer, weights: list, grads: list
) -> list[torch.Tensor]:
    """Return what some steps of a copy of this optimizer make of tensors. grads: (steps, n) each.

    Raises UserError for a state that can't be sharded.
    """
    params = [torch.nn.Parameter(tensor.clone()) for tensor in weights]
    trial = copy.copy(optimizer)
    trial.state = defaultdict(dict)
    options = {**optimizer.param_groups[0], "lr": TEST_LR, "params": params}
    if options.get("fused"):
        options["fused"] = None  # PyTorch chooses
    trial.param_groups = [options]
    for step in range(TEST_STEPS):
        for param, grad in zip(params, grads):
            param.grad = grad[step].clone()
        trial.step()

    for param in params:
        for key, value in trial.state[param].items():
            is_number = isinstance(value, int | float)
            is_tensor = torch.is_tensor(value) and value.numel() in (1, param.numel())
            if not is_number and not is_tensor:
                raise UserError(
                    f"the optimizer {type(optimizer).__name__} keeps '{key}', which is neither a "
                    "number nor a tensor like the weights, so ZeRO can't shard it: choose another"
                )
    return [param.detach() for param in params]


@torch.no_grad()
def step_by_itself(optimizer: torch.optim.Optimizer, shards: Sequence[Shard], clip: Clip) -> None:
    """Make a step of an optimizer's own step(), unless the norm is too large, and clear the gradients.

    shards: of all parameter groups; the optimizer's state belongs to their master weights. The CPU
    waits for the norm.
    """
    if clip.applies():
        factor = clip.factor()
        params_of_group = defaultdict(list)
        for shard in shards:
            params_of_group[shard.group].append(shard.master)
            grads = shard.grads * factor
            shard.master.grad = grads.to(shard.master.device)

        # At ZeRO-3, DeepSpeed keeps the parameter lists of the groups empty between two steps
        kept = [group["params"] for group in optimizer.param_groups]
        for i, group in enumerate(optimizer.param_groups):
            group["params"] = params_of_group[i]
        with torch.enable_grad():
            optimizer.step()
        for group, params in zip(optimizer.param_groups, kept, strict=True):
            group["params"] = params

        for shard in shards:
            shard.master.grad = None
            shard.half.copy_(shard.master)
    for shard in shards:
        shard.grads.zero_()
