"""Find edits of model.py that the kernels don't know: an edited model has to train and sample as edited."""

import functools
import operator
from types import ModuleType

import torch

import model
from runtime import loss
from runtime.source_hash import function_hash

IMPLEMENTED = {  # what block.py and decode.py replace or rely on in model.py, and its source_hash
    "QKVLinear.forward": "b73bfcc6", "CausalSelfAttention.__init__": "d8646e2f", "MLP.__init__": "f11e142b",
    "CausalSelfAttention.forward": "4fc9451d", "MLP.forward": "a3fd2710", "Block.__init__": "f2ece15f",
    "Block.forward": "bb74cd6c", "Block.forward_uncached": "8efc9ca1", "Block.attn_and_mlp": "799df9a5",
    "LMHead.logits": "d72b48d0", "LMHead.forward": "ee389ce5", "GPT.__init__": "5c2047eb", "GPT.forward": "c719c093"}


# Also part of a micro-step, in runtime/loss.py. A CUDA graph repeats what Python did while it was
# captured
CAPTURED = {
    "cross_entropy_with_grad": "0052c8f5",
    "addmm_fp32": "d6c36f6b",
    "chunked_loss": "636ea2f4",
    "FusedLinearCrossEntropy.forward": "d063735f",
    "FusedLinearCrossEntropy.backward": "fe733a14",
}
CLASSES = {"QKVLinear", "CausalSelfAttention", "MLP", "Block", "LMHead", "GPT"}  # model.py's modules


def source_hash(name: str, module: ModuleType | None = None) -> str | None:
    """Return function_hash() of a function of model.py, or of another module, or None if it is
    gone."""
    try:
        function = operator.attrgetter(name)(module or model)
    except AttributeError:
        return None
    return function_hash(function)


def forward_is_ours(gpt: torch.nn.Module) -> bool:
    """Return whether a model's forward is GPT.forward as in model.py: it calls each block once."""
    if "forward" in vars(gpt):
        return False
    return function_hash(type(gpt).forward) == IMPLEMENTED["GPT.forward"]


@functools.cache
def edited_functions():
    """Return the names of the functions that aren't in model.py as the kernels implement them."""
    return [name for name, known in IMPLEMENTED.items() if source_hash(name) != known]


def varying_part(gpt: torch.nn.Module) -> str | None:
    """Return why a micro-step of this model may differ from the one before it, or None.

    In a function that somebody has edited, Python may choose by the data or by random numbers. Call
    this before DeepSpeed or our kernels change the model.
    """
    edited = edited_functions()
    if source_hash("LMHead.losses") != loss.IMPLEMENTED["losses"]:
        edited = [*edited, "LMHead.losses"]
    for name, known in CAPTURED.items():
        if source_hash(name, loss) != known:
            edited = [*edited, name]
    if edited:
        return f"model.py was edited ({', '.join(edited)})"
    for name, module in gpt.named_modules():
        kind = type(module)
        is_ours = kind.__module__ == "runtime.lora"
        is_ours = is_ours or (kind.__module__ == model.__name__ and kind.__name__ in CLASSES)
        is_pytorchs = kind.__module__.startswith("torch.nn.")
        if not is_ours and not is_pytorchs:
            return f"{name or 'the model'} is of the class {kind.__name__}, which is not one of model.py"
        if "forward" in vars(module):
            return f"the forward of {name or 'the model'} was replaced"
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        hooks += [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]
        if any(getattr(hook, "__module__", None) != "runtime.lora" for hook in hooks):
            return f"{name or 'the model'} has hooks"
    return None
