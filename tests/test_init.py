"""Initial weights: GPT-2's for the layers of a model, and what a module made or set itself stays."""

import copy
import math

import pytest
import torch
import torch.nn as nn

from model import GPT, MLP, Block, GPTConfig, LMHead

CONFIG = GPTConfig(block_size=16, vocab_size=61, n_layer=2, n_head=2, n_embd=32)
# Drawn before layers were initialized by their class: one number of each matrix, in the order of the random numbers
SIXTH = {
    "transformer.wte.weight": -0.004716735,
    "transformer.wpe.weight": 0.003032189,
    "transformer.h.0.attn.c_attn.weight": -0.015089570,
    "transformer.h.0.attn.c_proj.weight": -0.002762824,
    "transformer.h.0.mlp.c_fc.weight": -0.021795558,
    "transformer.h.0.mlp.c_proj.weight": 0.003754627,
    "transformer.h.1.attn.c_attn.weight": 0.012938624,
    "transformer.h.1.attn.c_proj.weight": 0.010364666,
    "transformer.h.1.mlp.c_fc.weight": -0.002718897,
    "transformer.h.1.mlp.c_proj.weight": -0.014308206,
}


def gpt(monkeypatch=None, mlp=MLP):
    """A GPT with this class of MLP."""
    if monkeypatch is not None:
        monkeypatch.setattr("model.MLP", mlp)
    torch.manual_seed(1337)
    return GPT(copy.copy(CONFIG))


def test_a_seed_gives_the_same_weights_as_before():
    model = gpt()
    after = torch.rand(1).item()
    found = {name: p.flatten()[5].item() for name, p in model.named_parameters() if p.dim() == 2}
    assert found == pytest.approx(SIXTH, abs=2e-9)
    assert sum(p.double().abs().sum().item() for p in model.parameters()) == pytest.approx(507.54850187704506, rel=1e-9)
    assert after == pytest.approx(0.7483842372894287, abs=1e-7)


def test_deviations_are_gpt2s():
    model = GPT(GPTConfig(block_size=256, vocab_size=640, n_layer=8, n_head=4, n_embd=256))
    for name, p in model.named_parameters():
        if p.dim() == 2:
            std = 0.02 / math.sqrt(16) if "c_proj" in name else 0.02
            assert p.std().item() == pytest.approx(std, rel=0.02), name
        else:
            assert (p == (1 if ".ln_" in name and name.endswith("weight") else 0)).all(), name


class OwnMLP(MLP):
    """Everything that a user may set."""

    def __init__(self, config):
        super().__init__(config)
        self.gain = nn.Parameter(torch.ones(4, 8))
        self.table = nn.Parameter(torch.full((3, 5), 7.0))
        nn.init.zeros_(self.c_proj.weight)
        self.by_data = nn.Linear(32, 32)
        self.by_data.weight.data.zero_()
        self.by_data.bias.data.fill_(-2.0)
        self.orthogonal = nn.Linear(32, 32)
        nn.init.orthogonal_(self.orthogonal.weight)
        self.plain = nn.Linear(32, 48)
        self.lookup = nn.Embedding(50, 40, padding_idx=3)
        self.norm = nn.LayerNorm(32)
        self.norm.weight.data.fill_(0.5)
        self.resets = Resets(32, 32)


class Resets(nn.Linear):
    def reset_parameters(self):
        nn.init.eye_(self.weight)
        nn.init.ones_(self.bias)


def test_what_a_module_set_stays_and_its_layers_are_gpt2s(monkeypatch):
    for block in gpt(monkeypatch, OwnMLP).transformer.h:
        mlp = block.mlp
        assert (mlp.gain == 1).all() and (mlp.table == 7).all()
        assert (mlp.c_proj.weight == 0).all() and (mlp.c_proj.bias == 0).all()
        assert (mlp.by_data.weight == 0).all() and (mlp.by_data.bias == -2).all()
        eye = mlp.orthogonal.weight @ mlp.orthogonal.weight.T
        assert torch.allclose(eye, torch.eye(32), atol=1e-5) and (mlp.orthogonal.bias == 0).all()
        assert torch.equal(mlp.resets.weight, torch.eye(32)) and (mlp.resets.bias == 1).all()
        assert (mlp.norm.weight == 0.5).all()
        assert mlp.c_fc.weight.std().item() == pytest.approx(0.02, rel=0.1)
        assert mlp.plain.weight.std().item() == pytest.approx(0.02, rel=0.1) and (mlp.plain.bias == 0).all()
        assert mlp.lookup.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_a_tied_layer_is_drawn_once(monkeypatch):
    """All blocks have one MLP: the weights after it are those of the seed, and it has the first block's."""

    class Tied(Block):
        shared = []

        def __init__(self, config):
            super().__init__(config)
            self.shared.append(self.mlp)
            self.mlp = self.shared[0]

    monkeypatch.setattr("model.Block", Tied)
    model = gpt()
    assert model.transformer.h[1].mlp is model.transformer.h[0].mlp
    monkeypatch.undo()
    plain = gpt()
    for name in ("mlp.c_fc", "mlp.c_proj", "attn.c_proj"):
        mine, its = (m.transformer.h[0].get_submodule(name).weight for m in (model, plain))
        assert torch.equal(mine, its)


@pytest.mark.parametrize("set_by, std", [(lambda w: None, 0.02), (lambda w: nn.init.normal_(w, std=0.3), 0.3),
                                         (lambda w: w.data.zero_(), 0)])
def test_a_head_that_is_not_tied(monkeypatch, set_by, std):
    """Its own weight, of memory that nobody has filled, is drawn."""

    class Untied(LMHead):
        def __init__(self, wte, vocab_size):
            super().__init__(wte, vocab_size)
            self.weight = nn.Parameter(torch.empty_like(wte.weight))
            self.weight.data.uniform_(5, 6)  # what was there before
            set_by(self.weight)

    monkeypatch.setattr("model.LMHead", Untied)
    assert gpt().lm_head.weight.std().item() == pytest.approx(std, rel=0.05)


@pytest.mark.parametrize("make, std", [(torch.empty_like, 0.02), (torch.zeros_like, 0)])
def test_memory_that_is_zero_is_not_taken_for_zeros(monkeypatch, make, std):
    """A head of 50 MB gets fresh memory, which is 0."""

    class Untied(LMHead):
        def __init__(self, wte, vocab_size):
            super().__init__(wte, vocab_size)
            self.weight = nn.Parameter(make(wte.weight))

    monkeypatch.setattr("model.LMHead", Untied)
    model = GPT(GPTConfig(block_size=8, vocab_size=50304, n_layer=1, n_head=2, n_embd=256))
    assert model.lm_head.weight.std().item() == pytest.approx(std, rel=0.05)
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_model_without_memory_is_made():
    """As the plan does. Nothing is drawn."""
    with torch.device("meta"):
        assert all(p.is_meta for p in GPT(CONFIG).parameters())
