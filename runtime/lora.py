"""LoRA (Hu et al., arXiv:2106.09685): the weights stay as they are, and beside each of the blocks' matrices a product
of two thin ones learns what is to be added to it.

GPT-2 XL's optimizer state shrinks from 18.7 GB to that of the thin matrices, 0.9 GB at rank 64. A tag holds the frozen
weights too, and adapter_model.safetensors with adapter_config.json, by which it is a folder that PEFT reads.
"""

import math

import torch.nn as nn
import torch.nn.functional as F

MATRICES = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")  # of a block
A, B = ".lora_A", ".lora_B"  # what parameters are called, after their matrix


class LoRALinear(nn.Module):
    """y = W x + b + alpha / rank * B A dropout(x), of which A (rank, in) and B (out, rank) learn. B begins at zero."""

    def __init__(self, linear, rank, alpha, dropout):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.lora_A = nn.Parameter(self.weight.new_empty(rank, linear.in_features))
        self.lora_B = nn.Parameter(self.weight.new_zeros(linear.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))  # as the authors' code and PEFT
        self.scale, self.dropout = alpha / rank, nn.Dropout(dropout)

    def forward(self, x):
        return F.linear(x, self.weight, self.bias) + self.scale * F.linear(
            F.linear(self.dropout(x), self.lora_A), self.lora_B)


def of(settings):
    """Return {"rank", "alpha", "dropout", "target_modules"} of a run with LoRA, or None. Raises ValueError."""
    rank, alpha, dropout = (settings[f"lora_{name}"] for name in ("rank", "alpha", "dropout"))
    matrices = list(dict.fromkeys(name.strip() for name in settings["lora_target_modules"].split(",") if name.strip()))
    unknown = [name for name in matrices if name not in MATRICES]
    if rank < 0 or not 0 <= dropout < 1 or (alpha is not None and alpha <= 0):
        raise ValueError(f"lora_rank={rank}, lora_alpha={alpha}, lora_dropout={dropout}: a rank of 0 or more, an alpha "
                         "above 0, a dropout of 0 or more and below 1 are wanted")
    if rank and (unknown or not matrices):
        raise ValueError(f"lora_target_modules names {', '.join(unknown) or 'nothing'}: choose from a block's "
                         f"matrices, {', '.join(MATRICES)}")
    lora = {"rank": rank, "alpha": alpha or float(rank), "dropout": dropout, "target_modules": matrices}
    return lora if rank else None


def differences(before, now):
    """(before, now): the settings, as they are typed, in which a tag's LoRA and another, see of(), differ."""
    def typed(lora):
        return {key: f"--lora_{key}={', '.join(value)!r}" if key == "target_modules" else f"--lora_{key}={value}"
                for key, value in (lora or {}).items() if key != "base"}

    before, now = typed(before), typed(now)
    names = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    return [" ".join(lora[key] for key in names if key in lora) or "no LoRA" for lora in (before, now)]


def adapt(model, lora):
    """Freeze a GPT's parameters, and put thin matrices beside those of its blocks' that `lora` names."""
    model.requires_grad_(False)
    # ZeRO-3 lets a block's weights go when its input's gradient is there: the first block's must have one
    model.transformer.drop.register_forward_hook(lambda layer, given, made: made.requires_grad_())
    for block in model.transformer.h:
        for name in lora["target_modules"]:
            parent, _, child = name.partition(".")
            layer = getattr(getattr(block, parent), child)
            setattr(getattr(block, parent), child, LoRALinear(layer, lora["rank"], lora["alpha"], lora["dropout"]))


def is_adapter(name):
    """Whether a parameter of this name is a LoRA adapter's."""
    return name.endswith((A, B))


def merge(weights, lora):
    """The weights of a plain GPT from those of one with LoRA, name -> tensor, in place."""
    for name in [name.removesuffix(A) for name in weights if name.endswith(A)]:
        product = weights.pop(name + B) @ weights.pop(name + A)
        weights[name + ".weight"] = weights[name + ".weight"] + lora["alpha"] / lora["rank"] * product
    return weights
