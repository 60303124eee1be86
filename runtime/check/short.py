"""The short checks, which a training run makes before its first step."""

import torch
from torch import nn

from runtime.bring import Adapter
from runtime.check.attributes import kept_attributes
from runtime.check.logits import cached_logits
from runtime.check.loss import loss_in_chunks, loss_of_some_targets, recomputed_gradients
from runtime.check.parts import kept_buffers
from runtime.check.shipped import edited_functions
from runtime.check.tiny import DIFFERS, EQUAL, RAISES, make_check, own_randomness, tiny_of
from runtime.cluster.ranks import print0
from runtime.engine.any_optimizer import is_adamw, optimizer_name
from runtime.errors import UserError

MOST_SHOWN = 3  # names of functions
LONG_FORM = "python doctor.py --model checks all"
NOT_A_MEAN = (
    "the loss of {name}.forward is not a mean over the targets that aren't -1. This data has a "
    "loss mask, so each micro-step counts by its number of targets"
)


def check_before_training(
    model: nn.Module,
    config: object,
    optimizer: torch.optim.Optimizer,
    recomputes: bool,
    masked: bool = False,
) -> None:
    """Check a tiny model of this model's class, unless model and optimizer are as shipped.

    Prints one line. Each rank calls this by itself; it exchanges nothing, and draws no random
    numbers. config: the GPTConfig of the run. recomputes: whether the run uses gradient
    checkpointing. masked: whether only some tokens are targets. Raises UserError if something
    differs. setup.initialize() checks the optimizer.
    """
    edited = edited_functions(model)
    if not edited and is_adamw(optimizer):
        return
    what = f"edited: {shown(edited)}" if edited else f"optimizer {optimizer_name(optimizer)}"
    checks = [
        ("cached logits", cached_logits),
        ("loss", loss_in_chunks),
        ("buffers", kept_buffers),
        ("attributes", kept_attributes),
    ]
    if recomputes:
        checks.append(("recomputing", recomputed_gradients))
    needs_mean = masked and isinstance(model, Adapter)  # a model.py of others
    if masked and edited:
        checks.append(("loss mask", loss_of_some_targets))
    with own_randomness():
        try:
            tiny = tiny_of(type(model), config)
        except UserError as error:  # the run itself may be able to do what a tiny model isn't
            if needs_mean:
                raise
            print0(f"note       the model is not checked ({what}): {error}")
            return
        results = [make_check(name, check, tiny) for name, check in checks]
    for result in results:
        if result.status == DIFFERS and result.name == "loss mask" and not needs_mean:
            # Such as one over two tokens ahead, whose terms have other numbers of targets. It can
            # be trained
            print0(f"note       {NOT_A_MEAN.format(name=type(model).__name__)}")
        elif result.status == DIFFERS and result.name == "attributes":
            print0(f"note       {result.sentence}")  # it trains, and may be meant so
        elif result.status == DIFFERS:
            raise UserError(f"{result.name} ({what}): {result.sentence}; {LONG_FORM}")
    equal = ", ".join(result.name for result in results if result.status == EQUAL)
    line = f"checked    a tiny model ({what}): equal are {equal or 'none'}"
    for result in results:
        if result.status == RAISES:
            line += f"; {result.name} not checked: the tiny model raises {result.sentence}"
        elif result.status not in (EQUAL, DIFFERS):
            line += f"; {result.name} not checked: {result.sentence}"
    print0(line)


def shown(names: list[str]) -> str:
    """Return names as a list to print."""
    more = len(names) - MOST_SHOWN
    return ", ".join(names[:MOST_SHOWN]) + (f" and {more} more" if more > 0 else "")
