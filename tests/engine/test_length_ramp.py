"""A context that grows while training, alone and with a batch ramp: right, or one sentence."""

import math

import numpy as np
import pytest
import torch
from conftest import CHARS, done, edited_script, stage
from test_edited_script import BATCH_SIZE, COMMON

from model import GPT, GPTConfig
from runtime.checkpoint.tags import TagStore
from runtime.data.loader import locate_sequences, read_sequences
from runtime.data.sequences import TokenStream

BLOCK = 32
RAMPS = ("--gradient_accumulation_steps=3", "--batch_ramp=4@0, 8@0.2, 12@0.6",
         "--length_ramp=8@0, 16@0.3, 32@0.7")
# (sequences, tokens per sequence) of each step with RAMPS: 60 sequences, of which 18 and 42 are the shares
STEPS = [(4, 8)] * 3 + [(8, 8)] + [(8, 16)] * 2 + [(12, 32)] * 2


def plain_losses(characters, steps):
    """The losses of AdamW in plain PyTorch.

    steps: (sequences of 32 tokens, tokens after which the model begins anew) of each step.
    """
    tokens = np.memmap(characters / "train.bin", np.uint16, mode="r")
    torch.manual_seed(1337)
    model = GPT(GPTConfig(block_size=BLOCK, vocab_size=len(CHARS), n_layer=2, n_head=2, n_embd=32))
    optimizer = torch.optim.AdamW(model.parameter_groups(0.1), lr=1e-3, betas=(0.9, 0.95))
    total = sum(sequences for sequences, _ in steps)
    losses = []
    position = 0
    for sequences, length in steps:
        share = position / total
        ids = np.arange(position, position + sequences)
        position += sequences
        located = locate_sequences(ids, [(TokenStream(tokens, BLOCK), 1)], 1337)
        x, y = read_sequences(located, len(CHARS))
        for group in optimizer.param_groups:
            group["lr"] = 1e-4 + 0.5 * (1 + math.cos(math.pi * share)) * 9e-4

        # The parts of each sequence, one after another
        optimizer.zero_grad()
        loss = torch.zeros(())
        for begin in range(0, BLOCK, length):
            part = slice(begin, begin + length)
            loss = loss + model(x[:, part], y[:, part]) * length / BLOCK
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def expected(characters):
    """The losses with RAMPS. They need the lengths: without, they are others."""
    losses = plain_losses(characters, STEPS)
    whole = plain_losses(characters, [(sequences, BLOCK) for sequences, _ in STEPS])
    assert max(abs(a - b) for a, b in zip(losses, whole)) > 1e-3
    return losses


@pytest.mark.parametrize("ranks, zero", [(1, 2), (2, 2), (2, 3)])
def test_both_ramps_train_as_plain_pytorch(train, expected, ranks, zero):
    run = done(train(*COMMON, *RAMPS, BATCH_SIZE[ranks], stage(zero), ranks=ranks))
    assert [*run.losses.values()] == pytest.approx(expected, abs=2e-6)
    assert "ramp       4 from step 0, 8 from step 3, 12 from step 6 (sequences per step)\n" in run.stdout
    lengths = "8 from step 0, 16 from step 4, 32 from step 6 (tokens per sequence; a step keeps its tokens)"
    assert f"ramp       {lengths}\n" in run.stdout
    tokens = [record["tokens"] for record in run.history if "loss" in record]
    assert tokens == (BLOCK * np.cumsum([sequences for sequences, _ in STEPS])).tolist()
    assert "iter 8: " in run.stdout and ", 100.0%, 0:00 left" in run.stdout


def test_a_loop_that_does_not_follow_the_ramp_is_refused(train, tmp_path):
    """A copy of the script from before there was one."""
    script = edited_script(tmp_path, ("next_step(micro_steps, ramp.length(iter_num), micro)", "next_step(micro_steps)"))
    assert len(done(train(script=script)).losses) == 4
    run = train("--length_ramp=8@0, 32@0.5", script=script)
    assert run.returncode == 2 and "Traceback" not in run.stderr
    assert "length_ramp=8@0, 32@0.5 needs batches.next_step(micro_steps, ramp.length(iter_num)) in the loop of " \
           "train_edited.py: edit it, or leave length_ramp out" in run.stderr


def killed_in_step(number):
    """Code that kills a rank before the end of this step of its process."""
    return f"""
import os
from runtime.engine.engine import Engine
step = Engine.step
def step_or_die(self, *args, **options):
    if self.steps == {number - 1}:
        os.kill(os.getpid(), 9)
    return step(self, *args, **options)
Engine.step = step_or_die
"""


def test_a_run_that_is_killed_in_each_stage_has_the_losses_of_one_that_is_not(train, expected):
    """In steps 3, 4, 6 and 8: each is of another stage of one of the ramps. Each resumes on another number of ranks."""
    options = (*COMMON, *RAMPS, "--eval_interval=1", "--async_save=False", "--init_from=auto")
    run = train(*options, BATCH_SIZE[2], "--init_from=scratch", ranks=2, plant=killed_in_step(3))
    saved = 2
    for ranks, killed_at in ((1, 4), (2, 6), (1, 8), (2, None)):
        assert run.returncode != 0 and "Traceback" not in run.stderr
        plant = killed_in_step(killed_at - saved) if killed_at else ""
        run = train(*options, BATCH_SIZE[ranks], ranks=ranks, plant=plant, out_dir=run.out_dir)
        assert f"resumed from iter_{saved}" in run.stdout
        if killed_at:
            saved = killed_at - 1
    done(run)
    assert [*run.losses] == list(range(1, 9))
    assert [*run.losses.values()] == pytest.approx(expected, abs=2e-6)
    assert TagStore(run.out_dir).find("iter_8").manifest["state"]["sequences"] == 60


def test_a_ramp_of_one_stage_is_none_to_the_last_bit(train):
    """Also with dropout. An evaluation is of whole sequences in any case."""
    options = (*COMMON, "--dropout=0.1", BATCH_SIZE[2])
    none = done(train(*options, ranks=2))
    one = done(train(*options, "--batch_ramp=8@0", "--length_ramp=32@0", ranks=2))
    assert len(none.losses) == 8 and none.losses == one.losses and none.evals == one.evals
    ramp = done(train(*options, "--length_ramp=8@0, 32@0.5", ranks=2))
    assert ramp.evals[0] == none.evals[0] and ramp.losses[1] != none.losses[1]


def test_another_ramp_at_a_resume_is_printed_and_moves_no_data(train, characters):
    """4 steps with 8 tokens, and then, by the second ramp, 2 with 16 and 2 with 32."""
    expected = plain_losses(characters, [(8, 8)] * 4 + [(8, 16)] * 2 + [(8, 32)] * 2)
    first = done(train(*COMMON, BATCH_SIZE[2], "--length_ramp=8@0, 32@0.9", "--eval_interval=4", ranks=2))
    resumed = done(train(*COMMON, BATCH_SIZE[1], "--length_ramp=16@0, 32@0.75", "--eval_interval=4", "--overwrite",
                         "--init_from=resume", "--resume_tag=iter_4", out_dir=first.out_dir))
    assert "length_ramp='16@0, 32@0.75', was '8@0, 32@0.9'" in resumed.stdout
    assert "ramp       16 from step 0, 32 from step 6 (tokens per sequence" in resumed.stdout
    assert [*resumed.losses.values()] == pytest.approx(expected, abs=2e-6)


def test_a_length_ramp_goes_by_epochs_too(train):
    """0.1 epochs of 561 windows are 14.03 steps of 4 windows: half of 15 are 8 (7.5)."""
    run = done(train("--max_epochs=0.1", "--eval_epochs=0.05", "--length_ramp=8@0, 32@0.5"))
    assert "ramp       8 from step 0, 32 from step 8 (tokens" in run.stdout
    assert len(run.losses) == 15 and list(run.evals) == [0, 8, 15]
    assert ", 100.0%, 0:00 left" in run.stdout


@pytest.mark.parametrize("options, told", [
    (("--length_ramp=8",), 'length_ramp=8 is not of the form TOKENS@SHARE, TOKENS@SHARE: write --length_ramp="256@0'),
    (("--length_ramp=8@0, 64@0.5",), "length_ramp=8@0, 64@0.5: 64 is above block_size=32"),
    (("--length_ramp=16@0, 8@0.5, 32@0.7",), "each stage needs more tokens than the one before"),
    (("--length_ramp=8@0, 32@0.5, 32@0.7",), "each stage needs more tokens than the one before"),
    (("--length_ramp=8@0, 16@0.7, 32@0.5",), "each stage needs a larger share than the one before"),
    (("--length_ramp=8@0, 12@0.2, 32@0.5",), "block_size=32 is not divisible by 12"),
    (("--length_ramp=8@0, 16@0.5",), "ends with 16 tokens, but block_size=32: make them equal"),
    (("--length_ramp=8@0, 32@0.5", "--batch_ramp=2@0, 4@0.5", "--max_epochs=1"), "batch_ramp goes by iterations"),
])
def test_a_length_ramp_that_does_not_fit_is_refused(train, options, told):
    run = train(*options)
    assert run.returncode == 2
    assert told in run.stderr
    assert "Traceback" not in run.stderr
