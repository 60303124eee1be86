"""Checks of what a model holds: initial weights, buffers, and which modules share a parameter."""

from collections import defaultdict

import torch

from runtime.check.tiny import Different, Tiny, gradients, set_seed, tokens
from runtime.model_parts import (
    check_extra_state,
    persistent_buffers,
    tensors_of,
    ties_of,
    without_memory,
)
from runtime.output import counted


def initial_weights(tiny: Tiny) -> str:
    """Check that initial weights are finite, and the same for a seed, as all ranks need."""
    first = tiny.model(seed=1)
    second = tiny.model(seed=1)
    others = dict(second.named_parameters())
    for name, param in first.named_parameters():
        where = f"{type(first).__name__}.init_weights and the __init__ of its module"
        if not param.isfinite().all():
            raise Different(f"the initial {name} is not finite: look at {where}")
        if not torch.equal(param, others[name]):
            raise Different(
                f"the initial {name} is not the same for the same seed, and each rank draws its "
                f"own: look at {where}, which have to draw from PyTorch's generator"
            )
    return "initial weights are finite, and the same for a seed"


def kept_buffers(tiny: Tiny) -> str:
    """Check that a checkpoint would have every buffer that training changes or chance has made."""
    # The buffers that are made anew, and those of another seed
    model = tiny.model(seed=1).train()
    check_extra_state(model)
    saved = persistent_buffers(model)
    made = {name: buffer.clone() for name, buffer in model.named_buffers() if name not in saved}
    other = dict(tiny.model(seed=2).named_buffers())
    for name, buffer in made.items():
        if not torch.equal(buffer, other[name]):
            raise Different(
                f"the buffer {name} is drawn at random and isn't saved, so a checkpoint is read "
                "with another one: register it with persistent=True"
            )
    set_seed(0)

    # And after a training step
    loss = model(tokens(), tokens(seed=1))
    gradients(model, loss)
    after = dict(model.named_buffers())
    for name, buffer in made.items():
        if not torch.equal(buffer, after[name]):
            raise Different(
                f"training changes the buffer {name}, which isn't saved, so a resume would begin "
                "with its first value: register it with persistent=True"
            )
    if not after:
        return "the model has no buffers"
    return f"{counted(len(saved), 'buffer')} saved, and {len(made)} made anew with the same values"


def shared_parameters(tiny: Tiny) -> str:
    """Check that modules share parameters as objects, also in a model that is made to be loaded."""
    model = tiny.model()
    # Two parameters with the same memory
    names_of = defaultdict(list)
    for name, param in model.named_parameters():
        names_of[param.untyped_storage().data_ptr()].append(name)
    for names in names_of.values():
        if len(names) > 1:
            raise Different(
                f"{' and '.join(names)} share memory but are two parameters, and each is trained "
                "and loaded by itself: share the parameter, as self.b.weight = self.a.weight does"
            )

    # Does loading keep what is shared?
    loaded = without_memory(lambda: tiny.model())
    lost = tensors_of(model).differences(tensors_of(loaded))
    if lost:
        raise Different(
            f"a model that is made to load a checkpoint has other tensors ({', '.join(lost[:3])}): "
            f"{type(model).__name__}.__init__ may not depend on the values or the device of "
            "parameters"
        )
    ties = [" is ".join(group) for group in ties_of(model)]
    if not ties:
        return "no parameter has two names, also after loading"
    shown = "; ".join(ties[:2])
    return f"parameters with several names stay one when loaded: {shown}"
