"""Notice what a training loop changes behind the optimizer's back.

ZeRO's optimizer has fp32 weights of its own. A step overwrites whatever else has changed the
weights that forward and backward use. It also steps parameters that were frozen after the start,
and none that were added. Plain PyTorch would use all three, so they are refused.
"""

from collections.abc import Iterable, Mapping

from torch import Tensor, nn
from torch.optim import Optimizer

from runtime.errors import UserError

PIECE = 2**24  # elements that are compared at a time
RESTART = (
    "change it before the optimizer is made, or end the run and start another with "
    "--init_from=OUT_DIR"
)
SAMPLE = 2**16  # elements of a flat tensor that are compared in each step


class Untouched:
    """Watches the parameters of a model, and the groups of its optimizer, between steps."""

    def __init__(self, module: nn.Module, optimizer: Optimizer, keeps_places: bool) -> None:
        """keeps_places: where param.data is not empty between steps, it is always at one place."""
        self.module = module
        self.keeps_places = keeps_places
        self.optimizer = optimizer
        self.named = list(module.named_parameters())
        self.n_groups = len(optimizer.param_groups)
        self.accept_parts()
        self.accept()

    def accept_parts(self) -> None:
        """Take the model's modules and parameters as they are."""
        self.parts: list[Mapping] = []
        for module in self.module.modules():
            self.parts += [module._modules, module._parameters]
        self.held = [tuple(part.values()) for part in self.parts]

    def accept(self) -> None:
        """Take the parameters as they are: call this after each optimizer step."""
        self.trained = [param.requires_grad for _, param in self.named]
        self.versions = [param._version for _, param in self.named]
        self.places = [param.data_ptr() for _, param in self.named]

    def check(self) -> None:
        """Raise UserError if a parameter has changed. PyTorch counts changes in place, but not
        those of param.data."""
        for (name, param), was_trained, version, place in zip(
            self.named, self.trained, self.versions, self.places, strict=True
        ):
            if param.requires_grad != was_trained:
                raise UserError(
                    f"requires_grad of {name} has changed while training, which ZeRO can't follow: "
                    f"{RESTART}"
                )
            if param._version != version:
                raise UserError(changed(name))
            is_moved = param.data_ptr() != place and param.numel() and place
            if self.keeps_places and is_moved:
                raise UserError(
                    f"param.data of {name} was set to another tensor, as model.to() and "
                    "model.half() do, and ZeRO would overwrite it or leave it behind: change it "
                    "before the engine is made"
                )

    def check_parts(self) -> None:
        """Raise UserError if the model has got other parameters, or the optimizer a group."""
        if len(self.optimizer.param_groups) != self.n_groups:
            raise UserError(
                "the optimizer has got a parameter group while training, which ZeRO can't shard: "
                f"{RESTART}"
            )
        if not any(map(differ, self.parts, self.held)):
            return

        # Modules without parameters may change, such as a dropout
        now = list(self.module.named_parameters())
        for (name, param), (_, was) in zip(now, self.named):
            if param is not was:
                raise UserError(other_parameter(name))
        if len(now) != len(self.named):
            raise UserError(other_parameter(max(now, self.named, key=len)[-1][0]))
        self.accept_parts()


def differ(part: Mapping, held: tuple) -> bool:
    """Return whether a module's parts are others than the ones it held."""
    return len(part) != len(held) or any(a is not b for a, b in zip(part.values(), held))


def other_parameter(name: str) -> str:
    """Return the sentence for a parameter that is new, or gone."""
    return (
        f"the parameter {name} was added, replaced or taken out while training, which ZeRO can't "
        f"follow: {RESTART}"
    )


def sample_differs(pairs: Iterable[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Return for each pair whether some of the weights in use aren't those of the optimizer, as
    check_values() looks for in all of them."""
    found = []
    for used, master in pairs:
        # An odd distance, so that the elements aren't of one column of the matrices
        distance = used.numel() // SAMPLE | 1
        part = used[::distance]
        own = master.detach()[::distance].to(part.dtype).to(part.device)
        found.append(((part != own) & (part == part)).any())  # NaN isn't equal to itself
    return found


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
        "own step(), by its param_groups"
    )
