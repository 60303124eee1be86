"""Find what isn't GPT-2 as our kernels know it: an edited model has to train and sample as edited.

What counts is the object in use, not the file that its class is in: the source of the methods that
its class finds, in a copied model.py too, and what was set, swapped or hooked afterwards.
"""

import contextlib
from types import FunctionType

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import sdpa_kernel
from torch.utils.checkpoint import checkpoint

from runtime.hardware import attention_backends
from runtime.source_hash import function_hash

# What our kernels replace or rely on in model.py and runtime/decoder.py, and its function_hash
IMPLEMENTED = {
    "QKVLinear.forward": "b73bfcc6",
    "CausalSelfAttention.forward": "4fc9451d",
    "MLP.forward": "a3fd2710",
    "Block.forward": "bb74cd6c",
    "Block.forward_uncached": "8efc9ca1",
    "Block.attn_and_mlp": "799df9a5",
    "LMHead.logits": "d72b48d0",
    "LMHead.forward": "ee389ce5",
    "GPT.forward": "c719c093",
    "Decoder.forward": "16115f35",
    "KVCache.update": "4494b4e5",
}
# Also part of a micro-step, most of it in runtime/loss.py. A CUDA graph repeats what Python did
# while it was captured
CAPTURED = {
    "LMHead.losses": "626fae18",
    "cross_entropy_with_grad": "0052c8f5",
    "addmm_fp32": "d6c36f6b",
    "chunked_loss": "7020aa55",
    "FusedLinearCrossEntropy.forward": "d063735f",
    "FusedLinearCrossEntropy.backward": "fe733a14",
    "LossByAutograd.forward": "05d87186",
    "LossByAutograd.backward": "d2ae75c0",
    "counted_losses": "f059788c",
    "graph_nodes": "39e62779",
    "check_leaves": "96856d86",
    "scaled": "9fb1fdc3",
    "scale_of": "62ea07b2",
}
MODULES = ("GPT", "Block", "CausalSelfAttention", "QKVLinear", "MLP", "LMHead")
# The same source means something else if one of these names does
GLOBALS = {
    "F": F,
    "attention_backends": attention_backends,
    "checkpoint": checkpoint,
    "contextlib": contextlib,
    "sdpa_kernel": sdpa_kernel,
    "torch": torch,
}
# the modules that define hooks that change nothing
OUR_HOOKS = ("runtime.lora", "runtime.kernels.fp8")


def own_class(module: nn.Module) -> type:
    """Return the class that a module had before block.py replaced it."""
    return getattr(type(module), "own_class", type(module))


def defining_classes(kind: type, name: str) -> list[type]:
    """Return the classes that define an attribute, the one in use first."""
    return [base for base in kind.__mro__ if name in vars(base)]


def is_known(function: object, known: str) -> bool:
    """Return whether a function has this hash, and the names in it mean what they do in
    model.py."""
    if not isinstance(function, FunctionType) or function_hash(function) != known:
        return False
    for name in function.__code__.co_names:
        if name in GLOBALS and function.__globals__.get(name, GLOBALS[name]) is not GLOBALS[name]:
            return False
    return True


def why_not_method(kind: type, name: str, known: str) -> str | None:
    """Return why the method that a class finds isn't the one with this hash, or None."""
    owners = defining_classes(kind, name)
    if not owners:
        return f"{kind.__name__} has no {name}"
    function = vars(owners[0])[name]
    unknown = f"{kind.__name__}.{name} in use is not the original one of model.py"
    if not is_known(function, known):
        return unknown
    # super() has to be PyTorch's
    if "super" in function.__code__.co_names and not is_pytorchs(owners[1]):
        return unknown
    return None


def is_pytorchs(kind: type) -> bool:
    """Return whether a module's class is one of PyTorch's."""
    return kind.__module__.startswith("torch.nn.")


def why_not_methods(kind: type, name: str) -> str | None:
    """Return why the methods that a class finds aren't those of the IMPLEMENTED class, or None."""
    for method, known in IMPLEMENTED.items():
        owner, _, function = method.partition(".")
        if owner == name:
            reason = why_not_method(kind, function, known)
            if reason:
                return reason
    return None


def why_not_class(kind: type, name: str) -> str | None:
    """Return why a class doesn't compute what one of model.py's MODULES does, or None."""
    return why_not_methods(kind, name) or why_not_called(kind)


def why_not_called(kind: type) -> str | None:
    """Return why calling a module of this class isn't nn.Module's way to call forward, or None."""
    for name in ("__call__", "_call_impl", "__getattr__", "__getattribute__"):
        if getattr(kind, name) is not getattr(nn.Module, name):
            return f"{kind.__name__} has a {name} of its own"
    return None


def why_not_module(module: nn.Module, name: str) -> str | None:
    """Return why a module doesn't compute what one of model.py's MODULES does, or None."""
    reason = why_not_class(own_class(module), name)
    if reason:
        return reason
    for method in IMPLEMENTED:
        owner, _, function = method.partition(".")
        if owner == name and function in vars(module):
            return f"the {function} of a {own_class(module).__name__} was replaced"
    return None


def has_hooks(module: nn.Module) -> bool:
    """Return whether calling a module also calls hooks that aren't ours."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    hooks += [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]
    return any(getattr(hook, "__module__", None) not in OUR_HOOKS for hook in hooks)


def has_global_hooks() -> bool:
    """Return whether there are hooks for all modules."""
    module = torch.nn.modules.module
    kinds = ("backward_pre_hooks", "backward_hooks", "forward_pre_hooks", "forward_hooks")
    return any(getattr(module, f"_global_{kind}") for kind in kinds)


def why_not_our_forward(gpt: nn.Module) -> str | None:
    """Return why a model's forward isn't GPT.forward as in model.py, which calls each block once,
    or None."""
    reason = why_not_module(gpt, "GPT")
    if reason:
        return reason
    blocks = getattr(getattr(gpt, "transformer", None), "h", None)
    if type(blocks) is not nn.ModuleList:
        return "transformer.h is not an nn.ModuleList"
    return None


def forward_is_ours(gpt: nn.Module) -> bool:
    """Return whether a model's forward is GPT.forward as in model.py: it calls each block once."""
    return why_not_our_forward(gpt) is None


def name_in_model(kind: type) -> str | None:
    """Return which of model.py's MODULES a class is, judged by its forward, or None."""
    for name in MODULES:
        if why_not_method(kind, "forward", IMPLEMENTED[f"{name}.forward"]) is None:
            return name
    return None


def why_unknown(module: nn.Module) -> str | None:
    """Return why a module isn't one of model.py's MODULES, or None."""
    kind = own_class(module)
    name = name_in_model(kind)
    if name is None:
        return f"{kind.__name__}.forward in use is not the original one of model.py"
    reason = why_not_class(kind, name)
    if reason is None and name == "LMHead":
        unknown = unknown_in_loss(module)
        if unknown:
            reason = f"{unknown} in use is not the original one of model.py"
    return reason


def unknown_in_loss(head: nn.Module) -> str | None:
    """Return which function of the loss isn't ours, or None. head: an LMHead with our forward."""
    if why_not_method(own_class(head), "losses", CAPTURED["LMHead.losses"]):
        return "LMHead.losses"
    # The function that the head's forward finds, in whichever file it lies
    owner = defining_classes(own_class(head), "forward")[0]
    return unknown_in_chunks(owner.forward.__globals__.get("chunked_loss"))


def unknown_in_chunks(chunked_loss: object) -> str | None:
    """Return which function that sums the losses of a head in chunks isn't ours, or None."""
    if not is_known(chunked_loss, CAPTURED["chunked_loss"]):
        return "chunked_loss"
    for path, known in CAPTURED.items():
        name, _, method = path.partition(".")
        if name == "LMHead":
            continue
        function = chunked_loss.__globals__.get(name)
        if method:
            function = getattr(function, method, None)
        if not is_known(function, known):
            return path
    return None
