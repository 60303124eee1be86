"""LoRA (Hu et al., arXiv:2106.09685): freeze the weights, and train an adapter, two low-rank matrices, for each target
matrix. GPT-2 XL's optimizer state shrinks from 18.7 GB to 0.9 GB at rank 64."""

import math

import torch.nn as nn
import torch.nn.functional as F

from runtime.errors import UserError

TARGET_MODULES = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")  # the matrices of a block
LORA_A, LORA_B = ".lora_A", ".lora_B"  # suffixes of the adapters' parameter names


class LoRALinear(nn.Module):
    """y = W x + b + alpha / rank * B A dropout(x). A (rank, in) and B (out, rank) are trained; B starts at zero."""

    def __init__(self, linear, rank, alpha, dropout):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.lora_A = nn.Parameter(self.weight.new_empty(rank, linear.in_features))
        self.lora_B = nn.Parameter(self.weight.new_zeros(linear.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))  # as in the authors' code and PEFT
        self.scale, self.dropout = alpha / rank, nn.Dropout(dropout)

    def forward(self, x):
        return F.linear(x, self.weight, self.bias) + self.scale * F.linear(
            F.linear(self.dropout(x), self.lora_A), self.lora_B)


def lora_config(settings):
    """Return {"rank", "alpha", "dropout", "target_modules"} of a run with LoRA, or None. Raises UserError."""
    rank, alpha, dropout = settings.lora_rank, settings.lora_alpha, settings.lora_dropout
    modules = list(dict.fromkeys(name.strip() for name in settings.lora_target_modules.split(",") if name.strip()))
    unknown = [name for name in modules if name not in TARGET_MODULES]
    if rank and (unknown or not modules):
        raise UserError(f"lora_target_modules names {', '.join(unknown) or 'nothing'}: choose from a block's "
                        f"matrices, {', '.join(TARGET_MODULES)}")
    lora = {"rank": rank, "alpha": alpha or float(rank), "dropout": dropout, "target_modules": modules}
    return lora if rank else None


def as_options(lora):
    """Return a lora_config() as the options to type."""
    if not lora:
        return "no LoRA"
    return (f"--lora_rank={lora['rank']} --lora_alpha={lora['alpha']} --lora_dropout={lora['dropout']} "
            f"--lora_target_modules='{', '.join(lora['target_modules'])}'")


def apply(model, lora):
    """Freeze a GPT's parameters, and add adapters to its target modules. lora: a lora_config().

    Raises UserError if a target is missing, or if its weight is that of other modules, too."""
    check_targets(model, lora["target_modules"])
    model.requires_grad_(False)
    # ZeRO-3 releases a block's weights when its input's gradient arrives, so the first block's input needs one
    model.transformer.drop.register_forward_hook(lambda layer, given, made: made.requires_grad_())
    for block in model.transformer.h:
        for name in lora["target_modules"]:
            layer = block.get_submodule(name)
            if isinstance(layer, LoRALinear):  # of a module that blocks share
                continue
            holders = [module for module in model.modules() if getattr(module, "weight", None) is layer.weight]
            if len(holders) > 1:
                raise UserError(f"lora_target_modules names {name}, whose weight other modules have, too: leave it "
                                "out, or share the modules")
            block.set_submodule(name, LoRALinear(layer, lora["rank"], lora["alpha"], lora["dropout"]))


def check_targets(model: nn.Module, names: list[str]) -> None:
    """Raise UserError unless a model has what apply() takes: transformer.drop, and these layers in each block."""
    missing = []
    if not hasattr(model.transformer, "drop"):
        missing.append("transformer.drop, the dropout before its first block")
    for block in model.transformer.h:
        layers = dict(block.named_modules())
        for name in names:
            layer = layers.get(name)
            if not isinstance(layer, (nn.Linear, LoRALinear)):
                has = f", but a {type(layer).__name__}" if layer is not None else ""
                missing.append(f"an nn.Linear {name} in each {type(block).__name__}{has}")
    if missing:
        raise UserError(f"lora_rank needs {' and '.join(dict.fromkeys(missing))}, which {type(model).__module__}.py "
                        "doesn't have: name other --lora_target_modules, edit it, or train without LoRA")


def merge(weights, lora):
    """Merge the adapters into the weights, {name: tensor}, in place. A plain GPT can then load them."""
    for name in [name.removesuffix(LORA_A) for name in weights if name.endswith(LORA_A)]:
        delta = weights.pop(name + LORA_B) @ weights.pop(name + LORA_A)
        weights[name + ".weight"] = weights[name + ".weight"] + lora["alpha"] / lora["rank"] * delta
