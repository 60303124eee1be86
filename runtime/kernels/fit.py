"""Which blocks of a model our kernels fit, for training and for decoding. Each object is looked at.

A fused block is called in one of two ways:

  chained  It takes and returns (residual, branch, bias), and the next layer norm adds them. Only
           GPT.forward as in model.py passes these from block to block.
  closed   It takes and returns a tensor, as Block does. So GPT.forward may be anything: an
           auxiliary loss, a skip connection, a block that runs twice.
"""

from dataclasses import dataclass
from itertools import groupby

from torch import nn

from runtime.kernels import edits

# columns of a row in one program; 8192 in float32 need more shared memory than an A100 has
MAX_WIDTH = 4096
EPS = 1e-5  # of the layer norms

# The parts of a block: of PyTorch's classes, or with the functions of model.py's
PARTS = {
    "ln_1": nn.LayerNorm,
    "attn": "CausalSelfAttention",
    "attn.c_attn": "QKVLinear",
    "attn.c_proj": nn.Linear,
    "attn.resid_dropout": nn.Dropout,
    "ln_2": nn.LayerNorm,
    "mlp": "MLP",
    "mlp.c_fc": nn.Linear,
    "mlp.c_proj": nn.Linear,
    "mlp.dropout": nn.Dropout,
}
WITH_WEIGHTS = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")


@dataclass(frozen=True)
class Fit:
    """Which blocks fit the training kernels. reasons: of each block why not, or None."""

    reasons: tuple[str | None, ...]
    no_chain: str | None  # why the blocks can't be chained

    def fused(self) -> list[int]:
        """Return the numbers of the blocks that fit."""
        return [i for i, reason in enumerate(self.reasons) if reason is None]

    def others(self) -> list[tuple[str, str]]:
        """Return [(blocks such as "0-3, 5", why they don't fit)]."""
        blocks: dict[str, list[int]] = {}
        for i, reason in enumerate(self.reasons):
            if reason is not None:
                blocks.setdefault(reason, []).append(i)
        return [(ranges(numbers), reason) for reason, numbers in blocks.items()]

    def why_none(self) -> str | None:
        """Return why no block fits, or None if one does."""
        if self.fused():
            return None

        # One reason for all blocks needs no numbers
        others = self.others()
        if not others:
            return "the model has no transformer.h"
        if len(others) == 1:
            return others[0][1]
        return "; ".join(f"blocks {blocks}: {reason}" for blocks, reason in others)


def ranges(numbers: list[int]) -> str:
    """Return ascending numbers as text, such as "0-3, 5"."""
    texts = []

    # Neighbors have the same difference between number and place
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        first = members[0]
        last = members[-1]
        texts.append(f"{first}" if first == last else f"{first}-{last}")
    return ", ".join(texts)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a GPT, or []."""
    return list(getattr(getattr(model, "transformer", None), "h", None) or ())


def fit(model: nn.Module) -> Fit:
    """Return which blocks of a model fit the training kernels, and how they can be called."""
    reasons = tuple(why_not_fused(block) for block in blocks_of(model))
    no_chain = None
    if any(reason is not None for reason in reasons):
        no_chain = "some blocks are not fused"
    return Fit(reasons, no_chain or why_not_chained(model))


def why_not_fused(block: nn.Module) -> str | None:
    """Return why the training kernels don't fit a block, or None. Hooks on the block itself fit."""
    if not all(param.requires_grad for param in block.parameters()):
        return "some parameters are frozen"
    reason = why_not_known(block) or why_not_shaped(block)
    if reason:
        return reason

    # The kernels would skip a forward of somebody's own
    if "forward_uncached" in vars(block):
        return "the forward_uncached of a Block was replaced"
    if block._compiled_call_impl is not None:
        return "a block is compiled by its own compile()"

    # The kernels draw no masks
    if block.attn.dropout or block.attn.resid_dropout.p or block.mlp.dropout.p:
        return "they need dropout=0"
    for name in WITH_WEIGHTS:
        reason = why_not_trained(block.get_submodule(name), name)
        if reason:
            return reason
    return None


def why_not_trained(layer: nn.Module, name: str) -> str | None:
    """Return why a layer's gradients can't go where our kernels send them, or None."""
    for param in (layer.weight, layer.bias):
        if not param.requires_grad:
            return "some parameters are frozen"
        if param._backward_hooks or param._post_accumulate_grad_hooks:
            return f"a parameter of {name} has a hook"
    return None


def why_not_known(block: nn.Module) -> str | None:
    """Return why a block and its parts don't compute what model.py's do, or None."""
    if edits.has_global_hooks():
        return "there are hooks for all modules"

    # The block itself, and then each of its parts
    reason = edits.why_not_class(edits.own_class(block), "Block")
    if reason:
        return reason

    # A method that is set on the object hides that of the class
    for method in ("forward", "attn_and_mlp"):
        if method in vars(block):
            return f"the {method} of a Block was replaced"
    for name, kind in PARTS.items():
        reason = why_not_part(block, name, kind)
        if reason:
            return reason
    for name in ("ln_1", "ln_2"):
        if block.get_submodule(name).eps != EPS:
            return f"{name}.eps is {block.get_submodule(name).eps}, not {EPS}"
    if block.mlp.gelu != "tanh":
        return "they need tanh GELU"
    return None


def why_not_part(block: nn.Module, name: str, kind: type | str) -> str | None:
    """Return why a part of a block isn't of this kind, or None. kind: see PARTS."""
    try:
        part = block.get_submodule(name)
    except AttributeError:
        return f"a block has no {name}"
    if isinstance(kind, str):
        reason = edits.why_not_module(part, kind)
        if reason:
            return reason
    elif type(part) is not kind:
        return f"{name} is of the class {type(part).__name__}"
    elif "forward" in vars(part):
        return f"the forward of {name} was replaced"
    if edits.has_hooks(part):
        return f"{name} has hooks"
    if name in WITH_WEIGHTS:
        for parameter in ("weight", "bias"):
            if part._parameters.get(parameter) is None:
                return f"{name} has no {parameter}"
    return None


def hooks_of_parts(block: nn.Module) -> tuple[dict, ...]:
    """Return the dicts that hold the hooks of a block's parts, now and later."""
    hooks = []
    for name in PARTS:
        part = block.get_submodule(name)
        hooks += [
            part._forward_hooks,
            part._forward_pre_hooks,
            part._backward_hooks,
            part._backward_pre_hooks,
        ]
    return tuple(hooks)


def why_not_shaped(block: nn.Module) -> str | None:
    """Return why the parameters of a block with known parts don't have the shapes of GPT-2's, or
    None."""
    # The shapes of GPT-2's block of this width
    C = block.ln_1.weight.numel()
    hidden = block.mlp.c_fc.bias.numel()
    shapes = {
        "ln_1": (C,),
        "attn.c_attn": (3 * C, C),
        "attn.c_proj": (C, C),
        "ln_2": (C,),
        "mlp.c_fc": (hidden, C),
        "mlp.c_proj": (C, hidden),
    }
    for name, shape in shapes.items():
        layer = block.get_submodule(name)
        if layer.weight.shape != shape or layer.bias.shape != shape[:1]:
            return f"{name} has another shape"
        if layer.weight.dtype != block.ln_1.weight.dtype or layer.bias.dtype != layer.weight.dtype:
            return "a block has parameters of several dtypes"
    if block.ln_1.normalized_shape != (C,) or block.ln_2.normalized_shape != (C,):
        return "a layer norm has another shape"

    # What the kernels need of the sizes
    if C % block.attn.n_head:
        return f"attn.n_head={block.attn.n_head} doesn't divide {C}"
    if C > MAX_WIDTH:
        return f"n_embd is above {MAX_WIDTH:,}"
    return None


def why_not_chained(model: nn.Module) -> str | None:
    """Return why fused blocks can't pass (residual, branch, bias) to each other, or None."""
    reason = edits.why_not_our_forward(model)
    if reason:
        return reason

    # Hooks of a block expect one tensor, not three
    if any(edits.has_hooks(block) for block in blocks_of(model)):
        return "a block has hooks"
    ln_f = model.transformer.ln_f
    return why_not_last_norm(model) or why_not_trained(ln_f, "ln_f")


def why_not_last_norm(model: nn.Module) -> str | None:
    """Return why transformer.ln_f isn't a layer norm as the kernels compute it, or None."""
    ln_f = model.transformer.ln_f
    if edits.own_class(ln_f) is not nn.LayerNorm or "forward" in vars(ln_f):
        return "ln_f is not PyTorch's LayerNorm"
    if edits.has_hooks(ln_f):
        return "ln_f has hooks"
    if ln_f.weight is None or ln_f.bias is None:
        return "ln_f has no weight or no bias"
    if ln_f.eps != EPS:
        return f"ln_f.eps is {ln_f.eps}, not {EPS}"
    width = model.transformer.h[0].ln_1.weight.numel()
    if (
        ln_f.normalized_shape != (width,)
        or ln_f.bias.dtype != model.transformer.h[0].ln_1.bias.dtype
    ):
        return "ln_f has another shape or dtype"
    return None


def why_not_decoded(model: nn.Module) -> str | None:
    """Return why the decoding kernels don't compute what a model's Decoder and forward do, or
    None."""
    reason = edits.why_not_our_forward(model) or edits.why_not_module(model.lm_head, "LMHead")
    reason = reason or why_not_decoder(model)
    if reason:
        return reason
    for block in blocks_of(model):
        reason = why_not_known(block) or why_not_shaped(block)
        if reason:
            return reason
        if edits.has_hooks(block):
            return "a block has hooks"
    return why_not_last_norm(model) or why_not_around(model)


def why_not_decoder(model: nn.Module) -> str | None:
    """Return why the Decoder that a model's generate() uses isn't ours, or None."""
    for owner in edits.defining_classes(type(model), "generate"):
        function = vars(owner)["generate"]
        function = getattr(function, "__wrapped__", function)  # in torch.no_grad()
        decoder = getattr(function, "__globals__", {}).get("Decoder")
        if decoder is not None:
            # The cache that this Decoder makes
            cache = decoder.__init__.__globals__.get("KVCache", object)
            return edits.why_not_methods(decoder, "Decoder") or edits.why_not_methods(
                cache, "KVCache"
            )
    return "its generate() has no Decoder"


def why_not_around(model: nn.Module) -> str | None:
    """Return why what a model does besides its blocks isn't what the decoding kernels do, or
    None."""
    transformer = model.transformer
    for name, module in (
        ("the model", model),
        ("transformer.drop", transformer.drop),
        ("lm_head", model.lm_head),
    ):
        if edits.has_hooks(module):
            return f"{name} has hooks"
    if type(transformer.drop) is not nn.Dropout or "forward" in vars(transformer.drop):
        return "transformer.drop is not PyTorch's Dropout"

    # Dropout may be set, as long as it isn't on
    dropout = transformer.drop.p
    for block in transformer.h:
        dropout = max(dropout, block.attn.dropout, block.attn.resid_dropout.p, block.mlp.dropout.p)
    if dropout and any(module.training for module in model.modules()):
        return "dropout is on"

    # All blocks have the heads and the width of the configuration
    C = model.config.n_embd
    for block in transformer.h:
        if block.attn.n_head != model.config.n_head or block.ln_1.weight.numel() != C:
            return "a block has another number of heads or another width"
        if block.mlp.c_fc.bias.numel() != 4 * C:
            return "mlp.c_fc has another shape"
    if (
        model.lm_head.weight.shape[1] != C
        or model.lm_head.weight.dtype != transformer.ln_f.weight.dtype
    ):
        return "lm_head has another shape or dtype"
    return None


def why_changed(model: nn.Module) -> str | None:
    """Return why blocks that run on the kernels no longer fit, as one line, or None.

    Somebody may swap a part or add a hook after setup.compile_blocks.
    """
    for i, block in enumerate(blocks_of(model)):
        if edits.own_class(block) is type(block):
            continue
        reason = why_not_fused(block)
        if reason is None and block.chained:
            reason = why_not_chained(model)
        if reason:
            return (
                f"transformer.h.{i} was changed after setup.compile_blocks ({reason}): change it "
                "before"
            )
    return None
