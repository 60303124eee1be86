"""Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/) for the matrices of blocks, at ZeRO-2.

Each matrix's update is its momentum with singular values near 1. Weights and momentum are sharded as AdamW's are, in
one flat tensor per rank. split_matrices() sorts the matrices by shape, so that those of one shape lie next to each
other: a view of them is the batch of a GEMM. A matrix that lies on several ranks, at most one per border, is gathered
by all. There is no second moment, so Muon needs 4 bytes per parameter less than AdamW.
"""

import torch
import torch.distributed as dist

MOMENTUM = 0.95
COEFFICIENTS, ITERATIONS = (3.4445, -4.7750, 2.0315), 5  # of Newton-Schulz, as in torch.optim.Muon
MAX_BATCH = 2**27  # elements: what one batch of matrices takes in memory for a moment is a few times this
LAYERS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")


def split_matrices(groups, model, lr_ratio):
    """Return parameter groups with a new one for Muon, of the matrices in the model's blocks. Its learning rate is
    `lr_ratio` times that of the others."""
    matrices = [block.get_submodule(layer).weight for layer in LAYERS for block in model.transformer.h]
    ids, (decayed, *_) = set(map(id, matrices)), groups
    others = [{**group, "params": [p for p in group["params"] if id(p) not in ids]} for group in groups]
    return [*others, {**decayed, "params": matrices, "lr_ratio": lr_ratio}]


def is_muon(group):
    """Return whether a parameter group is Muon's."""
    return "lr_ratio" in group


def moments_of(group):
    """Return the names of the moments that the optimizer keeps for a parameter group."""
    return ("exp_avg",) if is_muon(group) else ("exp_avg", "exp_avg_sq")


def orthogonalize(matrices):
    """Return matrices (n, rows, columns) with their singular values moved to about 1, in their dtype."""
    a, b, c = COEFFICIENTS
    is_tall = matrices.size(1) > matrices.size(2)
    x = matrices.mT if is_tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, gram, x, beta=a)
    return x.mT if is_tall else x


def next_direction(grads, momentum, clip, is_applied, dtype):
    """Add clipped gradients to the momentum, clear them, and return Nesterov's direction in this dtype."""
    clipped = torch.where(is_applied, grads * clip, 0.0)
    momentum.lerp_(clipped, is_applied * (1 - MOMENTUM))
    grads.zero_()
    return clipped.lerp(momentum, MOMENTUM).to(dtype)


def apply_update(weights, half, update, lr, decay):
    """Decay the fp32 weights, subtract lr * update, and copy them to half precision. lr, decay: device scalars."""
    weights.mul_(1 - decay).sub_(update.float() * lr)
    half.copy_(weights)


class Muon:
    """Steps this rank's part of Muon's parameter group.

    places: (parameter, offset in the flat tensor) of the group. size: elements per rank. group: the ranks that share
    the flat tensor."""

    def __init__(self, places, size, group):
        self.group, self.size, self.batches = group, size, []  # [start, end, rows, columns], from this rank's first
        for param, offset in places:
            rows, columns = param.shape
            if rows == 3 * columns:  # queries, keys and values
                rows = columns
            start = offset - size * dist.get_rank(group)
            for first in range(start, start + param.numel(), rows * columns):
                self.add(first, first + rows * columns, rows, columns)
        self.next_direction, self.apply_update = next_direction, apply_update
        if places[0][0].is_cuda:  # each in one pass
            self.next_direction = torch.compile(next_direction, dynamic=True)
            self.apply_update = torch.compile(apply_update, dynamic=True)

    def is_shared(self, start, end):
        """Return whether a matrix lies on several ranks."""
        return start // self.size != (end - 1) // self.size

    def add(self, start, end, rows, columns):
        last, is_own = self.batches[-1] if self.batches else None, 0 <= start and end <= self.size
        if is_own and last and last[1:] == [start, rows, columns] and 0 <= last[0] and end - last[0] <= MAX_BATCH:
            last[1] = end
        elif is_own or self.is_shared(start, end):
            self.batches.append([start, end, rows, columns])

    def step(self, p, momentum, norm, max_norm, skip_above):
        """Step a Partition and clear its gradients. momentum: fp32, like its weights. norm: of all gradients, a scalar
        on the device. If it is not below skip_above, only clear the gradients."""
        is_applied = norm < skip_above
        clip = (max_norm / (norm + 1e-6)).clamp(max=1)
        lr = torch.tensor(p.group["lr"], device=norm.device) * is_applied
        for start, end, rows, columns in self.batches:
            own = slice(max(0, start), max(0, min(self.size, end)))
            direction = self.next_direction(p.grads[own], momentum[own], clip, is_applied,
                                            torch.bfloat16 if norm.is_cuda else torch.float32)
            if self.is_shared(start, end):
                part, direction = direction, direction.new_zeros(end - start)
                direction[own.start - start : own.stop - start] = part
                dist.all_reduce(direction, group=self.group)
            if own.start < own.stop:
                update = orthogonalize(direction.view(-1, rows, columns)).flatten()
                update = update[own.start - start : own.stop - start]
                self.apply_update(p.master.data[own], p.half[own], update, lr * max(1, rows / columns) ** 0.5,
                                  lr * p.group["weight_decay"])
