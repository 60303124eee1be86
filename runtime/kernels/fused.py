"""GPT-2's blocks on our kernels (block.py), and how a model gets them."""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.utils.checkpoint import checkpoint

from runtime.errors import UserError
from runtime.hardware import attention_backends
from runtime.kernels import fp8
from runtime.kernels.block import (
    AddBranch,
    LinearGelu,
    LinearNoBias,
    QKVProjection,
    ResidualLayerNorm,
)
from runtime.kernels.edits import own_class
from runtime.kernels.fit import blocks_of, fit, hooks_of_parts
from runtime.kernels.linear import Casts
from runtime.loss import compile_loss


@dataclass(eq=False)
class BlockCasts:
    """The Casts of a block's four linear layers."""

    c_attn: Casts
    attn_c_proj: Casts
    c_fc: Casts
    mlp_c_proj: Casts


@dataclass(frozen=True, eq=False)
class FusedBlocks:
    """The blocks of a model that run on these kernels. In a bfloat16 model, parts of backward are
    in float16, so the loss has to be scaled."""

    blocks: list[nn.Module]
    copies: list[Tensor]  # in float16, of these layers' weights
    layers: list[nn.Linear]

    @torch.no_grad()
    def copy_weights(self) -> None:
        """Copy attention's weights to float16. Call this when they have changed."""
        if self.copies:
            torch._foreach_copy_(self.copies, [layer.weight for layer in self.layers])


def use_fused_blocks(model: nn.Module, use_fp8: bool = False, copies: bool = False) -> FusedBlocks:
    """Make those blocks of a model that fit run on these kernels, and compile its loss. Modules
    change class, as in fully_shard.

    copies: of a bfloat16 model, keep copies of attention's weights in float16, for copy_weights().
    To convert them at each use takes no memory, but 10% of GPT-2 XL's step at 1 x 32. Raises
    UserError if use_fp8 is set and the blocks can't be chained.
    """
    # What fits, and whether GPT.forward passes the branch from block to block
    found = fit(model)
    way = ChainedBlock if found.no_chain is None else ClosedBlock
    blocks = list(dict.fromkeys(blocks_of(model)[i] for i in found.fused()))

    # FP8's scales belong to the blocks in one order
    if use_fp8 and (found.no_chain or len(blocks) < len(blocks_of(model))):
        reason = found.no_chain or "a block runs twice"
        raise UserError(
            f"fp8=True needs the blocks and GPT.forward of model.py ({reason}): drop it"
        )

    # The output layer's loss is in chunks, which torch.compile fuses
    head = getattr(model, "lm_head", None)
    if hasattr(head, "losses") and next(head.parameters()).is_cuda:
        compile_loss(head)

    # What each layer casts, and where its scales or its copy are
    copied: list[Tensor] = []
    layers: list[nn.Linear] = []
    device = next(model.parameters()).device
    scales = fp8.Fp8Scales(4 * len(blocks), device) if use_fp8 else None
    for i, block in enumerate(blocks):
        slots = [None] * 4
        if scales:
            slots = [fp8.Slot(scales, 3 * (4 * i + k)) for k in range(4)]
        casts = BlockCasts(*(Casts(slot=slot) for slot in slots))
        if copies and not use_fp8:
            casts.c_attn.in_float16 = float16_like(block.attn.c_attn.weight)
            casts.attn_c_proj.in_float16 = float16_like(block.attn.c_proj.weight)
            copied += [casts.c_attn.in_float16, casts.attn_c_proj.in_float16]
            layers += [block.attn.c_attn, block.attn.c_proj]

        # From here on, the block runs on these kernels
        block.__class__ = fused_class(way, own_class(block))
        block.casts = casts
        block.hooks_of_parts = hooks_of_parts(block)

    # The last norm takes the tuple of a chained block
    if way is ChainedBlock:
        model.transformer.ln_f.__class__ = FusedLayerNorm
    if scales:
        blocks[0].register_forward_pre_hook(scales.update, with_kwargs=True)
    return FusedBlocks(blocks=blocks, copies=copied, layers=layers)


def float16_like(weight: Tensor) -> Tensor:
    """Return an empty tensor in float16 with a weight's shape."""
    return torch.empty_like(weight, dtype=torch.float16, requires_grad=False)


def layernorm(
    layer, residual, branch=None, branch_bias=None, consumer=None, dtype=None, out_bias=None
):
    """Apply ResidualLayerNorm with the model's `layer`."""
    return ResidualLayerNorm.apply(
        residual, branch, branch_bias, out_bias, layer.weight, layer.bias, consumer, dtype
    )


class FusedLayerNorm(nn.LayerNorm):
    """Takes a tensor, as PyTorch's does, or what a chained block returns."""

    own_class = nn.LayerNorm

    def forward(self, x):
        return layernorm(self, *x)[1] if isinstance(x, tuple) else super().forward(x)


class FusedBlock(nn.Module):
    """A block on these kernels. With a cache, it runs its own class's forward, and so it does if
    somebody has put a hook on one of its parts since, which the kernels don't call."""

    # use_fused_blocks() gives each block its own
    casts = BlockCasts(Casts(), Casts(), Casts(), Casts())
    hooks_of_parts = ()

    def fused_attn_and_mlp(self, residual, branch=None, branch_bias=None, out_bias=None):
        """Return (residual, branch) of (residual, branch, branch_bias). The branch is without its
        bias, mlp.c_proj's.
        out_bias: that bias if AddBranch adds it."""
        attn, mlp, casts = self.attn, self.mlp, self.casts
        # of attention
        dtype = torch.float16 if residual.dtype == torch.bfloat16 else residual.dtype
        residual = residual.contiguous()
        residual, normed, normed8 = layernorm(
            self.ln_1, residual, branch, branch_bias, casts.c_attn, dtype
        )
        q, k, v = QKVProjection.apply(
            normed, normed8, attn.c_attn.weight, attn.c_attn.bias, attn.n_head, casts.c_attn
        )
        with (
            sdpa_kernel(attention_backends(q.device), set_priority=True)
            if q.is_cuda
            else nullcontext()
        ):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).reshape(residual.shape)
        branch = LinearNoBias.apply(y, None, attn.c_proj.weight, casts.attn_c_proj)
        residual, normed, normed8 = layernorm(
            self.ln_2, residual, branch, attn.c_proj.bias, casts.c_fc, out_bias=out_bias
        )
        g, g8 = LinearGelu.apply(
            normed, normed8, mlp.c_fc.weight, mlp.c_fc.bias, casts.c_fc, casts.mlp_c_proj
        )
        return residual, LinearNoBias.apply(g, g8, mlp.c_proj.weight, casts.mlp_c_proj)

    def closed(self, x):
        """Return the block's output of x (B, T, C), as a tensor."""
        bias = self.mlp.c_proj.bias
        residual, branch = self.fused_attn_and_mlp(x, out_bias=bias)
        return AddBranch.apply(residual, branch, bias.detach())

    def recomputed(self, x):
        """Return closed(x), whose activations are computed again in backward."""
        return checkpoint(self.closed, x, use_reentrant=False, preserve_rng_state=False)


class ChainedBlock(FusedBlock):
    """Returns (residual, branch, branch_bias), and takes that or a tensor."""

    chained = True

    # full backward hooks, which DeepSpeed uses, find no tensors in a tuple
    def __call__(self, x, *args, **named):
        state = x if isinstance(x, tuple) else (x, None, None)
        return super().__call__(*state, *args, **named)

    def forward(self, residual, branch, branch_bias, recompute=False, *cached, **named):
        if has_cache(cached, named):
            return super().forward(residual, recompute, *cached, **named)
        if any(self.hooks_of_parts):
            x = residual if branch is None else residual + branch + branch_bias
            return super().forward(x, recompute), None, None
        if recompute:  # it adds the branch at once, because each tensor passed to a block is saved
            return self.recomputed(residual), None, None
        residual, branch = self.fused_attn_and_mlp(residual, branch, branch_bias)
        bias = self.mlp.c_proj.bias
        if not hasattr(bias, "grad_sink"):
            bias = bias.clone()  # ZeRO-3 releases the block's bias before the next block adds it
        return residual, branch, bias


class ClosedBlock(FusedBlock):
    """Takes and returns a tensor, as Block does."""

    chained = False

    def forward(self, x, recompute=False, *cached, **named):
        if has_cache(cached, named) or not self.takes(x):
            return super().forward(x, recompute, *cached, **named)
        return self.recomputed(x) if recompute else self.closed(x)

    def takes(self, x):
        """Return whether the kernels fit an input, which may come from an edited GPT.forward."""
        if (
            any(self.hooks_of_parts)
            or torch.is_autocast_enabled(x.device.type)
            or x.dim() != 3
            or not x.numel()
        ):
            return False
        return x.dtype == self.ln_1.weight.dtype and x.size(-1) == self.ln_1.normalized_shape[0]


def has_cache(cached: tuple, named: dict) -> bool:
    """Return whether a block is called with a cache. cached, named: cache, positions and mask of
    Block.forward, or some of them."""
    values = {**dict(zip(("cache", "positions", "mask"), cached)), **named}
    values.pop("positions", None)  # alone they change nothing
    return any(value is not None for value in values.values())


@cache
def fused_class(way: type[FusedBlock], own: type[nn.Module]) -> type[nn.Module]:
    """Return a class of blocks that run on the kernels, and are of their own class in all else."""
    return type(f"Fused{own.__name__}", (way, own), {"own_class": own})
