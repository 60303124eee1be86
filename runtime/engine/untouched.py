"""Notice what a training loop changes behind the optimizer's back.

ZeRO's optimizer has fp32 weights of its own. A step overwrites whatever else has changed the
weights that forward and backward use, and it also steps parameters that were frozen after the
start. Plain PyTorch would use both, so both are refused.
"""

from collections.abc import Iterable

from torch import Tensor, nn

from runtime.errors import UserError

PIECE = 2**24  # elements that are compared at a time


class Untouched:
    """Watches the parameters of a model between optimizer steps."""

    def __init__(self, module: nn.Module) -> None:
        self.named = list(module.named_parameters())
        self.accept()

    def accept(self) -> None:
        """Take the parameters as they are: call this after each optimizer step."""
        self.trained = [param.requires_grad for _, param in self.named]
        self.versions = [param._version for _, param in self.named]

    def check(self) -> None:
        """Raise UserError if a parameter has changed. PyTorch counts changes in place, but not
        those of param.data."""
        for (name, param), was_trained, version in zip(
            self.named, self.trained, self.versions, strict=True
        ):
            if param.requires_grad != was_trained:
                raise UserError(
                    f"requires_grad of {name} has changed while training, which ZeRO can't follow: "
                    "set it before the optimizer is made, or end the run and start another with "
                    "--init_from=OUT_DIR"
                )
            if param._version != version:
                raise UserError(changed(name))


def check_values(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Raise UserError unless the weights in use are those of the optimizer, rounded to their dtype.

    pairs: (weights in use, the optimizer's), flat. This finds changes of param.data, too. It reads
    all weights and waits for the GPU, so call it in the first steps alone.
    """
    differ = None
    for used, master in pairs:
        for part, own in zip(used.split(PIECE), master.detach().split(PIECE), strict=True):
            # As a step rounds them. NaN isn't equal to itself, but has not changed
            rounded = own.to(part.dtype).to(part.device)
            both_nan = part.isnan() & rounded.isnan()
            new = ((part != rounded) & ~both_nan).any()
            differ = new if differ is None else differ | new
    if differ is not None and differ.item():
        raise UserError(changed("the model"))


def changed(what: str) -> str:
    """Return the sentence for weights that something else has changed."""
    return (
        f"the weights of {what} were changed outside of the optimizer, and ZeRO would overwrite "
        "them with its own fp32 copy: change them before the engine is made, or in an optimizer's "
        "own step()"
    )
