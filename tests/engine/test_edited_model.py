"""Usual edits of model.py train as in plain PyTorch, on any number of ranks."""

import math

import numpy as np
import pytest
import torch
from conftest import CHARS, done, stage
from edited_model import GRAPHS, edited_model
from muon_reference import NO_MUON, PlainMuon, by_singular_values

from runtime.checkpoint.tag_reader import TagReader
from runtime.checkpoint.tags import TagStore
from runtime.data.loader import locate_sequences, read_sequences
from runtime.data.sequences import TokenStream

STEPS = 6
ARGUMENTS = ("--optimizer=muon", "--muon_learning_rate=0.02", f"--max_iters={STEPS}", f"--lr_decay_iters={STEPS}",
             "--eval_interval=3", "--keep_last=10", "--weight_decay=0.1")
EDITS = {  # of model.py: [(old, new)]
    "a matrix in every second block": GRAPHS["a matrix in odd blocks"],
    "a matrix of three parts that isn't of queries, keys and values": [
        ("self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd,",
         "self.c_fc = nn.Linear(config.n_embd, 3 * config.n_embd,"),
        ("self.c_proj = nn.Linear(4 * config.n_embd,", "self.c_proj = nn.Linear(3 * config.n_embd,")],
}


def parts_by_name(model):
    """Muon's matrices of these models: the name of a parameter and how many matrices it holds."""
    return {name: 3 if "c_attn" in name else 1 for name, p in model.named_parameters()
            if ".h." in name and p.dim() == 2}


def plain_losses(module, characters, monkeypatch):
    """The losses of the same steps in plain PyTorch, with Newton-Schulz in float64, on all data of a step at once."""
    monkeypatch.setattr(torch.optim._muon, "_zeropower_via_newtonschulz", by_singular_values)
    tokens = np.memmap(characters / "train.bin", np.uint16, mode="r")
    torch.manual_seed(1337)
    model = module.GPT(module.GPTConfig(block_size=32, vocab_size=len(CHARS), n_layer=2, n_head=2, n_embd=32))
    optimizer = PlainMuon(model, 0.1, 0.02 / 1e-3, parts_by_name(model), betas=(0.9, 0.95))
    losses = []
    for it in range(STEPS):
        located = locate_sequences(np.arange(8 * it, 8 * it + 8), [(TokenStream(tokens, 32), 1)], 1337)
        x, y = read_sequences(located, len(CHARS))
        for group in optimizer.param_groups:
            rate = 1e-4 + 0.5 * (1 + math.cos(math.pi * it / STEPS)) * 9e-4
            group["lr"] = rate * group.get("lr_ratio", 1)
        model.zero_grad()
        loss = model(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


# Only with the PyTorch for V100: the reference of these tests is torch.optim.Muon, and CI has it
@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason=NO_MUON)
@pytest.mark.parametrize("edit", EDITS)
def test_muon_trains_the_same_matrices_on_any_number_of_ranks(train, characters, monkeypatch, tmp_path, edit):
    """2 ranks, and from the middle on one. Before, two ranks dropped matrices, or split one that is no q, k, v."""
    expected = plain_losses(edited_model(tmp_path, EDITS[edit]), characters, monkeypatch)
    plant = f"sys.path.insert(0, {str(tmp_path)!r})"
    sizes = {1: ("--batch_size=4",), 2: ("--batch_size=2",)}  # times two micro-steps
    whole = done(train(*ARGUMENTS, *sizes[2], stage(2), ranks=2, plant=plant))
    assert [*whole.losses.values()] == pytest.approx(expected, abs=2e-6)
    half = done(train(*ARGUMENTS, *sizes[2], "--max_iters=3", ranks=2, plant=plant))
    resumed = done(train(*ARGUMENTS, *sizes[1], "--init_from=resume", out_dir=half.out_dir, plant=plant))
    assert [*resumed.losses.values()] == pytest.approx(expected, abs=2e-6)


# Each token takes the second expert in the first step, and the first one from then on
EXPERT_OF_THE_FIRST_STEP = [
    ("probs = self.router(x).softmax(dim=-1)\n",
     "probs = self.router(x).softmax(dim=-1)\n        step = int(self.forwards)\n"
     "        self.forwards += self.training\n"),
    ("        weight, choice = probs.max(dim=-1)\n",
     "        choice = torch.full(x.shape[:2], int(step == 0), device=x.device)\n"
     "        weight = probs.gather(-1, choice[..., None]).squeeze(-1)\n"),
    ("        self.router = nn.Linear(config.n_embd, n_expert, bias=False)\n",
     "        self.router = nn.Linear(config.n_embd, n_expert, bias=False)\n"
     '        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))\n'),
]


def plain_experts(module, characters, unused_as_zero):
    """The first matrix of each of the first three experts after 3 steps of AdamW in plain PyTorch.

    unused_as_zero: whether an expert that no token has used gets a gradient of zeros, instead of None.
    """
    tokens = np.memmap(characters / "train.bin", np.uint16, mode="r")
    torch.manual_seed(1337)
    model = module.GPT(module.GPTConfig(block_size=32, vocab_size=len(CHARS), n_layer=2, n_head=2, n_embd=32))
    optimizer = torch.optim.AdamW(model.parameter_groups(0.1), lr=1e-2, betas=(0.9, 0.95))
    for it in range(3):
        located = locate_sequences(np.arange(8 * it, 8 * it + 8), [(TokenStream(tokens, 32), 1)], 1337)
        optimizer.zero_grad()
        model(*read_sequences(located, len(CHARS))).backward()
        if unused_as_zero:
            for param in model.parameters():
                if param.grad is None:
                    param.grad = torch.zeros_like(param)
        optimizer.step()
    return [expert.c_fc.weight.detach() for expert in model.transformer.h[0].mlp.experts[:3]]


@pytest.mark.parametrize("n", [2, 3])
def test_an_expert_without_tokens_is_stepped_with_a_gradient_of_zero(train, characters, tmp_path, n):
    """Weight decay moves one that no step has used, and momentum also one that the first step has used, where plain
    PyTorch leaves them alone, as docs/bring_your_model.md says."""
    (place, experts), *others = GRAPHS["experts"]
    for old, new in EXPERT_OF_THE_FIRST_STEP:
        assert experts.count(old) == 1, old
        experts = experts.replace(old, new)
    module = edited_model(tmp_path, [(place, experts), *others])
    run = done(train("--optimizer=adamw", "--batch_size=4", "--gradient_accumulation_steps=1", "--max_iters=3",
                     "--eval_interval=3", "--learning_rate=1e-2", "--decay_lr=False", "--grad_clip=0", stage(n),
                     ranks=2, plant=f"sys.path.insert(0, {str(tmp_path)!r})"))
    reader = TagReader(run.out_dir / "iter_3", TagStore(run.out_dir).find("iter_3").manifest)
    found = [reader.get(f"transformer.h.0.mlp.experts.{e}.c_fc.weight") for e in range(3)]
    as_zero = plain_experts(module, characters, unused_as_zero=True)
    as_none = plain_experts(module, characters, unused_as_zero=False)
    for ours, zero in zip(found, as_zero):
        assert torch.allclose(ours, zero, rtol=1e-4, atol=1e-5)

    # The third expert only decays: three times by 1 - 0.01 * 0.1. The second has moved by its momentum, too
    assert torch.allclose(found[2], 0.999**3 * as_none[2], rtol=1e-5, atol=0)
    assert (found[1] - as_none[1]).abs().max() > 5e-3
