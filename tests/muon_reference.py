"""References for Muon (runtime/engine/muon.py) in plain PyTorch."""

import torch

NO_MUON = "torch.optim.Muon, the reference, is not in PyTorch 2.7"


def by_singular_values(matrix, *_):
    """Newton-Schulz of a matrix in float64: its polynomial, applied five times to the singular values."""
    u, s, v = torch.linalg.svd(matrix.double() / matrix.double().norm(), full_matrices=False)
    a, b, c = 3.4445, -4.7750, 2.0315
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    return (u * s @ v).float()


def low_rank_and_noise(rows, columns):
    """A matrix of eight directions, and noise of a thousandth of them, which five iterations raise to 0.4."""
    generator = torch.Generator().manual_seed(0)
    low_rank = torch.randn(rows, 8, generator=generator) @ torch.randn(8, columns, generator=generator)
    return low_rank + 0.01 * torch.randn(rows, columns, generator=generator)


class PlainMuon:
    """torch.optim.Muon for the matrices of a GPT's blocks, with q, k and v apart, and AdamW for the rest. The caller
    sets the learning rate of each group, that of Muon's at lr_ratio times the others'."""

    def __init__(self, model, decay, lr_ratio, parts=None, groups=None, **adam):
        """parts: {name of a matrix: how many matrices lie one below the other in it}; None: those of GPT-2.

        groups: the parameter groups, each with its weight_decay and maybe an lr_ratio; None: those of GPT-2."""
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if parts is None:
            parts = {name: 3 if "c_attn" in name else 1 for name, p in named.items() if ".h." in name and p.dim() == 2}
        self.parts = {named[name]: [torch.nn.Parameter(part) for part in named[name].data.chunk(n)]
                      for name, n in parts.items()}  # in the same memory
        muons, others = [], []
        for group in groups or model.parameter_groups(decay):
            own_ratio = group.get("lr_ratio", 1)
            matrices = [part for p in group["params"] if p in self.parts for part in self.parts[p]]
            rest = [p for p in group["params"] if p not in self.parts]
            muons.append({**group, "params": matrices, "lr_ratio": lr_ratio * own_ratio})
            others.append({**group, "params": rest, "lr_ratio": own_ratio})
        muons = [group for group in muons if group["params"]]
        self.optimizers = torch.optim.Muon(muons), torch.optim.AdamW(others, **adam)
        self.param_groups = sum((optimizer.param_groups for optimizer in self.optimizers), [])

    def step(self):
        for p, parts in self.parts.items():
            for part, grad in zip(parts, p.grad.chunk(len(parts))):
                part.grad = grad
        for optimizer in self.optimizers:
            optimizer.step()
