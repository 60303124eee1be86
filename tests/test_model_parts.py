"""Models without memory, ties by identity, and pretrained weights in an edited model.py."""

import pytest
import torch
from conftest import random_gpt2
from edited_model import GRAPHS, HEAD, edited_model
from torch import nn

from model import GPT, GPTConfig
from runtime.errors import UserError
from runtime.model_parts import (
    persistent_buffers,
    replace_parameter,
    replace_parameters,
    tensors_of,
    ties_of,
    without_memory,
)

SMALL = {"block_size": 24, "vocab_size": 28, "n_layer": 2, "n_head": 2, "n_embd": 32}
ALIBI = """        self.backends = None  # chosen at the first forward on CUDA
        slopes = 2.0 ** (-8 * torch.arange(1, config.n_head + 1) / config.n_head)
        self.register_buffer("slopes", slopes, persistent=False)
"""
UNTIED = f"{HEAD}        self.lm_head.weight = nn.Parameter(torch.zeros_like(self.lm_head.weight))\n"


class Odd(nn.Module):
    """One parameter in two modules from a local name, one by assignment, and all kinds of other tensors."""

    def __init__(self):
        super().__init__()
        weight = nn.Parameter(torch.ones(3))
        weight.is_gate = True
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3)
        self.a.gate = weight
        self.b.gate = weight
        self.b.weight = self.a.weight
        self.b.bias.requires_grad = False
        self.register_buffer("table", torch.arange(3))
        self.register_buffer("scratch", torch.full((2,), 7.0), persistent=False)
        self.plain = torch.full((4,), 5.0)


class Copied(nn.Module):
    """A buffer that is computed from a parameter."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("first", self.layer.weight.detach() * 2)


class Reading(nn.Module):
    """An initialization that reads numbers."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.largest = self.layer.weight.max().item()


def test_a_model_without_memory_has_all_but_parameters():
    model = without_memory(Odd)
    assert all(param.is_meta for param in model.parameters())
    assert ties_of(model) == [["a.weight", "b.weight"], ["a.gate", "b.gate"]] == ties_of(Odd())
    assert model.plain.tolist() == [5.0] * 4 and model.scratch.tolist() == [7.0] * 2
    assert [*persistent_buffers(model)] == ["table"] and model.table.tolist() == [0, 1, 2]
    replace_parameters(model, lambda name, param: torch.full(param.shape, float(len(name))))
    assert tensors_of(model) == tensors_of(Odd())
    assert model.b.gate is model.a.gate and model.a.gate.is_gate and not model.b.bias.requires_grad
    assert model.b.weight.unique().tolist() == [8.0]  # by its first name, a.weight
    replace_parameter(model, model.a.gate, torch.zeros(2))
    assert model.b.gate is model.a.gate and model.a.gate.tolist() == [0, 0]


@pytest.mark.parametrize("kind", [Copied, Reading])
def test_a_model_that_reads_its_parameters_is_made_as_usual(kind):
    model = without_memory(kind)
    assert not model.layer.weight.is_meta
    if kind is Copied:
        assert torch.equal(model.first, 2 * model.layer.weight)


def test_differences_name_tensors_or_ties():
    model = tensors_of(GPT(GPTConfig(**SMALL)))
    wider = tensors_of(GPT(GPTConfig(**SMALL | {"block_size": 25})))
    untied = GPT(GPTConfig(**SMALL))
    untied.lm_head.weight = nn.Parameter(torch.zeros(64, 32))
    assert model.differences(model) == []
    assert model.differences(wider) == ["transformer.wpe.weight"]
    assert model.differences(tensors_of(untied)) == ["lm_head.weight is transformer.wte.weight"]


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A folder with a GPT-2 as transformers saves it, and the same model."""
    folder = tmp_path_factory.mktemp("weights")
    model = random_gpt2(0.1, vocab_size=28, n_positions=24, n_embd=32, bos_token_id=0, eos_token_id=0)
    model.save_pretrained(folder)
    return folder, model


def test_pretrained_weights_keep_buffers(weights, tmp_path):
    """ALiBi's slopes (Press et al., 2021) were whatever was in memory."""
    module = edited_model(tmp_path, [("        self.backends = None  # chosen at the first forward on CUDA\n", ALIBI)])
    for dtype in (torch.float32, torch.bfloat16):
        model = module.GPT.from_pretrained(str(weights[0]), dtype=dtype)
        assert model.transformer.h[1].attn.slopes.tolist() == [2.0**-4, 2.0**-8]
        assert {param.dtype for param in model.parameters()} == {dtype}
        assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}
        assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_an_untied_head_starts_as_the_embedding(weights, tmp_path):
    module = edited_model(tmp_path, [(HEAD, UNTIED)])
    model = module.GPT.from_pretrained(str(weights[0]))
    assert model.lm_head.weight is not model.transformer.wte.weight
    idx = torch.arange(24)[None]
    with torch.no_grad():
        expected = weights[1](idx).logits
        assert torch.allclose(model(idx), expected, atol=1e-4)
        model.crop_vocab_size(20)  # each of the two parameters
        assert model.lm_head.weight.shape == model.transformer.wte.weight.shape == (64, 32)
        assert torch.allclose(model(idx[:, :20]), expected[:, :20, :20], atol=1e-4)


@pytest.mark.parametrize("edits, message", [
    (GRAPHS["one MLP"], "transformer.h.0.mlp.c_fc.weight and transformer.h.1.mlp.c_fc.weight differ, and this model "
     "has one parameter for both"),
    ([("    bias: bool = True", "    bias: bool = False")], "this model has no place for transformer.h.0.attn.c_attn."
     "bias, transformer.h.0.attn.c_proj.bias, transformer.h.0.ln_1.bias, which GPT-2 has: restore model.py, or")])
def test_weights_that_a_model_cannot_hold_are_refused(weights, tmp_path, edits, message):
    """They were left out."""
    module = edited_model(tmp_path, edits)
    with pytest.raises(UserError, match=message.replace(".", "[.]")):
        module.GPT.from_pretrained(str(weights[0]))


def test_cropping_keeps_ties():
    model = GPT(GPTConfig(**SMALL | {"vocab_size": 100}))
    model.again = nn.Embedding(24, 32)
    model.again.weight = model.transformer.wpe.weight
    model.crop_block_size(10)
    assert model.again.weight is model.transformer.wpe.weight and model.again.weight.shape == (10, 32)
    model.crop_vocab_size(60)
    assert model.lm_head.weight is model.transformer.wte.weight and len(model.lm_head.weight) == 64
    untied = GPT(GPTConfig(**SMALL | {"vocab_size": 100}))
    untied.lm_head.weight = nn.Parameter(torch.ones(128, 32))
    untied.crop_vocab_size(60)
    assert untied.lm_head.weight.shape == untied.transformer.wte.weight.shape == (64, 32)
    assert untied.lm_head.weight.unique().tolist() == [1]
