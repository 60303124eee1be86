"""GPT-2 in plain PyTorch.

    model = GPT.from_pretrained("gpt2")          # or a folder written by save_pretrained
    loss = model(idx, targets)                   # (B, T) and (B, T) -> scalar
    logits = model(idx)                          # (B, T) -> (B, T, vocab_size)
    text = model.generate(idx, 100, top_k=50)    # (B, T) -> (B, T + up to 100)

The architecture follows "Language Models are Unsupervised Multitask Learners" (Radford et al.,
2019). Parameters have the names of transformers' GPT2LMHeadModel. The loss in chunks is in
runtime/loss.py, the KV cache and sampling are in runtime/decoder.py.
"""

import contextlib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.utils.checkpoint import checkpoint

from runtime.decoder import Decoder, KVCache, sample_token
from runtime.hardware import attention_backends
from runtime.loss import chunked_loss, compile_loss
from runtime.model_parts import (
    replace_parameter,
    replace_parameters,
    unset_as_nan,
    without_memory,
)
from runtime.weights import (
    check_sizes,
    fetch_from_hub,
    open_weights,
    read_config,
    read_weights,
    weights_errors,
)


@dataclass
class GPTConfig:
    block_size: int = 1024  # longest context, tokens
    vocab_size: int = 50257
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True  # in linear layers and layer norms; True is GPT-2's
    gelu: str = "tanh"  # F.gelu's approximate: "tanh" is GPT-2's; "none" is exact, as in nanoGPT

    def __post_init__(self) -> None:
        for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}={value!r} must be a positive integer")
        if type(self.dropout) not in (int, float):
            raise ValueError(f"dropout={self.dropout!r} must be a number")
        if type(self.bias) is not bool:
            raise ValueError(f"bias={self.bias!r} must be True or False")
        if self.gelu not in ("tanh", "none"):
            raise ValueError(f"gelu={self.gelu!r} must be 'tanh' or 'none'")
        if self.n_embd % self.n_head:
            raise ValueError(
                f"n_embd={self.n_embd} is not divisible by n_head={self.n_head}: change one of them"
            )

    @classmethod
    def from_weights(cls, source: str | os.PathLike) -> "GPTConfig":
        """Return the configuration of a folder of weights or a nanoGPT ckpt.pt. Raises
        UserError."""
        with weights_errors(source):
            return cls(**read_config(source, cls))

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding. A multiple of 64 keeps the largest matmul on the tensor cores'
        fast path."""
        return math.ceil(self.vocab_size / 64) * 64


class QKVLinear(nn.Linear):
    """A linear layer whose middle third, the keys, has a bias without gradient.

    Softmax doesn't change when all keys shift, so its gradient is zero. A computed one is rounding
    errors, and AdamW would scale them to full steps.
    """

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None or not torch.is_grad_enabled():
            return super().forward(x)
        q, k, v = self.bias.chunk(3)
        return F.linear(x, self.weight, torch.cat([q, k.detach(), v]))


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.c_attn = QKVLinear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.backends = None  # chosen at the first forward on CUDA

    def forward(
        self,
        x: Tensor,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Return (B, T, C) of x (B, T, C). cache, positions, mask: see GPT.forward."""
        B, T, C = x.shape
        # Queries, keys and values of all heads, (B, n_head, T, head size) each
        q, k, v = self.c_attn(x).split(C, dim=2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)

        backends = contextlib.nullcontext()
        if cache is not None:
            k, v = cache.update(k, v, positions)  # those of all tokens so far
        elif x.is_cuda:
            # Not with a cache: cuDNN makes a new plan for each shape, and each token has its own
            if self.backends is None:
                self.backends = attention_backends(x.device)
            backends = sdpa_kernel(self.backends, set_priority=True)

        if mask is not None:
            # One token, many keys: matmuls use more of the GPU than SDPA's kernels do
            scores = (q * q.size(-1) ** -0.5).flatten(0, 1) @ k.flatten(0, 1).transpose(1, 2)
            # mask is True for keys that are left out, the other way round than in SDPA
            probs = torch.softmax(scores.masked_fill_(mask, float("-inf")), dim=-1)
            y = (probs @ v.flatten(0, 1)).view_as(q)
        else:
            # With a cache, T > 1 is a prompt from position 0 (Decoder.prefill), as in training
            dropout = self.dropout if self.training else 0.0
            with backends:
                y = F.scaled_dot_product_attention(q, k, v, is_causal=T > 1, dropout_p=dropout)
        y = y.transpose(1, 2).reshape(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)
        self.gelu = config.gelu

    def forward(self, x: Tensor) -> Tensor:
        x = self.c_fc(x)
        x = F.gelu(x, approximate=self.gelu)
        x = self.c_proj(x)
        return self.dropout(x)


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(
        self,
        x: Tensor,
        recompute: bool = False,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Return (B, T, C) of x (B, T, C). recompute: compute activations again in backward instead
        of keeping them. cache, positions, mask: see GPT.forward."""
        if cache is not None:
            return self.attn_and_mlp(x, cache=cache, positions=positions, mask=mask)
        return self.forward_uncached(x, recompute)

    def forward_uncached(self, x: Tensor, recompute: bool) -> Tensor:
        """The part of forward that compile_blocks compiles."""
        if recompute:
            # In the compiled function: outside it, backward finds other tensors than forward saved
            return checkpoint(self.attn_and_mlp, x, use_reentrant=False)
        return self.attn_and_mlp(x)

    def attn_and_mlp(self, x: Tensor, **cached) -> Tensor:
        """cached: cache, positions and mask, or nothing."""
        x = x + self.attn(self.ln_1(x), **cached)
        x = x + self.mlp(self.ln_2(x))
        return x


class LMHead(nn.Module):
    """The output layer, tied to the token embedding, and its loss.

    Edit logits or losses, and the gradient follows: autograd computes it (runtime/loss.py). The
    head is a module because ZeRO-3 gathers parameters per module.

    A weight of its own, nn.Parameter(torch.empty_like(wte.weight)), gets the initial values of an
    embedding. Other values have to be set in place, as nn.init.normal_(self.weight, std=0.1) does.
    """

    def __init__(self, wte: nn.Embedding, vocab_size: int) -> None:
        super().__init__()
        self.weight = wte.weight
        self.vocab_size = vocab_size

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits (..., vocab_size) of x (..., n_embd), without the vocabulary's
        padding."""
        return F.linear(x, self.weight)[..., : self.vocab_size]

    def losses(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each row of x (N, n_embd), (N,) in float32. targets: (N,), -1 for a
        row that doesn't count. The loss takes the mean, or the sum, over those that count."""
        logits = self.logits(x).float()
        return F.cross_entropy(logits, targets, ignore_index=-1, reduction="none")

    def forward(
        self, x: Tensor, targets: Tensor | None = None, reduction: str = "mean"
    ) -> Tensor:
        """Return the logits of x (B, T, C), or the loss. targets, reduction: see GPT.forward."""
        if targets is None:
            return self.logits(x)
        return chunked_loss(self, x.flatten(0, -2), targets.flatten(), reduction)


def has_own_reset(module: nn.Module) -> bool:
    """Return whether a layer's class has its own reset_parameters."""
    of_pytorch = (nn.Linear.reset_parameters, nn.Embedding.reset_parameters, None)
    return getattr(type(module), "reset_parameters", None) not in of_pytorch


def is_as_made(module: nn.Module, param: nn.Parameter) -> bool:
    """Return whether a layer's parameter is as its constructor drew it, and nobody has set it."""
    # PyTorch counts a tensor's changes. A layer's constructor makes one, with padding_idx one more
    changes = 1
    if isinstance(module, LMHead):
        changes = 0
    elif getattr(module, "padding_idx", None) is not None:
        changes = 2
    if param._version > changes:
        return False
    if param.is_meta or param.numel() == 1:
        return True
    # What is set by param.data isn't counted, but no constructor draws one number over and over
    values = param.detach().flatten()[:4096]
    if values[0].isnan():  # of torch.empty(), within unset_as_nan()
        return True
    return not torch.equal(values, values[0].expand_as(values))


class GPT(nn.Module):
    @unset_as_nan()  # so that is_as_made() knows parameters that nobody has set
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.gradient_checkpointing = False
        self.decoded_shapes = set()  # of Decoders that have made their first step
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(config.padded_vocab_size, config.n_embd),
            "wpe": nn.Embedding(config.block_size, config.n_embd),
            "drop": nn.Dropout(config.dropout),
            "h": nn.ModuleList(Block(config) for _ in range(config.n_layer)),
            "ln_f": nn.LayerNorm(config.n_embd, bias=config.bias),
        })
        self.lm_head = LMHead(self.transformer.wte, config.vocab_size)
        self.init_weights()

    def init_weights(self) -> None:
        """Draw the weights of linear layers and embeddings with a standard deviation of 0.02, over
        sqrt(2 * n_layer) for projections into the residual. Set biases to 0.

        What a module's __init__ has set stays: its own parameters (but see LMHead), and layers that
        it changed, such as by nn.init.zeros_(self.c_proj.weight) or
        self.c_proj.weight.data.zero_(). So do layers of a class with its own reset_parameters.
        """
        residual_std = 0.02 / (2 * self.config.n_layer) ** 0.5
        for name, module in self.named_modules():
            if not isinstance(module, (nn.Linear, nn.Embedding, LMHead)):
                continue
            if has_own_reset(module):
                continue
            if is_as_made(module, module.weight):
                std = residual_std if name.endswith("c_proj") else 0.02
                nn.init.normal_(module.weight, std=std)
            bias = getattr(module, "bias", None)
            if isinstance(module, nn.Linear) and bias is not None and is_as_made(module, bias):
                nn.init.zeros_(bias)
        # Padding rows are never looked up
        nn.init.zeros_(self.transformer.wte.weight[self.config.vocab_size :])

    def num_params(self, positions: bool = True) -> int:
        """Return the number of parameters. A tied matrix counts once, vocabulary padding doesn't.

        positions: with the position embeddings.
        """
        total = sum(p.numel() for p in self.parameters()) - self.num_padding()
        if not positions and "wpe" in self.transformer:
            total -= self.transformer.wpe.weight.numel()
        return total

    def num_padding(self) -> int:
        """Return the number of parameters for the vocabulary's padding, of the embedding and of a
        head that isn't tied to it."""
        rows = self.config.padded_vocab_size - self.config.vocab_size
        matrices = {self.transformer.wte.weight, self.lm_head.weight}
        return sum(rows * matrix.size(1) for matrix in matrices)

    def flops_per_token(self, T: int | None = None) -> int:
        """Return the FLOPs of forward and backward per token with a context of T.

        They are 6 N + 12 W T (PaLM, arXiv:2204.02311, appendix B). N: the parameters but for those
        that are only looked up. A block counts as often as it is in transformer.h, a frozen weight
        4 instead of 6. W: the width of all heads, summed over the CausalSelfAttentions.

        Of a module with `experts` and `experts_per_token`, so many of them count. Without these
        two, all its parameters count, also of experts that a token doesn't use.
        """
        T = T or self.config.block_size
        shares = self.expert_shares()

        # Per weight 2 in forward, 2 for the gradient of its input, and 2 for its own
        def flops(params) -> float:
            return sum((6 if p.requires_grad else 4) * p.numel() * shares.get(p, 1) for p in params)

        # Parameters of blocks, of all else, and those that are only looked up
        blocks = list(self.transformer.h)
        looked_up = {module.weight for module in self.modules() if isinstance(module, nn.Embedding)}
        looked_up -= set(self.lm_head.parameters())
        of_blocks = {p for block in blocks for p in block.parameters()}
        others = [p for p in self.parameters() if p not in of_blocks and p not in looked_up]
        total = flops(others) + sum(flops(block.parameters()) for block in blocks)

        # Padding rows of the head cost time, but compute nothing that counts
        head = self.lm_head.weight
        padding = self.config.padded_vocab_size - self.config.vocab_size
        total -= flops([head]) * padding / head.size(0)

        # Attention, over T keys for each token
        for block in blocks:
            for module in block.modules():
                if isinstance(module, CausalSelfAttention):
                    total += 12 * module.c_proj.weight.size(1) * T
        return round(total)

    def expert_shares(self) -> dict[nn.Parameter, float]:
        """Return {parameter of an expert: the share of the tokens that use it}."""
        shares = {}
        for module in self.modules():
            used = getattr(module, "experts_per_token", None)
            if used is not None:
                for param in module.experts.parameters():
                    shares[param] = used / len(module.experts)
        return shares

    def parameter_groups(self, weight_decay: float) -> list[dict]:
        """Return the optimizer's parameter groups: matrices and embeddings with weight decay,
        biases and layer norms without. Frozen parameters and empty groups are left out."""
        # By dimension: weight decay pulls matrices to zero, but should not shift outputs
        params = [p for p in self.parameters() if p.requires_grad]
        matrices = [p for p in params if p.dim() >= 2]
        vectors = [p for p in params if p.dim() < 2]
        groups = []
        if matrices:
            groups.append({"params": matrices, "weight_decay": weight_decay})
        if vectors:
            groups.append({"params": vectors, "weight_decay": 0.0})
        return groups

    def muon_matrices(self) -> list[list[tuple[nn.Parameter, int]]]:
        """Return the matrices that Muon trains, [(parameter, parts)] of each block.

        parts: how many matrices lie one below the other in it, such as 3 for queries, keys and
        values. AdamW trains all other parameters. These are the linear layers of the blocks. Leave
        out what isn't one, such as the router of experts.
        """
        matrices = []
        for block in self.transformer.h:
            of_block = []
            for module in block.modules():
                if isinstance(module, nn.Linear):
                    parts = 3 if isinstance(module, QKVLinear) else 1
                    of_block.append((module.weight, parts))
            matrices.append(of_block)
        return matrices

    def compile_blocks(self, **options) -> None:
        """Compile each block without a cache, and the loss. options: torch.compile's.

        All blocks share one graph: GPT-2 XL's takes 11 s, the whole model's 52 s (H200). Hooks stay
        outside compiled code, which ZeRO-3 needs.
        """
        for block in self.transformer.h:  # with a cache, each length would be compiled anew
            block.forward_uncached = torch.compile(block.forward_uncached, **options)
        compile_loss(self.lm_head, **options)

    def crop_block_size(self, block_size: int) -> None:
        """Shorten the context to `block_size` tokens and drop the position embeddings beyond it."""
        if block_size > self.config.block_size:
            raise ValueError(
                f"block_size={block_size} is above the {self.config.block_size} positions that "
                "the model has"
            )
        self.config.block_size = block_size
        positions = self.transformer.wpe.weight
        replace_parameter(self, positions, positions[:block_size].detach().clone())

    def crop_vocab_size(self, vocab_size: int) -> None:
        """Drop the tokens from `vocab_size` on. They are padding that no tokenizer produces."""
        if vocab_size > self.config.vocab_size:
            raise ValueError(
                f"vocab_size={vocab_size} is above the {self.config.vocab_size} tokens that the "
                "model has"
            )
        rows = self.config.padded_vocab_size
        self.config.vocab_size = vocab_size
        self.lm_head.vocab_size = vocab_size
        # The embedding and the head, which may be one parameter, or two
        for param in {self.transformer.wte.weight, *self.lm_head.parameters()}:
            if param.dim() and len(param) == rows:
                replace_parameter(self, param, param[: self.config.padded_vocab_size].detach())

    def forward(
        self,
        idx: Tensor,
        targets: Tensor | None = None,
        reduction: str = "mean",
        positions: Tensor | None = None,
        caches: list[KVCache] | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Return logits (B, T, vocab_size) of idx (B, T), or the loss of targets (B, T).

        The loss is the mean cross-entropy, with reduction="sum" the sum, and with "none" that of
        each token, (B * T,). Targets of -1 are ignored.

        With caches, one KVCache per block, return the logits after the last token, (B, 1,
        vocab_size). positions: (T,), by default 0 to T - 1. mask: (length of the keys,), True for
        those that are left out; only for T = 1 with caches.
        """
        T = idx.size(1)
        if T > self.config.block_size:
            raise ValueError(
                f"a sequence of {T} tokens is longer than block_size={self.config.block_size}"
            )
        if positions is None:
            positions = torch.arange(T, device=idx.device)
        recompute = self.gradient_checkpointing and self.training

        x = self.transformer.wte(idx) + self.transformer.wpe(positions)
        x = self.transformer.drop(x)
        for i, block in enumerate(self.transformer.h):
            if caches is None:
                x = block(x, recompute)
            else:
                x = block(x, cache=caches[i], positions=positions, mask=mask)
        x = self.transformer.ln_f(x)
        if caches is not None:
            x = x[:, -1:]
        return self.lm_head(x, targets, reduction)

    @torch.no_grad()
    def generate(
        self,
        idx: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        end_of_text: int | None = None,
        generator: torch.Generator | None = None,
        on_token: Callable[[Tensor], object] | None = None,
        custom_step: Callable | None = None,
        cuda_graphs: bool = True,
    ) -> Tensor:
        """Continue idx (B, T) by up to max_new_tokens and return (B, T + n).

        A row that has produced end_of_text repeats it. Generation stops when all rows have.
        on_token gets each new column (B,). Beyond block_size tokens, the context window slides, so
        each token costs a full forward. temperature, top_k, top_p, generator: see sample_token.
        custom_step, cuda_graphs: see Decoder.
        """
        B, T = idx.shape
        block_size = self.config.block_size
        done = torch.zeros(B, dtype=torch.bool, device=idx.device)

        def draw(logits: Tensor) -> Tensor:
            """Return the next token of each row (B,). A CUDA graph replays this, so it updates its
            state in place."""
            token = sample_token(logits.float(), temperature, top_k, top_p, generator=generator)
            if end_of_text is not None:
                token = token.masked_fill(done, end_of_text)
                done.logical_or_(token == end_of_text)
            return token

        # The first step computes the prompt, each further one a token, with a cache of keys and
        # values
        decoder = Decoder(
            self,
            B,
            max_length=min(block_size, T + max_new_tokens),
            custom_step=custom_step,
            draw=draw,
            generator=generator,
            cuda_graphs=cuda_graphs,
        )
        for _ in range(max_new_tokens):
            if 0 < decoder.cached < block_size:
                token = decoder.decode_one_token(idx[:, -1:])
            else:  # the prompt, or a window that slides
                token = decoder.prefill(idx[:, -block_size:])
            idx = torch.cat([idx, token[:, None]], dim=1)
            if on_token is not None:
                on_token(token)
            if end_of_text is not None and done.all():
                break
        return idx

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str,
        dropout: float | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        config: GPTConfig | None = None,
    ) -> "GPT":
        """Load a name in PRETRAINED (runtime/pretrained.py), a folder in transformers' format, or a
        nanoGPT ckpt.pt.

        config: what the weights don't say, such as fields of your own. dropout: None for the
        config's, which is 0 if there is no config. Copies weights to `device` one tensor at a time.
        Raises UserError.
        """
        source = name_or_path
        if not os.path.exists(source):
            source = fetch_from_hub(name_or_path)
        with weights_errors(source):
            config = config or GPTConfig()
            config = replace(config, **read_config(source, type(config)))
        if dropout is not None:
            config = replace(config, dropout=dropout)
        tensors = open_weights(source)
        check_sizes(source, config)
        model = without_memory(lambda: cls(config), device)
        replace_parameters(
            model, lambda _, param: torch.empty_like(param, dtype=dtype, device=device)
        )
        with weights_errors(source):
            read_weights(model, source, tensors)
        return model  # buffers stay as they are, as in training
