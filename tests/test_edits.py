"""Usual edits of model.py and the training script: each is a patch in edits/, applied to a copy of the
project, which is then run as a user runs it.

An edit is right if the losses of a run are those of plain PyTorch with the edited model, and if
sample.py writes what the likeliest tokens of its full logits are. Or it is refused in one sentence. After
a change of model.py, apply a patch by hand where it no longer fits, and write it anew with git diff.
"""

import importlib.util
import json
import math
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import CHARS, ROOT, SMALL, done, every, launch, read_history, stage

from runtime.data.loader import locate_sequences, read_sequences
from runtime.data.sequences import TokenStream

STEPS = 12
HALF = 6  # after which a run is resumed with another number of ranks
SEQUENCES = 8  # of a step, over all ranks
SHAPE = {"n_layer": 4, "n_head": 4, "n_embd": 64}
TOLERANCE = 2e-6
PROMPT = "the cat"
NEW_TOKENS = 40  # with the prompt more than block_size, so that the window slides
PATCHES = ROOT / "tests" / "edits"
ALL = sorted(path.stem for path in PATCHES.glob("*.patch"))
# What can't be trained, and the message
REFUSED = {"zero_dimensional_parameter": "transformer.h.0.lam has no dimension"}
EDITS = [name for name in ALL if name not in REFUSED]
FIELDS = {"gqa": {"n_kv_head": 2}}  # of GPTConfig, and settings of the script
# Only these have GPT-2's parameters, its loss in the logits, and its forward
EXPORTED = (
    "another_optimizer",
    "batch_ramp",
    "logged_activation_norms",
    "softcap_in_the_loss",
    "untied_head",
)
BY_MICRO_BATCH = ("moe_with_aux_loss",)  # whose loss depends on how a step is divided
# With seed 1337, a token's two likeliest experts are 1e-7 apart in one step, so rounding chooses
SEEDS = {"moe_with_aux_loss": 6}


# ---------------------------------------------------------------------------------------------
# Copies of the project


@pytest.fixture(scope="module")
def copy_of(tmp_path_factory) -> Callable[[str], Path]:
    """copy_of(edit): a folder with the project's programs, and this edit applied."""
    copies = {}

    def copy(edit: str) -> Path:
        if edit not in copies:
            copies[edit] = edited_copy(tmp_path_factory.mktemp(edit), edit)
        return copies[edit]

    return copy


def edited_copy(folder: Path, edit: str) -> Path:
    """Copy the programs into a folder and apply a patch there. Return the folder."""
    for name in ("runtime", "config"):
        shutil.copytree(ROOT / name, folder / name)
    for path in [*ROOT.glob("*.py"), *ROOT.glob("*.json")]:
        shutil.copy2(path, folder)
    patch = PATCHES / f"{edit}.patch"
    command = ["git", "apply", str(patch)]
    # No repository that the folder may be in: git would look there for the files
    env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    applied = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert applied.returncode == 0, f"{patch.name} no longer fits: {applied.stderr}"
    return folder


def model_of(folder: Path) -> ModuleType:
    """Return the model.py of a copy as a module."""
    spec = importlib.util.spec_from_file_location(f"model_{folder.name}", folder / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---------------------------------------------------------------------------------------------
# In plain PyTorch


def train_plainly(folder: Path, edit: str, characters: Path, ranks: int, accumulation: int):
    """Train the model of a copy. Return (the losses of the steps, the trained model).

    ranks, accumulation: by which a run divides a step into micro-batches.
    """
    module = model_of(folder)
    seed = SEEDS.get(edit, 1337)
    torch.manual_seed(seed)
    config = module.GPTConfig(block_size=32, vocab_size=len(CHARS), **SHAPE, **FIELDS.get(edit, {}))
    model = module.GPT(config)
    groups = model.parameter_groups(0.1)
    if edit == "another_optimizer":
        optimizer = torch.optim.Adam(groups, betas=(0.9, 0.95))
    else:
        optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    tokens = np.memmap(characters / "train.bin", np.uint16, mode="r")
    losses = []
    position = 0
    for step in range(STEPS):
        size = SEQUENCES
        if edit == "batch_ramp" and step < 3:  # one micro-step
            size = SEQUENCES // accumulation
        number = ranks * accumulation if edit in BY_MICRO_BATCH else 1
        for group in optimizer.param_groups:
            group["lr"] = 1e-4 + 0.5 * (1 + math.cos(math.pi * step / STEPS)) * 9e-4
        for param in model.parameters():  # a gradient that doesn't come is zero
            param.grad = torch.zeros_like(param)
        total = 0.0
        for ids in np.split(np.arange(position, position + size), number):
            loss = plain_loss(model, *sequences(tokens, ids, seed))
            (loss / number).backward()
            total += loss.item()
        position += size
        losses.append(total / number)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return losses, model.eval()


def sequences(
    tokens: np.ndarray, ids: np.ndarray, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (x, y) of these sequences, (number, block_size) each."""
    located = locate_sequences(ids, [(TokenStream(tokens, 32), 1)], seed)
    return read_sequences(located, len(CHARS))


def plain_loss(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the model's loss, with LMHead.losses on all rows at once and its gradient by autograd."""
    head = model.lm_head

    def forward(hidden, targets, reduction):
        assert reduction == "mean"
        return head.losses(hidden.flatten(0, 1), targets.flatten()).mean()

    head.forward = forward
    loss = model(x, y)
    del head.forward
    return loss


@torch.no_grad()
def likeliest_text(model: torch.nn.Module) -> str:
    """Return what follows PROMPT, by a loop over full logits."""
    idx = torch.tensor([[CHARS.index(char) for char in PROMPT]])
    for _ in range(NEW_TOKENS):
        token = model(idx[:, -32:])[:, -1].argmax(dim=-1, keepdim=True)
        idx = torch.cat([idx, token], dim=1)
    return "".join(CHARS[i] for i in idx[0, len(PROMPT) :].tolist())


@pytest.fixture(scope="module")
def plainly(copy_of, characters):
    """plainly(edit, ranks, accumulation): what train_plainly() returns."""
    found = {}

    def run(edit: str, ranks: int, accumulation: int):
        key = edit, ranks * accumulation, accumulation
        if key not in found:
            found[key] = train_plainly(copy_of(edit), edit, characters, ranks, accumulation)
        return found[key]

    return run


# ---------------------------------------------------------------------------------------------
# By the programs


@pytest.fixture(scope="module")
def train_edited(copy_of, characters, tmp_path_factory):
    """train_edited(edit, stage, ranks, accumulation, *arguments): a run of the training script."""

    def run(edit: str, n: int, ranks: int, accumulation: int, *args: str, out_dir=None):
        folder = Path(out_dir or tmp_path_factory.mktemp("run") / "out")
        shape = [f"--{name}={value}" for name, value in {**SHAPE, **FIELDS.get(edit, {})}.items()]
        ended = launch(
            copy_of(edit) / "train_deepspeed.py",
            *SMALL,
            *shape,
            f"--dataset={characters}",
            f"--out_dir={folder}",
            f"--batch_size={SEQUENCES // ranks // accumulation}",
            f"--gradient_accumulation_steps={accumulation}",
            f"--max_iters={STEPS}",
            f"--lr_decay_iters={STEPS}",
            "--eval_interval=6",
            f"--seed={SEEDS.get(edit, 1337)}",
            stage(n),
            *args,
            ranks=ranks,
            timeout=100,
        )
        assert "Traceback" not in ended.stderr, ended.stderr
        losses = [record["loss"] for record in read_history(folder) if "loss" in record]
        return SimpleNamespace(
            returncode=ended.returncode,
            stdout=ended.stdout,
            stderr=ended.stderr,
            losses=losses,
            out_dir=folder,
        )

    return run


@pytest.fixture(scope="module")
def resumed(train_edited):
    """resumed(edit): a run of 6 steps on two ranks, and 6 on one at the other stage, recomputed."""
    runs = {}

    def run(edit: str):
        if edit not in runs:
            n = 2 + EDITS.index(edit) % 2
            half = done(train_edited(edit, n, 2, 2, f"--max_iters={HALF}"))
            rest = ("--init_from=resume", "--gradient_checkpointing=True")
            runs[edit] = done(train_edited(edit, 5 - n, 1, 4, *rest, out_dir=half.out_dir))
        return runs[edit]

    return run


@pytest.mark.parametrize("edit", EDITS)
def test_a_run_goes_on_on_one_rank(resumed, plainly, edit):
    expected, _ = plainly(edit, 2, 2)
    assert resumed(edit).losses == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("edit", EDITS)
def test_a_sample_is_the_likeliest_text(resumed, plainly, copy_of, edit):
    """Of the model that plain PyTorch trained."""
    _, model = plainly(edit, 2, 2)
    sampled = launch(
        copy_of(edit) / "sample.py",
        f"--out_dir={resumed(edit).out_dir}",
        "--tag=final",
        f"--start={PROMPT}",
        "--temperature=0",
        "--num_samples=1",
        f"--max_new_tokens={NEW_TOKENS}",
        "--json",
        timeout=100,
    )
    assert done(sampled).stderr == ""
    assert json.loads(sampled.stdout)["text"] == likeliest_text(model)


@pytest.mark.parametrize("edit", EDITS)
def test_an_export_is_written_or_refused(resumed, copy_of, tmp_path, edit):
    """export_hf.py compares the logits of what it writes with the model's."""
    exported = launch(
        copy_of(edit) / "export_hf.py",
        f"--out_dir={resumed(edit).out_dir}",
        f"--to={tmp_path / 'hf'}",
        timeout=100,
    )
    if edit in EXPORTED:
        done(exported)
        assert (tmp_path / "hf" / "model.safetensors").exists()
        return
    assert exported.returncode == 2
    assert not (tmp_path / "hf").exists()
    (sentence,) = exported.stderr.splitlines()
    assert "can't be exported" in sentence or "logits differ" in sentence


@pytest.mark.parametrize("edit", REFUSED)
def test_what_cannot_be_trained_is_one_sentence(train_edited, edit):
    run = train_edited(edit, 2, 1, 1)
    assert run.returncode == 2
    assert not run.losses
    (sentence,) = run.stderr.splitlines()
    assert REFUSED[edit] in sentence


def test_what_a_module_has_set_stays(copy_of):
    """The runs and plain PyTorch have this in common."""
    module = model_of(copy_of("own_initialization"))
    model = module.GPT(module.GPTConfig(block_size=32, vocab_size=len(CHARS), **SHAPE))
    for block in model.transformer.h:
        assert block.attn.gain.eq(1).all()
        assert block.mlp.c_proj.weight.eq(0).all()
        assert 0.015 < block.mlp.c_fc.weight.std() < 0.025


MATRIX = [
    every(edit, n, ranks, accumulation, recompute)
    for edit in EDITS
    for n in (2, 3)
    for ranks in (1, 2)
    for accumulation in (1, 2)
    for recompute in (False, True)
    if not recompute or ranks == accumulation  # recomputed: on one rank, and on two with two micro-steps
]


@pytest.mark.parametrize("edit, n, ranks, accumulation, recompute", MATRIX)
def test_losses_are_those_of_plain_pytorch(
    train_edited, plainly, edit, n, ranks, accumulation, recompute
):
    expected, _ = plainly(edit, ranks, accumulation)
    run = train_edited(edit, n, ranks, accumulation, f"--gradient_checkpointing={recompute}")
    assert done(run).losses == pytest.approx(expected, abs=TOLERANCE)
