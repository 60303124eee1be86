"""Models of another shape: the cache of their keys, their parameters and FLOPs, and what is refused in one sentence."""

import pytest
import torch
from edited_model import EXPERTS, GRAPHS, edited_model

from model import GPT, GPTConfig
from runtime.engine.fast_paths import check_trainable
from runtime.errors import UserError
from runtime.export import hf
from runtime.plan.run_plan import count_params

SHAPE = {"block_size": 48, "vocab_size": 61, "n_layer": 2, "n_head": 4, "n_embd": 32}

# Two heads of keys and values for four of queries
GQA = [
    ("QKVLinear(config.n_embd, 3 * config.n_embd,", "nn.Linear(config.n_embd, 2 * config.n_embd,"),
    ("self.c_attn(x).split(C, dim=2)", "self.c_attn(x).split([C, C // 2, C // 2], dim=2)"),
    ("k = k.view(B, T, self.n_head, C", "k = k.view(B, T, self.n_head // 2, C"),
    ("v = v.view(B, T, self.n_head, C", "v = v.view(B, T, self.n_head // 2, C"),
    ("        if mask is not None:\n            # One", """        k = k.repeat_interleave(2, dim=1)
        v = v.repeat_interleave(2, dim=1)
        if mask is not None:
            # One"""),
]
ROPE = [  # no position embeddings; here without rotations, which have no parameters
    ('            "wpe": nn.Embedding(config.block_size, config.n_embd),\n', ""),
    ("self.transformer.wte(idx) + self.transformer.wpe(positions)", "self.transformer.wte(idx)"),
]
MLP = "        self.mlp = MLP(config)\n"
SCALAR = [(MLP, f"{MLP}        self.lam = nn.Parameter(torch.tensor(1.0))\n")]
EDITS = {"fewer heads of keys": GQA, "no position embeddings": ROPE, **GRAPHS}


def make(tmp_path, edits, **shape):
    """A GPT with these edits whose logits are some units apart, and its module."""
    module = edited_model(tmp_path, edits)
    torch.manual_seed(0)
    model = module.GPT(module.GPTConfig(**{**SHAPE, **shape})).eval()
    for p in model.parameters():
        p.data += 0.15 * torch.randn_like(p)
    return model, module


@pytest.mark.parametrize("edit", EDITS)
@torch.no_grad()
def test_logits_with_a_cache_are_those_without(edit, tmp_path):
    """Of a prompt of 7 tokens and of each of 13 more. Also of blocks that run twice, which have keys for each time."""
    model, module = make(tmp_path, EDITS[edit])
    model.step = 0
    idx = torch.randint(61, (2, 20))
    whole = model(idx)
    decoder = module.Decoder(model, 2, 20)
    assert torch.allclose(decoder.prefill(idx[:, :7]), whole[:, 6], atol=1e-4) and whole.std() > 0.3
    for at in range(7, 20):
        logits = decoder.decode_one_token(idx[:, at : at + 1])
        assert torch.allclose(logits, whole[:, at], atol=1e-4), at


def test_the_cache_has_the_heads_of_the_attention(tmp_path):
    model, module = make(tmp_path, GQA)
    decoder = module.Decoder(model, 3, 40)
    decoder.prefill(torch.randint(61, (3, 7)))
    assert [tuple(cache.keys[0].shape) for cache in decoder.caches] == [(3, 2, 40, 8)] * 2


def test_flops_of_edited_models_by_hand(tmp_path):
    """6 per parameter that a token is multiplied by, and attention's 12 T per column of its heads."""
    C, T, V = 32, 48, 61
    block, attention = 12 * C * C + 13 * C, 12 * C * T
    head = V * C + 2 * C  # with the last layer norm

    def flops(edits, name):
        (tmp_path / name).mkdir()
        return make(tmp_path / name, edits)[0].flops_per_token()

    assert flops([], "plain") == 6 * (head + 2 * block) + 2 * attention
    assert flops(ROPE, "rope") == flops([], "again")
    assert flops(GQA, "gqa") == 6 * (head + 2 * (block - C * C - C)) + 2 * attention
    assert flops(GRAPHS["blocks shared in pairs"], "shared") == flops([], "third")
    mlp, router = 8 * C * C + 5 * C, 16 * C
    dense = 6 * (head + 2 * (block + 15 * mlp + router)) + 2 * attention
    assert flops(EXPERTS, "experts") == dense
    old, new = EXPERTS[0]
    said = old, new.replace("        self.router =", "        self.experts_per_token = 1\n        self.router =")
    assert flops([said, *EXPERTS[1:]], "top1") == 6 * (head + 2 * (block + router)) + 2 * attention


def test_parameters_of_a_model_without_position_embeddings_or_ties(tmp_path):
    (tmp_path / "rope").mkdir()
    model, _ = make(tmp_path / "rope", ROPE)
    assert model.num_params() == model.num_params(positions=False) == 61 * 32 + 2 * (12 * 32**2 + 13 * 32) + 64
    untied = ("self.weight = wte.weight\n", "self.weight = nn.Parameter(torch.ones_like(wte.weight))\n")
    model, _ = make(tmp_path, [untied])
    plain = GPT(GPTConfig(**SHAPE))
    assert model.num_params() == plain.num_params() + 61 * 32
    assert model.flops_per_token() == plain.flops_per_token()


def test_a_parameter_without_a_dimension_is_refused_in_one_sentence(tmp_path, monkeypatch):
    """DeepSpeed can't shard it. The plan refuses it, before anything starts."""
    model, module = make(tmp_path, SCALAR)
    told = (r"^the parameter transformer\.h\.0\.lam has no dimension, and DeepSpeed can't shard it: make it a vector "
            r"of one number, as nn\.Parameter\(torch\.zeros\(1\)\) is$")
    with pytest.raises(UserError, match=told):
        check_trainable(model)
    monkeypatch.setattr("runtime.plan.run_plan.GPT", module.GPT)
    with pytest.raises(UserError, match=told):
        count_params(module.GPTConfig(**SHAPE), None, False)


@pytest.mark.parametrize("edits, told", [
    (GRAPHS["a matrix in odd blocks"], "a GPT-2 in transformers has no parameter transformer.h.1.mix.weight"),
    (GQA, r"transformer.h.0.attn.c_attn.weight has shape \(64, 32\), which is not that of a GPT-2"),
    (SCALAR, "a GPT-2 in transformers has no parameter transformer.h.0.lam")])
def test_another_architecture_is_not_exported(edits, told, tmp_path):
    model, _ = make(tmp_path, edits)
    with pytest.raises(UserError, match=told):
        hf.write_model(model, tmp_path / "hf", None, "float32")
    assert not (tmp_path / "hf").exists()
