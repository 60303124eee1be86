"""GPT-2 in plain PyTorch: modules, loss, initialization, and text generation with a KV cache.

    model = GPT.from_pretrained("gpt2")          # or a folder written by save_pretrained
    loss = model(idx, targets)                   # (B, T) and (B, T) -> scalar
    logits = model(idx)                          # (B, T) -> (B, T, vocab_size)
    text = model.generate(idx, 100, top_k=50)    # (B, T) -> (B, T + up to 100)

The architecture follows "Language Models are Unsupervised Multitask Learners" (Radford et al., 2019). Parameters have
the names of transformers' GPT2LMHeadModel."""

import contextlib
import os
from collections import namedtuple
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel
from torch.utils.checkpoint import checkpoint

from runtime.hardware import attention_backends
from runtime.weights import (
    check_sizes,
    fetch_from_hub,
    open_weights,
    read_config,
    read_weights,
    weights_errors,
)

LOSS_CHUNK = 4096  # rows of logits in memory at one time; 4096 x 50304 in bf16 take 412 MB
EAGER_LOSS_CHUNK = 2048  # without torch.compile, which halves the memory per row
ADDMM_OUT_DTYPE = "dtype_out" in torch.ops.aten.addmm.overloads() and not torch.version.hip  # not in PyTorch 2.7
FP16_GRAD_FACTOR = 1024.0  # many gradients of logits are below 3e-8, which float16 rounds to 0
KVCache = namedtuple("KVCache", ("k", "v"))  # of one layer, (B, n_head, max_length, head size) each


@dataclass
class GPTConfig:
    block_size: int = 1024  # longest context, tokens
    vocab_size: int = 50257
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True  # in linear layers and layer norms; True is GPT-2's
    gelu: str = "tanh"  # F.gelu's approximate: "tanh" is GPT-2's form; "none" is exact, as in nanoGPT

    def __post_init__(self):
        for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}={value!r} must be a positive integer")
        if type(self.dropout) not in (int, float) or type(self.bias) is not bool or self.gelu not in ("tanh", "none"):
            raise ValueError(f"dropout={self.dropout!r}, bias={self.bias!r} or gelu={self.gelu!r} is invalid")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd={self.n_embd} is not divisible by n_head={self.n_head}: change one of them")

    @classmethod
    def from_weights(cls, source):
        """Return the configuration in a folder of weights or a nanoGPT ckpt.pt. Raises UserError."""
        with weights_errors(source):
            return cls(**read_config(source))

    @property
    def padded_vocab_size(self):
        """Rows of the embedding. A multiple of 64 keeps the largest matmul on the tensor cores' fast path."""
        return -(-self.vocab_size // 64) * 64


class QKVLinear(nn.Linear):
    """A linear layer whose middle third, the keys, has a bias without gradient. Softmax doesn't change when all keys
    shift, so its gradient is zero. A computed one is rounding errors, and AdamW would scale them to full steps."""

    def forward(self, x):
        if self.bias is None or not torch.is_grad_enabled():
            return super().forward(x)
        q, k, v = self.bias.chunk(3)
        return F.linear(x, self.weight, torch.cat([q, k.detach(), v]))


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.dropout
        self.c_attn = QKVLinear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.backends = None  # chosen at the first forward on CUDA

    def forward(self, x, cache=None, positions=None, mask=None):
        B, T, C = x.shape
        q, k, v = (z.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for z in self.c_attn(x).split(C, dim=2))
        backends = contextlib.nullcontext()
        if cache is not None:
            k, v = cache.k.index_copy_(2, positions, k), cache.v.index_copy_(2, positions, v)  # all keys and values
        elif x.is_cuda:  # not with a cache: cuDNN makes a new plan for each shape, and each token changes the shape
            self.backends = self.backends or attention_backends(x.device)
            backends = sdpa_kernel(self.backends, set_priority=True)
        if mask is not None:  # one token, many keys: matmuls use more of the GPU than SDPA's kernels do
            scores = (q * q.size(-1) ** -0.5).flatten(0, 1) @ k.flatten(0, 1).transpose(1, 2)
            probs = torch.softmax(scores.masked_fill_(mask, float("-inf")), dim=-1)
            y = (probs @ v.flatten(0, 1)).view_as(q)
        else:
            with backends:
                y = F.scaled_dot_product_attention(q, k, v, is_causal=T > 1, dropout_p=self.dropout * self.training)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).reshape(B, T, C)))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)
        self.gelu = config.gelu

    def forward(self, x):
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x), approximate=self.gelu)))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x, recompute=False, *cached):
        return self.attn_and_mlp(x, *cached) if cached else self.forward_uncached(x, recompute)

    def forward_uncached(self, x, recompute):
        if recompute:  # inside the compiled function: outside it, backward finds other tensors than forward saved
            return checkpoint(self.attn_and_mlp, x, use_reentrant=False)
        return self.attn_and_mlp(x)

    def attn_and_mlp(self, x, *cached):
        x = x + self.attn(self.ln_1(x), *cached)
        return x + self.mlp(self.ln_2(x))


def cross_entropy_with_grad(logits, targets, vocab_size):
    """Return the cross-entropy of each row and its gradient with respect to the logits.

    logits: (N, padded_vocab_size), of which padding columns are ignored. targets: (N,), -1 to ignore a row. Returns
    (N,) in fp32, and a gradient like logits. In float16 it is multiplied by FP16_GRAD_FACTOR."""
    columns = torch.arange(logits.size(1), device=logits.device)
    logits32 = logits.float().masked_fill(columns >= vocab_size, float("-inf"))
    log_z = torch.logsumexp(logits32, dim=1, keepdim=True)
    valid, row_target = (targets >= 0).unsqueeze(1), targets.clamp(min=0).unsqueeze(1)
    losses = (log_z - logits32.gather(1, row_target)) * valid
    grad = (torch.exp(logits32 - log_z) - (columns == row_target).float()) * valid
    if logits.dtype == torch.float16:
        grad = grad * FP16_GRAD_FACTOR
    return losses.squeeze(1), grad.to(logits.dtype)


def addmm_fp32(total, a, b):
    """Add a @ b to `total` in place, in float32, and return it. On CUDA this is one GEMM."""
    if a.is_cuda and a.dtype != total.dtype and ADDMM_OUT_DTYPE:
        return torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    return total.add_(a.float() @ b.float() if a.dtype == torch.float16 else a @ b)  # float16's sum would overflow


class FusedLinearCrossEntropy(torch.autograd.Function):
    """Compute the mean or the sum of the cross-entropy of x @ weight.T, LOSS_CHUNK rows at a time.

    Forward computes each chunk's gradients from its logits, so the full logits are never in memory (Liger Kernel,
    arXiv:2410.10989). Backward scales them in float32, because a scale rounded to bfloat16 can be off by 0.4%."""

    @staticmethod
    def forward(ctx, x, weight, targets, vocab_size, cross_entropy, mean=True):
        grad_x = torch.empty_like(x)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        total = torch.zeros((), device=x.device)
        chunk = EAGER_LOSS_CHUNK if cross_entropy is cross_entropy_with_grad else LOSS_CHUNK
        for first in range(0, x.size(0), chunk):
            rows = slice(first, first + chunk)
            losses, grad = cross_entropy(x[rows] @ weight.T, targets[rows], vocab_size)
            total += losses.sum()
            grad_x[rows] = grad @ weight
            if grad_weight is not None:
                addmm_fp32(grad_weight, grad.T, x[rows])
        count = (targets >= 0).sum() if mean else torch.ones((), device=x.device)
        ctx.save_for_backward(grad_x, grad_weight, count)
        return total / count

    @staticmethod
    def backward(ctx, grad_loss):
        grad_x, grad_weight, count = ctx.saved_tensors
        scale = grad_loss.float() / (count * FP16_GRAD_FACTOR if grad_x.dtype == torch.float16 else count)
        if grad_weight is not None:  # scale and round in one pass: GPT-2 XL has 80M of these weights
            grad_weight = torch.mul(grad_weight, scale, out=torch.empty_like(grad_weight, dtype=grad_x.dtype))
        return grad_x.float().mul_(scale).to(grad_x.dtype), grad_weight, None, None, None, None


class LMHead(nn.Module):
    """The output layer, tied to the token embedding. It is a module because ZeRO-3 gathers parameters per module."""

    def __init__(self, wte, vocab_size):
        super().__init__()
        self.weight, self.vocab_size, self.cross_entropy = wte.weight, vocab_size, cross_entropy_with_grad

    def forward(self, x, targets=None, reduction="mean"):
        if targets is None:
            return F.linear(x, self.weight)[..., : self.vocab_size]
        x, targets = x.flatten(0, -2), targets.flatten()
        if reduction != "none":
            return FusedLinearCrossEntropy.apply(x, self.weight, targets, self.vocab_size, self.cross_entropy,
                                                 reduction == "mean")
        chunks = zip(x.split(LOSS_CHUNK), targets.split(LOSS_CHUNK), strict=True)
        return torch.cat([self.cross_entropy(rows @ self.weight.T, own, self.vocab_size)[0] for rows, own in chunks])


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.gradient_checkpointing = False
        self.decoded_shapes = set()  # of Decoders that have made their first step
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(config.padded_vocab_size, config.n_embd),
            "wpe": nn.Embedding(config.block_size, config.n_embd), "drop": nn.Dropout(config.dropout),
            "h": nn.ModuleList(Block(config) for _ in range(config.n_layer)),
            "ln_f": nn.LayerNorm(config.n_embd, bias=config.bias)})
        self.lm_head = LMHead(self.transformer.wte, config.vocab_size)
        self.init_weights()

    def init_weights(self):
        """Draw weights with a standard deviation of 0.02, over sqrt(2 * n_layer) for projections into the residual."""
        residual_std = 0.02 / (2 * self.config.n_layer) ** 0.5
        for name, p in self.named_parameters():
            if p.dim() >= 2:
                nn.init.normal_(p, std=residual_std if name.endswith("c_proj.weight") else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)
        nn.init.zeros_(self.transformer.wte.weight[self.config.vocab_size :])  # padding rows are never looked up

    def num_params(self, positions=True):
        """Return the number of parameters. The tied matrix counts once, vocabulary padding doesn't count."""
        rows = self.config.padded_vocab_size - self.config.vocab_size + (0 if positions else self.config.block_size)
        return sum(p.numel() for p in self.parameters()) - rows * self.config.n_embd

    def flops_per_token(self, T=None):
        """Return the FLOPs of forward and backward per token with a context of T: 6 N + 12 n_layer n_embd T. N excludes
        position embeddings (PaLM, arXiv:2204.02311, appendix B). A frozen weight counts 4 instead of 6."""
        T, wpe = T or self.config.block_size, self.transformer.wpe.weight
        frozen = sum(p.numel() for p in self.parameters() if not p.requires_grad and p is not wpe)
        return 6 * self.num_params(positions=False) - 2 * frozen + 12 * self.config.n_layer * self.config.n_embd * T

    def parameter_groups(self, weight_decay):
        """Return the optimizer's parameter groups: matrices and embeddings with weight decay, biases and layer norms
        without. Frozen parameters and empty groups are left out."""
        params = [p for p in self.parameters() if p.requires_grad]
        matrices, vectors = [p for p in params if p.dim() >= 2], [p for p in params if p.dim() < 2]
        groups = {"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}
        return [group for group in groups if group["params"]]

    def muon_matrices(self):
        """Return the matrices that Muon trains, [(parameter, parts)] of each block. parts: how many matrices lie one
        below the other in it, such as 3 for queries, keys and values. AdamW trains all other parameters.

        These are the linear layers of the blocks. Leave out what isn't one, such as the router of experts."""
        matrices = []
        for block in self.transformer.h:
            linears = [module for module in block.modules() if isinstance(module, nn.Linear)]
            matrices.append([(linear.weight, 3 if isinstance(linear, QKVLinear) else 1) for linear in linears])
        return matrices

    def compile_blocks(self, **options):
        """Compile each block without a cache, and the loss. options: torch.compile's. All blocks share one graph: GPT-2
        XL's takes 11 s, the whole model's 52 s (H200). Hooks stay outside compiled code, which ZeRO-3 needs."""
        for block in self.transformer.h:  # with a cache, each length would be compiled anew
            block.forward_uncached = torch.compile(block.forward_uncached, **options)
        self.lm_head.cross_entropy = torch.compile(self.lm_head.cross_entropy, **options)

    def crop_block_size(self, block_size):
        """Shorten the context to `block_size` tokens and drop the position embeddings beyond it."""
        self.config.block_size = block_size
        self.transformer.wpe.weight = nn.Parameter(self.transformer.wpe.weight[:block_size].detach().clone())

    def crop_vocab_size(self, vocab_size):
        """Drop the tokens from `vocab_size` on. They are padding that the tokenizer never produces."""
        self.config.vocab_size = self.lm_head.vocab_size = vocab_size
        weight = nn.Parameter(self.transformer.wte.weight[: self.config.padded_vocab_size].detach())
        self.transformer.wte.weight = self.lm_head.weight = weight

    def forward(self, idx, targets=None, reduction="mean", positions=None, caches=None, mask=None):
        """Return logits (B, T, vocab_size) of idx (B, T). With targets (B, T), return the mean cross-entropy, or with
        reduction="sum" the sum, or with "none" that of each token, (B * T,). Targets of -1 are ignored.
        With caches, one KVCache per block, return the logits after the last token, (B, 1, vocab_size). positions: (T,),
        by default 0 to T - 1. mask: see Decoder.forward."""
        T = idx.size(1)
        if T > self.config.block_size:
            raise ValueError(f"a sequence of {T} tokens is longer than block_size={self.config.block_size}")
        positions = torch.arange(T, device=idx.device) if positions is None else positions
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(positions))
        recompute = self.gradient_checkpointing and self.training
        for i, block in enumerate(self.transformer.h):
            x = block(x, recompute, *((caches[i], positions, mask) if caches else ()))
        x = self.transformer.ln_f(x)
        return self.lm_head(x[:, -1:] if caches else x, targets, reduction)

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, end_of_text=None, generator=None,
                 on_token=lambda token: None, custom_step=None, cuda_graphs=True):
        """Continue idx (B, T) by up to max_new_tokens and return (B, T + n). temperature, top_k, top_p, generator: see
        sample_token. custom_step, cuda_graphs: see Decoder.

        A row that has produced end_of_text repeats it. Generation stops when all rows have. on_token gets each new
        column (B,). Beyond block_size tokens, the context window slides, so each token costs a full forward."""
        (B, T), block_size = idx.shape, self.config.block_size
        done = torch.zeros(B, dtype=torch.bool, device=idx.device)

        def draw(logits):
            """Return the next token of each row (B,). A CUDA graph replays this: it updates its state in place."""
            token = sample_token(logits.float(), temperature, top_k, top_p, generator)
            if end_of_text is not None:
                token = token.masked_fill(done, end_of_text)
                done.logical_or_(token == end_of_text)
            return token

        decoder = Decoder(self, B, min(block_size, T + max_new_tokens), custom_step, draw, generator, cuda_graphs)
        for _ in range(max_new_tokens):
            if 0 < decoder.cached < block_size:
                token = decoder.decode_one_token(idx[:, -1:])
            else:  # the prompt, or a window that slides
                token = decoder.prefill(idx[:, -block_size:])
            idx = torch.cat([idx, token[:, None]], dim=1)
            on_token(token)
            if end_of_text is not None and done.all():
                break
        return idx

    @classmethod
    def from_pretrained(cls, name_or_path, dropout=0.0, device="cpu", dtype=torch.float32):
        """Load a name in PRETRAINED (runtime/weights.py), a folder in transformers' format, or a nanoGPT ckpt.pt.
        Copies weights to `device` one tensor at a time. Raises UserError."""
        source = name_or_path if os.path.exists(name_or_path) else fetch_from_hub(name_or_path)
        config = replace(GPTConfig.from_weights(source), dropout=dropout)
        tensors = open_weights(source)
        check_sizes(source, config)
        with torch.device("meta"):
            model = cls(config).to(dtype)
        model.to_empty(device=device)
        model.lm_head.weight = model.transformer.wte.weight  # to_empty unties them
        with weights_errors(source):
            read_weights(model, source, tensors)
        return model


class Decoder:
    """Computes the next tokens of B sequences, draw(logits (B, vocab_size)), with a KV cache of max_length tokens.

    On CUDA, launches take longer than kernels. So with cuda_graphs, decode_one_token captures a graph for each cache
    length: 128, 256, ..., with draw in it, which may use `generator`. custom_step (kernels/decode.py) runs in one."""

    def __init__(self, model, B, max_length, custom_step=None, draw=lambda logits: logits, generator=None,
                 cuda_graphs=True):
        c, weight = model.config, model.transformer.wte.weight
        shape = (B, c.n_head, max_length, c.n_embd // c.n_head)
        self.model, self.max_length, self.custom_step = model, max_length, custom_step
        self.draw, self.generator = draw, generator
        self.caches = [KVCache(*layer) for layer in weight.new_zeros((c.n_layer, 2, *shape))]
        self.cached = 0  # tokens in the cache
        self.token, self.position = (torch.zeros(s, dtype=torch.long, device=weight.device) for s in ((B, 1), 1))
        self.use_cuda_graphs, self.graphs = cuda_graphs and weight.is_cuda, {}  # {cache length: replay}

    def forward(self, idx, positions, length, masked=False):
        """Return the logits after idx (B, T) at `positions` (T,), which attend to the first `length` positions. masked:
        T is 1, and positions after the token's are masked out."""
        mask = torch.arange(length, device=idx.device) > positions if masked else None
        caches = [KVCache(cache.k[:, :, :length], cache.v[:, :, :length]) for cache in self.caches]
        return self.model(idx, positions=positions, caches=caches, mask=mask)[:, 0]

    def prefill(self, idx):
        """Return the tokens drawn after idx (B, T), which replaces what the cache holds."""
        self.cached = idx.size(1)
        return self.draw(self.forward(idx, torch.arange(self.cached, device=idx.device), self.cached))

    def decode_one_token(self, token):
        """Return the tokens drawn after one more token (B, 1). On CUDA the next call overwrites them."""
        self.token.copy_(token)
        self.position.fill_(self.cached)
        length = min(self.max_length, max(128, 2 ** self.cached.bit_length()))
        self.cached += 1
        if not self.use_cuda_graphs:
            return self.draw(self.forward(self.token, self.position, self.cached))
        step = partial(self.forward, self.token, self.position, length, masked=True)
        if self.custom_step:
            length, step = 0, partial(self.custom_step, self.token, self.position, self.caches)
        if length in self.graphs:
            return self.graphs[length]()
        shapes, decoded = (len(token), self.max_length, length), self.model.decoded_shapes
        if first_time := shapes not in decoded:  # eagerly: libraries initialize at their first call
            token = self.draw(step())
            decoded.add(shapes)
        self.graphs[length] = capture_cuda_graph(lambda: self.draw(step()), self.generator)
        return token if first_time else self.graphs[length]()


def capture_cuda_graph(step, generator):
    """Capture step() in a CUDA graph and return a function that replays it. Its output is always the same tensor."""
    graph = torch.cuda.CUDAGraph()
    if generator:
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        output = step()
    return lambda: graph.replay() or output  # replay() returns None


def sample_token(logits, temperature, top_k, top_p, generator=None):
    """Draw a token per row of logits (B, vocab_size); returns (B,). temperature=0 takes the most likely token. top_k
    keeps the k most likely tokens, top_p the most likely ones that together reach that probability."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    logits, order, nucleus = logits / temperature, None, top_p is not None and top_p < 1
    if top_k:  # sorted, as top_p needs
        logits, order = logits.topk(min(top_k, logits.size(-1)))
    elif nucleus:
        logits, order = logits.sort(dim=-1, descending=True)
    probs = F.softmax(logits, dim=-1)
    if nucleus:
        beyond = probs.cumsum(-1) - probs >= top_p
        beyond[:, 0] = False  # keep the most likely token
        probs = probs.masked_fill(beyond, 0)
    noise = torch.empty_like(probs).exponential_(generator=generator)
    choice = (probs / noise).argmax(-1, keepdim=True)  # as torch.multinomial draws
    return (choice if order is None else order.gather(1, choice))[:, 0]
