"""State that a model keeps in plain attributes of its modules, which no checkpoint holds.

Forwards set many attributes: an auxiliary loss that another module reads, a figure for the log, a
table. The next forward sets them again, so a resume misses nothing. State is what depends on
earlier forwards, such as a running mean or a counter.
"""

import math
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from runtime.check.tiny import Different, Tiny, differing, gradients, set_seed, tokens
from runtime.kernels.steady_values import PLAIN

STEPS = 2  # before the resume
RTOL = 1e-5
MOST_SHOWN = 2  # names in a sentence
OF_PYTORCH = vars(nn.Module()).keys()

Values = dict[str, list]  # the numbers, texts and tensors in each attribute of a model


@dataclass(frozen=True)
class Lost:
    """The attributes with which a resume begins anew, such as "transformer.h.0.mlp.usage".
    changes_loss: the loss or the gradients of its next step depend on them."""

    names: list[str]
    changes_loss: bool

    def sentence(self) -> str:
        """Return what a resume does with them, and how to save them."""
        shown = ", ".join(self.names[:MOST_SHOWN])
        more = len(self.names) - MOST_SHOWN
        if more > 0:
            shown += f" and {more} more"
        effect = ""
        if self.changes_loss:
            effect = ", and has other losses than a run that never stopped"
        attribute = self.names[0].rpartition(".")[2]
        return (
            f"training changes {shown}, and no checkpoint has plain attributes: unless your loop "
            f"sets them, a resume begins with their first values{effect}; use "
            f'self.register_buffer("{attribute}", torch.tensor(...)), and change it in place'
        )


def kept_attributes(tiny: Tiny) -> str:
    """Check that training changes no attribute that a resume would begin anew."""
    lost = lost_attributes(tiny)
    if lost.names:
        raise Different(lost.sentence())
    return "what training changes is in parameters and buffers"


def lost_attributes(tiny: Tiny) -> Lost:
    """Return what a resume loses.

    It trains a tiny model. Then a new model gets what a checkpoint has of it, and both make the
    next forward.
    """
    # What the steps before the checkpoint change
    trained = tiny.stirred().train()
    first = values_of(trained)
    for step in range(STEPS):
        gradients_of_step(trained, step)
    now = values_of(trained)
    changed = [name for name in now if not are_equal(now[name], first.get(name, []))]
    if not changed:
        return Lost([], False)

    # The next step of the run that goes on, and of two resumes: both miss the same
    saved = {name: tensor.clone() for name, tensor in trained.state_dict().items()}
    grads = gradients_of_step(trained, STEPS)
    wanted = values_of(trained)
    resumed = []
    for _ in range(2):
        model = tiny.stirred().train()
        model.load_state_dict(saved)
        found = gradients_of_step(model, STEPS)
        resumed.append((found, values_of(model)))
    (own_grads, own), (other_grads, other) = resumed

    is_noise = differing(own_grads, other_grads) is not None
    changes_loss = differing(own_grads, grads) is not None and not is_noise

    names = []
    for name in changed:
        value = own.get(name, [])
        goal = wanted.get(name, [])
        if not are_equal(value, other.get(name, [])):  # no state, but such as a time
            continue
        # A list that grows and that no loss depends on is a log, which the loop may empty
        is_log = len(value) != len(goal) and not changes_loss
        if not is_log and not are_equal(value, goal):
            names.append(name)
    return Lost(names, bool(names) and changes_loss)


def gradients_of_step(model: nn.Module, step: int) -> dict[str, Tensor]:
    """Return the gradients and the loss of a step's micro-batch, with its own random numbers."""
    set_seed(step)
    loss = model(tokens(seed=2 * step), tokens(seed=2 * step + 1))
    return {**gradients(model, loss), "loss": loss.detach()}


def values_of(model: nn.Module) -> Values:
    """Return copies of what the attributes of all modules hold, by their names in the model."""
    values = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in OF_PYTORCH:
                values[f"{path}.{name}" if path else f"model.{name}"] = leaves_of(value)
    return values


def leaves_of(value: object) -> list:
    """Return the numbers, texts and tensors in a value. Objects of other kinds are left out."""
    if torch.is_tensor(value):
        return [value.detach().clone()]
    if isinstance(value, torch.Generator):
        return [value.get_state()]
    if isinstance(value, np.ndarray | np.generic):
        return [value.tolist()]
    if isinstance(value, PLAIN):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple | set | deque):
        return [leaf for item in value for leaf in leaves_of(item)]
    return []


def are_equal(first: list, second: list) -> bool:
    """Return whether two attributes hold the same values, up to rounding."""
    if len(first) != len(second):
        return False
    return all(map(are_near, first, second))


def are_near(one: object, other: object) -> bool:
    """Return whether two numbers, texts or tensors are the same, up to rounding."""
    if torch.is_tensor(one) and torch.is_tensor(other):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if not one.is_floating_point():
            return torch.equal(one, other)
        return torch.allclose(one.double(), other.double(), rtol=RTOL, atol=0.0, equal_nan=True)
    if isinstance(one, float) and isinstance(other, float):
        both_nan = math.isnan(one) and math.isnan(other)
        return both_nan or math.isclose(one, other, rel_tol=RTOL)
    return type(one) is type(other) and one == other
