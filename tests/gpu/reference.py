"""GPT-2 in plain PyTorch, in any precision, and how far a result is from it.

Nothing here uses the project's model or kernels, except the names and shapes of the weights. Most bounds are set by
PyTorch itself: the error of a result against float64 may be at most 1.5 times that of plain PyTorch in the same
precision, and its worst element at most 2.5 times as far off. Seen on an H200: 1.2 times, in decoding, and 1.6
times. Plain PyTorch itself was seen 0.052 off float64, in a layer norm's gradients of GPT-2 small. A wrong formula,
a missing row or a lost bias makes 10 times and more."""

import torch
import torch.nn.functional as F

from model import GPT, GPTConfig

FLOOR = 2.0**-22  # of an error: below it even float32 is only rounding


def errors(got, exact):
    """Return two relative errors: that of the whole tensor, and that of its worst element."""
    away, exact = got.double() - exact.double(), exact.double()
    return (away.norm() / exact.norm()).item(), (away.abs().max() / exact.abs().max()).item()


def check(name, got, plain, exact):
    """Assert that `got` is as close to `exact` as `plain` is, within these factors."""
    assert got.shape == exact.shape, name
    for kind, times, mine, theirs in zip(("norm", "worst"), (1.5, 2.5), errors(got, exact), errors(plain, exact)):
        assert theirs < 0.08, f"{name}: plain PyTorch is off by {theirs:.3g}"
        assert mine <= times * theirs + FLOOR, f"{name}: {kind} {mine:.3g}, plain PyTorch {theirs:.3g}"


def random_weights(config):
    """Return {name: tensor} of a GPT, in bfloat16's values, none of them what it is initialized to."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = GPT(config)
        for p in model.parameters():
            p.data += 0.02 * torch.randn_like(p)
    return {name: p.detach().bfloat16().float() for name, p in model.named_parameters()}


def build(config, weights, dtype):
    """Return a GPT of the project with these weights."""
    with torch.device("cuda"):
        model = GPT(config)
    model.load_state_dict(weights, strict=False)  # lm_head.weight is tied
    return model.to(dtype)


def plain_logits(w, config, idx):
    """Logits (B, T, vocab_size) of the weights w, with nothing but PyTorch's functions."""
    (B, T), C, heads = idx.shape, config.n_embd, config.n_head
    x = w["transformer.wte.weight"][idx] + w["transformer.wpe.weight"][:T]

    def norm(x, name):
        return F.layer_norm(x, (C,), w[f"{name}.weight"], w[f"{name}.bias"])

    def linear(x, name):
        return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    for i in range(config.n_layer):
        block = f"transformer.h.{i}"
        q, k, v = (part.view(B, T, heads, C // heads).transpose(1, 2)
                   for part in linear(norm(x, f"{block}.ln_1"), f"{block}.attn.c_attn").split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, C)
        x = x + linear(y, f"{block}.attn.c_proj")
        middle = F.gelu(linear(norm(x, f"{block}.ln_2"), f"{block}.mlp.c_fc"), approximate="tanh")
        x = x + linear(middle, f"{block}.mlp.c_proj")
    return F.linear(norm(x, "transformer.ln_f"), w["transformer.wte.weight"][: config.vocab_size])


def plain_gradients(weights, config, idx, targets, dtype, scale=1.0):
    """Return (loss, {name: gradient}) by autograd; scale: of the loss in backward, for float16."""
    w = {name: p.to(dtype, copy=True).requires_grad_() for name, p in weights.items()}
    logits = plain_logits(w, config, idx).flatten(0, 1)
    loss = F.cross_entropy(logits if dtype == torch.float64 else logits.float(), targets.flatten(), ignore_index=-1)
    (loss * scale).backward()
    return loss.item(), {name: p.grad / scale for name, p in w.items()}


GPT2 = GPTConfig()
XL_2_LAYERS = GPTConfig(n_layer=2, n_head=25, n_embd=1600)
