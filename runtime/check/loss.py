"""Checks of a model's gradients: of the loss in chunks, of functions with a backward of their own,
and with recomputed activations."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import runtime.loss
from runtime.check.tiny import (
    Different,
    Tiny,
    Unchecked,
    describe_error,
    differing,
    gradients,
    owner_of,
    set_seed,
    tokens,
)

ROWS = 13  # of the head's input
CHUNK = 5  # so there are three, the last of which is shorter
STEP = 1e-5  # of a numeric derivative, in float64


@contextmanager
def small_chunks() -> Iterator[None]:
    """Let the loss take CHUNK rows at a time."""
    rows = runtime.loss.EAGER_LOSS_CHUNK
    runtime.loss.EAGER_LOSS_CHUNK = CHUNK
    try:
        yield
    finally:
        runtime.loss.EAGER_LOSS_CHUNK = rows


@contextmanager
def by_autograd(head: nn.Module) -> Iterator[None]:
    """Let "none" of a head be plain PyTorch: chunked_loss() leaves a head with losses of its own to
    autograd, and one chunk has all rows."""
    head.losses = head.losses
    try:
        yield
    finally:
        del head.losses


def loss_in_chunks(tiny: Tiny) -> str:
    """Check the loss and its gradients, a chunk at a time, against autograd over all rows."""
    # A head with losses of its own, and some targets that don't count
    model = tiny.stirred()
    head = getattr(model, "lm_head", None)
    if not hasattr(head, "losses"):
        raise Unchecked("lm_head has no losses(), so autograd computes all gradients")
    name = type(head).__name__
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, ROWS, tiny.config.n_embd, generator=generator, requires_grad=True)
    targets = tokens(seed=1, rows=1, length=ROWS)
    targets[0, ::4] = -1

    # Over all rows at once, by autograd
    with by_autograd(head):
        set_seed(0)
        losses = head(x, targets, "none").flatten()
        wanted_loss = losses.sum() / (targets >= 0).sum()
        wanted = gradients_of_head(head, x, wanted_loss)

    # A chunk at a time, as a run computes it
    with small_chunks():
        set_seed(0)
        each = head(x, targets, "none").flatten()
        loss = head(x, targets)
        found = gradients_of_head(head, x, loss)

    # First the loss, because wrong losses have wrong gradients
    same_mean = torch.allclose(loss, wanted_loss, rtol=1e-5)
    if not same_mean or not torch.allclose(each, losses, atol=1e-5):
        raise Different(
            "the loss in chunks is not the loss over all rows: what "
            f"{name}.losses returns for a row may not depend on the other rows"
        )
    wrong = differing(found, wanted)
    if wrong:
        raise Different(
            f"the gradient of {wrong} is not autograd's over full logits: look at {name}.losses, "
            "and at runtime/loss.py, which sums the gradients of chunks"
        )
    by_hand = runtime.loss.head_is_ours(head)
    kind = "written by hand" if by_hand else "of autograd in chunks"
    return f"loss and gradients, {kind}, are those over full logits"


def loss_of_some_targets(tiny: Tiny) -> str:
    """Check that the loss of a model of others is a mean over the targets that aren't -1: then the
    means of two parts of the targets, times their numbers, make up that of all."""
    model = tiny.stirred()
    name = f"{type(model).__name__}.forward"
    idx = tokens()
    targets = tokens(seed=1)
    # The losses of two parts of the targets
    is_first = torch.arange(targets.numel()).view_as(targets) % 3 == 0
    total = torch.zeros(())
    for chosen in (is_first, ~is_first):
        set_seed(0)
        try:
            loss = model(idx, torch.where(chosen, targets, -1))
        except Exception as error:  # such as an index out of range
            raise Different(
                f"with targets of -1, which don't count, {name} raises {describe_error(error)}: "
                "give its cross-entropy ignore_index=-1, or train on data without a loss mask"
            ) from None
        total = total + loss * chosen.sum()
    set_seed(0)

    # And that of all of them
    whole = model(idx, targets) * targets.numel()
    if not torch.allclose(total, whole, rtol=1e-4):
        raise Different(
            f"the loss of {name} is not a mean over the targets that aren't -1: give its "
            "cross-entropy ignore_index=-1, or train on data without a loss mask"
        )
    return "the loss is a mean over the targets that aren't -1"


def gradients_of_head(head: nn.Module, x: Tensor, loss: Tensor) -> dict[str, Tensor]:
    """Return the gradients of the head's parameters, and of its input x."""
    # The input has a gradient, too: the blocks' backward begins with it
    tensors = {"its input": x}
    for name, param in head.named_parameters():
        if param.requires_grad:
            tensors[name] = param
    found = torch.autograd.grad(loss, list(tensors.values()), allow_unused=True)
    grads = {}
    for (name, tensor), grad in zip(tensors.items(), found, strict=True):
        grads[name] = torch.zeros_like(tensor) if grad is None else grad
    return grads


def own_backwards(tiny: Tiny) -> str:
    """Check autograd.Functions of model.py: their gradients against differences of the loss."""
    # Inputs and targets that stay the same, and so does dropout
    model = tiny.stirred()
    idx = tokens()
    targets = tokens(seed=1).flatten()

    def loss() -> Tensor:
        set_seed(0)
        return F.cross_entropy(model(idx).flatten(0, 1), targets)

    functions = functions_of(loss())
    if not functions:
        return "the model has no autograd.Function of its own, so all gradients are autograd's"

    # In float64, where a difference of two losses keeps enough digits
    model.double()
    names = ", ".join(sorted(functions))
    grads = gradients(model, loss())
    params = dict(model.named_parameters())

    # Along its own gradient, the loss has to rise by the gradient's norm
    for name, grad in grads.items():
        norm = grad.norm()
        direction = grad / norm if norm > 0 else F.normalize(torch.ones_like(grad).flatten(), dim=0)
        direction = direction.view_as(grad)
        with torch.no_grad():
            params[name] += STEP * direction
            after = loss()
            params[name] -= 2 * STEP * direction
            before = loss()
            params[name] += STEP * direction
        slope = (after - before) / (2 * STEP)
        wanted = (grad * direction).sum()
        if not (slope - wanted).abs() < 1e-3 * wanted.abs() + 1e-6:
            raise Different(
                f"the gradient of {name} is not the derivative of the loss ({wanted.item():.3g} "
                f"along itself, differences give {slope.item():.3g}): look at the backward of "
                f"{names}"
            )
    return f"the gradients through {names} are the derivatives of the loss"


def functions_of(loss: Tensor) -> set[str]:
    """Return the names of the autograd.Functions in a loss's graph that are not ours or
    PyTorch's."""
    found = set()
    for node in runtime.loss.graph_nodes(loss):
        function = getattr(type(node), "_forward_cls", None)
        if function is not None and not function.__module__.startswith(("torch.", "runtime.")):
            found.add(function.__name__)
    return found


def recomputed_gradients(tiny: Tiny) -> str:
    """Check that gradient checkpointing changes neither the loss nor the gradients, with
    dropout."""
    # With dropout, where the model has it: the second pass has to draw the same
    changed = {"dropout": 0.1} if hasattr(tiny.config, "dropout") else {}
    results = []
    for recompute in (False, True):
        model = tiny.stirred(**changed).train()
        if not hasattr(model, "gradient_checkpointing"):
            raise Unchecked("the model has no gradient_checkpointing")
        model.gradient_checkpointing = recompute
        set_seed(2)
        loss = model(tokens(), tokens(seed=1))
        results.append((loss, gradients(model, loss)))
    (loss, wanted), (recomputed, found) = results
    where = f"{type(model).__name__}.forward and Block.forward_uncached"
    if not torch.allclose(loss, recomputed, rtol=1e-5):
        raise Different(
            f"the loss with gradient checkpointing is {recomputed.item():.6f} instead of "
            f"{loss.item():.6f}: look at what {where} do with recompute"
        )
    wrong = differing(found, wanted)
    if wrong:
        raise Different(
            f"with gradient checkpointing the gradient of {wrong} differs: look at {where}, and "
            f"whether {owner_of(model, wrong)} computes the same at its second call"
        )
    return "loss and gradients with gradient checkpointing are those without"
