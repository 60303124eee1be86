"""Optimizers that this project does not implement: they are stepped by their own step().

ZeRO gives each rank a flat piece of all weights. So an optimizer has to work element by element:
what it does to an element may not depend on the others. check_elementwise() proves that on small
tensors before training. This file knows nothing about DeepSpeed.
"""

import copy
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from runtime.engine.clip import Clip
from runtime.engine.muon import is_muon
from runtime.engine.shard import Shard
from runtime.errors import UserError

# Options of torch.optim.AdamW that our steppers don't have: with one of them, its own step() runs
ADAMW_OPTIONS = ("amsgrad", "maximize", "differentiable")
TEST_SHAPE = (4, 6)
TEST_PIECES = (5, 7, 12)  # elements
TEST_STEPS = 101  # some change what they do after a number of steps
TEST_LR = 1e-2
# Attributes that PyTorch's optimizers and schedulers change, and that mean nothing to a resume
OF_PYTORCH = ("_step_count", "_opt_called", "_warned_capturable_if_run_uncaptured")
CHOOSE = (
    "choose one that works element by element, or give it a stepper of its own as "
    "runtime/engine/muon.py is one"
)


def is_adamw(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether our steppers can step this optimizer: PyTorch's AdamW, or DeepSpeed's on the
    CPU, with options that they implement. Muon's groups are in such an AdamW, too."""
    kind = type(optimizer)
    is_cpu_adam = kind.__name__ == "DeepSpeedCPUAdam" and kind.__module__.startswith("deepspeed.")

    # A subclass may compute something else, so the class has to be just this one
    if kind is not torch.optim.AdamW and not is_cpu_adam:
        return False
    if is_cpu_adam and not optimizer.adam_w_mode:
        return False
    return not beyond_our_adamw(optimizer)


def beyond_our_adamw(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return what an AdamW has that our steppers don't implement, as text."""
    groups = optimizer.param_groups
    found = []
    for option in ADAMW_OPTIONS:
        if any(group.get(option) for group in groups):
            found.append(option)
    if not all(group.get("decoupled_weight_decay", True) for group in groups):  # as in Adam
        found.append("decoupled_weight_decay=False")

    # What a user has attached to step() would not run in the fused step
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        found.append("a hook on step()")
    if has_own_step(optimizer):
        found.append("another step()")
    return found


def has_own_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step() was set on the object. That of PyTorch's schedulers calls the class'
    own, and only notes that it did."""
    return "step" in vars(optimizer) and not has_scheduler(optimizer)


def has_scheduler(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether one of torch.optim.lr_scheduler was made for the optimizer."""
    return hasattr(vars(optimizer).get("step"), "_wrapped_by_lr_sched")


def satisfy_scheduler(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer has a scheduler. If so, keep it from warning that step() was not
    called: our kernels step the optimizer, which a scheduler doesn't notice."""
    if not has_scheduler(optimizer):
        return False
    vars(optimizer)["_opt_called"] = True
    return True


def describe_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """Return an optimizer for a sentence: its class, and if it is an AdamW that is_adamw()
    refuses, why."""
    name = type(optimizer).__name__
    if type(optimizer) is torch.optim.AdamW and not is_adamw(optimizer):
        name += f" with {' and '.join(beyond_our_adamw(optimizer))}"
    return name


def keep_rates_of_groups(optimizer: torch.optim.Optimizer) -> None:
    """Give each group with a learning rate of its own its "lr_ratio", as Muon's groups have one.

    The training loop sets the rate of every group in each step: that of the schedule, times
    lr_ratio. A group of Muon's with a rate of its own has both ratios. Raises UserError if an
    optimizer whose own rate is 0 has such a group.
    """
    usual = optimizer.defaults.get("lr")
    for group in optimizer.param_groups:
        # Nothing to do if the user has given the ratio, or the rate is that of all
        is_given = "lr_ratio" in group and not is_muon(group)
        if is_given or group["lr"] == usual:
            continue
        if not usual:
            raise UserError(
                f"a parameter group has the learning rate {float(group['lr']):g} and the optimizer "
                f"has {usual}, so their ratio isn't defined: give the group an lr_ratio"
            )

        # The schedule multiplies by this ratio in each step
        own_ratio = float(group["lr"]) / float(usual)
        group["lr_ratio"] = own_ratio * group.get("lr_ratio", 1)


def optimizer_name(optimizer: torch.optim.Optimizer) -> str:
    """Return the name that a tag records: an optimizer's state means nothing to another one."""
    if is_adamw(optimizer):
        return "AdamW"
    options = [name for name in ADAMW_OPTIONS if optimizer.param_groups[0].get(name)]
    return "+".join([type(optimizer).__name__, *options])


def check_elementwise(
    optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter] = ()
) -> None:
    """Raise UserError unless an optimizer's step() can run on ZeRO's flat pieces of the weights.

    It has to give the same weights for a matrix, for the flat matrix and for pieces of it. All that
    it keeps from step to step has to be in its state of each parameter: numbers, and tensors like
    the weights. And it may not read what the user has set on params, because the pieces don't have
    it. params: those of the model.
    """
    name = type(optimizer).__name__
    check_own_step(optimizer)
    versions = [param._version for param in params]

    # Small random weights and gradients, the same on all ranks
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(TEST_SHAPE, generator=generator)
    grads = torch.randn(TEST_STEPS, *TEST_SHAPE, generator=generator)
    flat = weights.flatten()
    flat_grads = grads.flatten(1)
    for group in optimizer.param_groups:
        try:
            # The same steps on the matrix, on the flat matrix, and on pieces of it, each of which
            # has an optimizer of its own, as on its rank
            matrix = make_steps(optimizer, group, weights, grads)
            whole = make_steps(optimizer, group, flat, flat_grads)
            pieces = []
            parts = zip(flat.split(TEST_PIECES), flat_grads.split(TEST_PIECES, dim=1), strict=True)
            for piece, piece_grads in parts:
                pieces.append(make_steps(optimizer, group, piece, piece_grads).weights)
        except UserError:
            raise
        except Exception as error:  # whatever a step() that wants something else raises
            why = str(error).splitlines()[0] if str(error) else ""
            raise UserError(
                f"the optimizer {name} can't be stepped on flat tensors ({type(error).__name__}: "
                f"{why}): {CHOOSE}"
            ) from None

        # Are they the same?
        check_moved(name, flat, whole.weights)
        if not torch.allclose(whole.weights, torch.cat(pieces), rtol=1e-6, atol=1e-8):
            check_repeats(optimizer, group, flat, flat_grads)
            raise UserError(
                f"the optimizer {name} needs whole tensors, but ZeRO gives each rank a flat piece "
                f"of them: {CHOOSE}"
            )
        if not torch.allclose(whole.weights, matrix.weights.flatten(), rtol=1e-6, atol=1e-8):
            raise UserError(
                f"the optimizer {name} treats matrices differently from vectors, but ZeRO's pieces "
                "of the weights are vectors: give what differs to parameter groups, as "
                "GPT.parameter_groups in model.py does"
            )
        check_attributes(name, matrix.read | whole.read, params)
    check_own_keys(optimizer, params)
    if versions != [param._version for param in params]:
        raise UserError(
            f"step() of the optimizer {name}, or a hook on it, changes the weights of the model, "
            "and ZeRO would overwrite them with its own fp32 copy: let step() change the "
            "parameters in its param_groups alone"
        )


def check_own_step(optimizer: torch.optim.Optimizer) -> None:
    """Raise UserError if the object has another step() than its class."""
    if has_own_step(optimizer):
        raise UserError(
            f"the optimizer {type(optimizer).__name__} has a step() that was set on the object, "
            "which can't be tried on small tensors before training: make a class with this step()"
        )


def check_own_keys(optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter]) -> None:
    """Raise UserError if an optimizer has the model's parameters in an attribute of its own."""
    of_model = {id(param) for param in params}
    for attribute, value in vars(optimizer).items():
        if attribute == "param_groups" or not isinstance(value, dict | list | set | tuple):
            continue
        ids = {item if isinstance(item, int) else id(item) for item in value if is_key(item)}
        if ids & of_model:
            raise UserError(
                f"the optimizer {type(optimizer).__name__} has parameters of the model in its "
                f"attribute '{attribute}', and it would step ZeRO's flat pieces of them, which "
                "aren't there: make a parameter group for each value, and let step() read the group"
            )


def is_key(item: object) -> bool:
    """Return whether this may stand for a parameter: the parameter, or its id."""
    return isinstance(item, nn.Parameter | int)


def check_state(optimizer: torch.optim.Optimizer) -> None:
    """Raise UserError if an optimizer has a state before ZeRO has made its pieces."""
    if optimizer.state:
        raise UserError(
            f"the optimizer {type(optimizer).__name__} has a state before the first step, for the "
            "model's parameters, and ZeRO steps flat pieces of them: make the state in step(), as "
            "Adam does, and load an earlier one by --init_from=resume"
        )


def check_moved(name: str, before: Tensor, after: Tensor) -> None:
    """Raise UserError if an optimizer's steps have not changed the parameters of its groups."""
    if torch.equal(before, after):
        raise UserError(
            f"step() of the optimizer {name} doesn't change the parameters in its param_groups, "
            "which ZeRO replaces by flat pieces: let it take them from there, at each step"
        )


def check_repeats(
    optimizer: torch.optim.Optimizer, group: dict, weights: Tensor, grads: Tensor
) -> None:
    """Raise UserError if the same steps give other weights each time, as with random numbers.

    weights: flat. grads: of all steps.
    """
    # The third time with another seed
    ended = []
    with torch.random.fork_rng(devices=[]):
        for seed in (0, 0, 1):
            torch.default_generator.manual_seed(seed)
            ended.append(make_steps(optimizer, group, weights, grads).weights)

    first, again, of_another_seed = ended
    name = type(optimizer).__name__
    alone = "leave that out, or give it a stepper of its own as runtime/engine/muon.py is one"
    if not torch.equal(first, again):  # a generator of its own, or Python's
        raise UserError(
            f"the optimizer {name} steps the same weights with the same gradients differently each "
            "time, as with random numbers or with what it keeps outside of self.state[p], and no "
            f"resume could repeat that: {alone}"
        )
    if not torch.equal(first, of_another_seed):
        raise UserError(
            f"the optimizer {name} draws random numbers in its step(), and each rank would draw "
            "its own for ZeRO's pieces of the weights, so no resume on other ranks could repeat "
            f"them: {alone}"
        )


def check_attributes(name: str, read: set[str], params: Sequence[nn.Parameter]) -> None:
    """Raise UserError if an optimizer reads an attribute that the user has set on a parameter."""
    for param in params:
        for attribute in sorted(read & vars(param).keys()):
            raise UserError(
                f"the optimizer {name} reads {attribute} of the parameters, and ZeRO's flat pieces "
                "of the weights don't have it: make a parameter group for each value, and let "
                "step() read the group"
            )


class TestWeights(nn.Parameter):
    """A parameter that notes which attributes are read that it doesn't have."""

    def __getattr__(self, attribute: str) -> object:
        vars(self).setdefault("_read", set()).add(attribute)
        raise AttributeError(attribute)


class Stepped(NamedTuple):
    """What some steps have made of weights, and the attributes that they read in vain."""

    weights: Tensor
    read: set[str]


def make_steps(
    optimizer: torch.optim.Optimizer,
    group: dict,
    weights: Tensor,
    grads: Tensor,
) -> Stepped:
    """Make some steps of a copy of this optimizer, with the options of one of its groups.

    grads: of all steps, stacked. Raises UserError for what can't be sharded or saved.
    """
    # The trial leaves the user's optimizer and weights as they are
    param = TestWeights(weights.clone())
    trial = copy_of(optimizer)
    options = {**group, "lr": TEST_LR, "params": [param]}

    # These are meant for GPUs, and the trial runs on the CPU
    for on_gpus in ("fused", "capturable"):
        if options.get(on_gpus):
            options[on_gpus] = None  # PyTorch chooses
    trial.param_groups = [options]

    # Steps, with a watch over what the optimizer keeps besides its state
    attributes = values_of(vars(trial))
    values = values_of(options)
    for step in range(TEST_STEPS):
        param.grad = grads[step].clone()
        trial.step()

    name = type(optimizer).__name__
    check_kept(name, "the attribute", attributes, values_of(vars(trial)))
    check_kept(name, "the parameter group's", values, values_of(options))
    # What it keeps has to be shardable
    for key, value in trial.state[param].items():
        is_number = isinstance(value, int | float)
        is_tensor = torch.is_tensor(value) and value.numel() in (1, param.numel())
        if not is_number and not is_tensor:
            raise UserError(
                f"the optimizer {name} needs whole tensors: it keeps '{key}', which is neither "
                f"a number nor a tensor like the weights, so ZeRO can't shard it: {CHOOSE}"
            )
    return Stepped(param.detach(), set(vars(param).get("_read", ())))


def copy_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return a copy of an optimizer, with an empty state.

    copy.copy() would leave out the attributes of a user's class.
    """
    kind = type(optimizer)
    trial = kind.__new__(kind)
    for name, value in vars(optimizer).items():
        if name == "step":  # a scheduler's, which would step the original
            continue
        is_container = isinstance(value, dict | list | set)
        vars(trial)[name] = copy.copy(value) if is_container else value

    # As torch.optim.Optimizer begins
    trial.state = defaultdict(dict)
    return trial


def values_of(attributes: dict) -> dict:
    """Return what tells whether one of these has changed: its value or version, also in
    containers."""
    values = {}
    for name, value in attributes.items():
        if name in ("state", "param_groups", "params") or name in OF_PYTORCH:
            continue
        values[name] = value_of(value)
    return values


def value_of(value: object) -> object:
    """Return what tells whether a value has changed, or None for an object of another kind."""
    if torch.is_tensor(value):
        return value._version  # PyTorch counts the changes in place
    if isinstance(value, dict):
        return {key: value_of(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [value_of(item) for item in value]
    if isinstance(value, set):
        return set(value)
    if isinstance(value, int | float | str):
        return value
    return None


def check_kept(name: str, where: str, before: dict, after: dict) -> None:
    """Raise UserError if a step has changed values outside of the optimizer's state."""
    for key in after:
        if key not in before or before[key] != after[key]:
            raise UserError(
                f"the optimizer {name} keeps what it has learned in {where} '{key}', which no "
                "checkpoint would have: keep it in self.state[p], for each parameter"
            )


@torch.no_grad()
def step_by_itself(optimizer: torch.optim.Optimizer, shards: Sequence[Shard], clip: Clip) -> None:
    """Make a step of an optimizer's own step(), unless the norm is too large, and clear the
    gradients.

    shards: of all parameter groups; the optimizer's state belongs to their master weights. The CPU
    waits for the norm.
    """
    if clip.applies():
        # Each shard's clipped gradients, where the optimizer looks for them
        factor = clip.factor()
        params_of_group = defaultdict(list)
        for shard in shards:
            params_of_group[shard.group_index].append(shard.master)
            grads = shard.grads * factor
            shard.master.grad = grads.to(shard.master.device)

        # At ZeRO-3, DeepSpeed keeps the parameter lists of the groups empty between two steps
        kept = [group["params"] for group in optimizer.param_groups]
        for i, group in enumerate(optimizer.param_groups):
            group["params"] = params_of_group[i]
        with torch.enable_grad():
            optimizer.step()

        # Give DeepSpeed its lists back
        for group, params in zip(optimizer.param_groups, kept, strict=True):
            group["params"] = params

        for shard in shards:
            shard.master.grad = None
            shard.half.copy_(shard.master)
    for shard in shards:
        shard.grads.zero_()
