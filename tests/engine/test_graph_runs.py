"""Runs of the training script on edited graphs: a resume from two ranks on one, Muon, another
optimizer, local sums, and offload. Their losses are those of plain PyTorch, within 2e-6."""

import math
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from conftest import CHARS, done, every, stage
from edited_model import BY_MICRO_BATCH, GRAPHS, edited_model
from muon_reference import PlainMuon, by_singular_values

from runtime.data.loader import locate_sequences, read_sequences
from runtime.data.sequences import TokenStream

STEPS = 20
SEQUENCES = 8  # of a step
ARGUMENTS = (
    "--n_layer=4",
    f"--max_iters={STEPS}",
    f"--lr_decay_iters={STEPS}",
    "--eval_interval=10",
    "--keep_last=10",
    "--muon_learning_rate=0.02",
)
# Adam's eps keeps elements of nearly no gradient from taking full steps
ADAM = "lr=1e-3, betas=(0.9, 0.95), eps=1e-5"
OPTIMIZERS = {
    "adamw": f"torch.optim.AdamW(groups, {ADAM})",
    "muon": f"torch.optim.AdamW(groups, {ADAM})",  # of the other parameters
    # Decay in the gradient would hide that of experts with few tokens
    "NAdam": f"torch.optim.NAdam(groups, {ADAM}, decoupled_weight_decay=True)",
}


@pytest.fixture(scope="module")
def edited(tmp_path_factory):
    """edited(graph): the model.py of this edit, as a module."""
    found = {}

    def module(graph):
        if graph not in found:
            found[graph] = edited_model(tmp_path_factory.mktemp("edited"), GRAPHS[graph])
        return found[graph]

    return module


def plant(module: ModuleType, optimizer: str) -> str:
    """Return the code that lets a run take this model.py and this optimizer."""
    return f"""
sys.path.insert(0, {str(Path(module.__file__).parent)!r})
import torch
from runtime.engine import setup
setup.make_adamw = lambda groups, *_, **options: {OPTIMIZERS[optimizer]}
"""


# ---------------------------------------------------------------------------------------------
# In plain PyTorch


def micro_batches_of(step: int, tokens: np.ndarray, number: int) -> list[tuple]:
    """Return the (x, y) of each micro-batch of a step.

    number: of micro-batches, over all ranks: one of each rank, or several of one rank.
    """
    ids = np.arange(SEQUENCES * step, SEQUENCES * (step + 1))
    batches = []
    for own in np.split(ids, number):
        located = locate_sequences(own, [(TokenStream(tokens, 32), 1)], 1337)
        batches.append(read_sequences(located, len(CHARS)))
    return batches


def make_optimizer(model: torch.nn.Module, optimizer: str):
    if optimizer == "muon":
        parts = {}
        for name, p in model.named_parameters():
            if ".h." in name and p.dim() == 2:
                parts[name] = 3 if "c_attn" in name else 1
        return PlainMuon(model, 0.1, 0.02 / 1e-3, parts, betas=(0.9, 0.95), eps=1e-5)
    return eval(OPTIMIZERS[optimizer], {"torch": torch, "groups": model.parameter_groups(0.1)})


def plain_losses(
    module: ModuleType, characters: Path, optimizer: str, number: int, steps: int = STEPS
) -> list[float]:
    """Return the losses of the steps of a run. number: of micro-batches in a step."""
    tokens = np.memmap(characters / "train.bin", np.uint16, mode="r")
    torch.manual_seed(1337)
    model = module.GPT(
        module.GPTConfig(block_size=32, vocab_size=len(CHARS), n_layer=4, n_head=2, n_embd=32)
    )
    stepper = make_optimizer(model, optimizer)
    losses = []
    for step in range(steps):
        rate = 1e-4 + 0.5 * (1 + math.cos(math.pi * step / STEPS)) * 9e-4
        for group in stepper.param_groups:
            group["lr"] = rate * group.get("lr_ratio", 1)
        for p in model.parameters():  # a gradient that doesn't come is zero
            p.grad = torch.zeros_like(p)
        total = 0.0
        for x, y in micro_batches_of(step, tokens, number):
            loss = model(x, y)
            (loss / number).backward()
            total += loss.item()
        losses.append(total / number)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        stepper.step()
    return losses


# ---------------------------------------------------------------------------------------------
# By the training script

RESUMES = [  # (edit, optimizer, ZeRO stage on two ranks, then on one)
    ("blocks twice", "adamw", 3, 3),
    every("blocks twice", "adamw", 2, 3),
    every("a block never", "adamw", 2, 2),
    every("a block never", "adamw", 3, 2),
    every("blocks shared in pairs", "adamw", 2, 2),
    every("blocks shared in pairs", "adamw", 3, 3),
    every("one MLP", "adamw", 2, 3),
    every("one MLP", "adamw", 3, 2),
    ("a block skipped per rank", "adamw", 2, 2),
    every("a block skipped per rank", "adamw", 3, 3),
    every("an order per rank", "adamw", 2, 3),
    every("an order per rank", "adamw", 3, 2),
    ("experts", "NAdam", 2, 3),
    every("experts", "NAdam", 3, 2),
    every("experts", "adamw", 2, 2),
    every("experts", "adamw", 3, 3),
    ("skip connections", "muon", 2, 2),
    every("skip connections", "adamw", 2, 3),
    every("skip connections", "adamw", 3, 2),
    every("a matrix in odd blocks", "muon", 2, 2),
    every("a matrix in odd blocks", "adamw", 2, 3),
    every("a matrix in odd blocks", "adamw", 3, 2),
]


@pytest.mark.parametrize("graph, optimizer, first, second", RESUMES)
def test_a_run_goes_on_on_one_rank(
    train, characters, edited, monkeypatch, graph, optimizer, first, second
):
    """Ten steps on two ranks, then ten on one rank in two micro-steps: the same micro-batches."""
    monkeypatch.setattr(torch.optim._muon, "_zeropower_via_newtonschulz", by_singular_values)
    number = 2 if graph in BY_MICRO_BATCH else 1
    expected = plain_losses(edited(graph), characters, optimizer, number)
    arguments = [*ARGUMENTS, "--batch_size=4"]
    if optimizer == "muon":
        arguments.append("--optimizer=muon")
    options = {"plant": plant(edited(graph), optimizer), "timeout": 100}
    on_two = ("--gradient_accumulation_steps=1", "--max_iters=10", stage(first))
    half = done(train(*arguments, *on_two, ranks=2, **options))
    assert [*half.losses.values()] == pytest.approx(expected[:10], abs=2e-6)
    on_one = ("--gradient_accumulation_steps=2", "--init_from=resume", stage(second))
    resumed = done(train(*arguments, *on_one, out_dir=half.out_dir, **options))
    assert [*resumed.losses.values()] == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize(
    "graph, n, local",
    [
        every("blocks twice", 2, True),
        every("blocks twice", 2, False),
        every("blocks twice", 3, True),
        every("blocks twice", 3, False),
        every("one MLP", 2, False),
        every("one MLP", 3, False),
    ],
)
def test_two_micro_steps_of_two_ranks(train, characters, edited, graph, n, local):
    """With accumulate_locally, which "auto" would take here, and without."""
    run = done(
        train(
            *ARGUMENTS,
            f"--accumulate_locally={local}",
            stage(n),
            ranks=2,
            plant=plant(edited(graph), "adamw"),
            timeout=100,
        )
    )
    # At ZeRO-3, local accumulation is for blocks that our gradients gather one by one
    assert ("each rank accumulates gradients locally" in run.stdout) == (local and n == 2)
    if local and n == 3:
        assert "no local accumulation: without blocks, ZeRO-3 has float32 sums of all gradients" in run.stdout
    expected = plain_losses(edited(graph), characters, "adamw", number=1)
    assert [*run.losses.values()] == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize(
    "graph, ranks",
    [
        ("blocks twice", 2),
        every("blocks twice", 1),
        every("experts", 2),
        every("experts", 1),
        ("a block skipped per rank", 2),
        every("a block skipped per rank", 1),
    ],
)
def test_offload_is_right_or_refused(train, characters, edited, graph, ranks):
    """At ZeRO-3: one sentence and exit code 2 within seconds, or the losses.

    The optimizer is PyTorch's AdamW, which needs no compiler.
    """
    run = train(
        *ARGUMENTS,
        "--max_iters=6",
        f"--batch_size={SEQUENCES // ranks}",
        "--gradient_accumulation_steps=1",
        "--deepspeed_config=config/ds/zero3_offload.json",
        ranks=ranks,
        plant=plant(edited(graph), "adamw"),
        timeout=60,
    )
    if run.returncode == 2:
        assert "Traceback" not in run.stderr
        *_, sentence = run.stderr.strip().splitlines()
        assert ": " in sentence, run.stderr  # what is wrong: what to do
        assert not run.losses
        return
    number = ranks if graph in BY_MICRO_BATCH else 1
    expected = plain_losses(edited(graph), characters, "adamw", number, steps=6)
    assert [*done(run).losses.values()] == pytest.approx(expected, abs=2e-6)
