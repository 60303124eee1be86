"""Usual edits of the training loop: right, or one sentence.

A batch ramp makes another number of micro-steps in some steps. Its losses are those of plain PyTorch
on exactly the sequences of each step.
"""

import math

import numpy as np
import pytest
import torch
from conftest import CHARS, done, edited_script, ramp, stage

from model import GPT, GPTConfig
from runtime.checkpoint.tags import TagStore
from runtime.data.loader import locate_sequences, read_sequences
from runtime.data.sequences import TokenStream

STEPS = 8
PER_MICRO_STEP = 4  # sequences, over all ranks
COMMON = (f"--max_iters={STEPS}", f"--lr_decay_iters={STEPS}", "--eval_interval=2", "--keep_last=10")
BATCH_SIZE = {1: "--batch_size=4", 2: "--batch_size=2"}  # on so many ranks
RAMPS = {  # what the user writes: the micro-steps of each step
    "1 if iter_num < 3 else gradient_accumulation_steps": (1, 1, 1, 2, 2, 2, 2, 2),
    "(1, 3, 2, 1, 2, 3, 1, 2)[iter_num]": (1, 3, 2, 1, 2, 3, 1, 2),
}


def plain_losses(characters, sizes, by_tokens=False):
    """The losses of AdamW in plain PyTorch, on all sequences of a step at once.

    sizes: the number of sequences of each step, one after another in the order of the data. by_tokens: whether the
    learning rate falls by the share of tokens, not of steps.
    """
    tokens = np.memmap(characters / "train.bin", np.uint16, mode="r")
    torch.manual_seed(1337)
    model = GPT(GPTConfig(block_size=32, vocab_size=len(CHARS), n_layer=2, n_head=2, n_embd=32))
    optimizer = torch.optim.AdamW(model.parameter_groups(0.1), lr=1e-3, betas=(0.9, 0.95))
    losses = []
    position = 0
    for it, size in enumerate(sizes):
        share = position / sum(sizes) if by_tokens else it / STEPS
        ids = np.arange(position, position + size)
        position += size
        located = locate_sequences(ids, [(TokenStream(tokens, 32), 1)], 1337)
        x, y = read_sequences(located, len(CHARS))
        for group in optimizer.param_groups:
            group["lr"] = 1e-4 + 0.5 * (1 + math.cos(math.pi * share)) * 9e-4
        loss = model(x, y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("expression", RAMPS, ids=["up", "up and down"])
def test_a_batch_ramp_trains_as_plain_pytorch(train, characters, tmp_path, expression, n):
    """On two ranks, and from the middle of the ramp on one, at the other stage."""
    micro_steps = RAMPS[expression]
    sizes = [PER_MICRO_STEP * number for number in micro_steps]
    expected = plain_losses(characters, sizes)
    script = ramp(tmp_path, expression)
    whole = done(train(*COMMON, BATCH_SIZE[2], stage(n), ranks=2, script=script))
    assert [*whole.losses.values()] == pytest.approx(expected, abs=2e-6)

    half = done(train(*COMMON, BATCH_SIZE[2], stage(n), "--max_iters=2", ranks=2, script=script))
    saved = TagStore(half.out_dir).find("iter_2").manifest["state"]
    assert saved["sequences"] == sum(sizes[:2])
    resumed = done(train(*COMMON, BATCH_SIZE[1], stage(5 - n), "--init_from=resume", script=script,
                         out_dir=half.out_dir))
    assert [*resumed.losses.values()] == pytest.approx(expected, abs=2e-6)

    # what is counted and reported follows the sequences
    for run in (whole, resumed):
        records = [record for record in run.history if "loss" in record]
        assert [record["tokens"] for record in records] == (32 * np.cumsum(sizes)).tolist()
        for record, size in zip(records, sizes):
            per_s = 32 * size / (record["ms"] / 1000)
            assert record["tokens_per_s"] == pytest.approx(per_s, rel=1e-6)


def test_the_setting_batch_ramp_trains_as_plain_pytorch(train, characters):
    """3 steps of 4 sequences, 3 of 8 and 2 of 12. Resumed in each of these stages, twice on another number of ranks,
    it has the same losses."""
    sizes = [4] * 3 + [8] * 3 + [12] * 2
    expected = plain_losses(characters, sizes, by_tokens=True)
    options = (*COMMON, "--eval_interval=1", "--gradient_accumulation_steps=3", "--batch_ramp=4@0, 8@0.2, 12@0.6")
    whole = done(train(*options, BATCH_SIZE[2], ranks=2))
    assert [*whole.losses.values()] == pytest.approx(expected, abs=2e-6)
    assert "ramp       4 from step 0, 8 from step 3, 12 from step 6 (sequences per step)" in whole.stdout
    assert "iter 8: " in whole.stdout and ", 100.0%, 0:00 left" in whole.stdout

    for begin, ranks in ((7, 1), (4, 2), (1, 1)):
        resumed = done(train(*options, BATCH_SIZE[ranks], "--init_from=resume", f"--resume_tag=iter_{begin}",
                             "--overwrite", ranks=ranks, out_dir=whole.out_dir))
        assert f"resumed from iter_{begin}" in resumed.stdout
        assert [*resumed.losses.values()] == pytest.approx(expected, abs=2e-6)
        saved = TagStore(resumed.out_dir).find("iter_8").manifest["state"]
        assert saved["sequences"] == sum(sizes)


@pytest.mark.parametrize("options, told", [
    (("--batch_ramp=2@0, 4@0.5", "--max_iters=-5"), "max_iters=-5 must be at least 0"),
    (("--batch_ramp=2@0, 3@0.5",), "ends with 3 sequences"),
    (("--batch_ramp=2@0, 4@0.5", "--max_epochs=1"), "batch_ramp goes by iterations: use --max_iters"),
    (("--batch_ramp=2@0, 4@0.5", "--batch_size=auto"), "batch_ramp=2@0, 4@0.5 needs a number for batch_size"),
])
def test_a_batch_ramp_that_does_not_fit_is_refused(train, options, told):
    run = train("--batch_size=1", "--gradient_accumulation_steps=4", *options)
    assert run.returncode == 2
    assert told in run.stderr
    assert "Traceback" not in run.stderr


def test_a_resume_with_another_batch_size_repeats_and_skips_nothing(train, characters):
    """3 steps of 8 sequences, then 5 of 6: the 24 first sequences are not there again, and the next ones are."""
    expected = plain_losses(characters, [8] * 3 + [6] * 5)
    first = done(train(*COMMON, BATCH_SIZE[2], "--max_iters=3", ranks=2))
    resumed = done(train(*COMMON, "--batch_size=3", "--init_from=resume", out_dir=first.out_dir))
    assert [*resumed.losses.values()] == pytest.approx(expected, abs=2e-6)
    told = "iter_3 was trained with 8 sequences per step, and this run has 6: it continues after the 24 that were"
    assert told in resumed.stdout
    assert TagStore(resumed.out_dir).find("iter_8").manifest["state"]["sequences"] == 24 + 5 * 6


def test_figures_of_several_steps_are_of_their_sequences(train, tmp_path):
    """Lines for steps 1, 3, 6 and 8. From one line to the next there are 1, 1 + 1, 2 + 2 + 2 and 2 + 2 micro-steps."""
    script = ramp(tmp_path, "1 if iter_num < 3 else 2")
    run = done(train(*COMMON, "--eval_interval=100", "--log_interval=3", script=script))
    records = [record for record in run.history if "loss" in record]
    assert [record["iter"] for record in records] == [1, 3, 6, 8]
    assert [record["tokens"] for record in records] == [64, 192, 576, 832]
    for record, tokens, steps in zip(records[1:], (128, 384, 256), (2, 3, 2)):
        seconds = steps * record["ms"] / 1000
        assert record["tokens_per_s"] == pytest.approx(tokens / seconds, rel=1e-6)


def test_epochs_are_of_sequences_in_a_ramp(train, tmp_path):
    """0.05 epochs of 561 windows are 28.05 sequences: 2, 2, 2 and then 4 per step. 4 per step are planned, so the plan
    has 8 steps; there are 10. An evaluation follows each 0.015 epochs, 8.4 sequences."""
    script = ramp(tmp_path, "1 if iter_num < 3 else 2")
    options = ("--max_epochs=0.05", "--eval_epochs=0.015", "--keep_last=10")
    run = done(train(*options, script=script))
    tokens = {record["iter"]: record["tokens"] for record in run.history if "loss" in record}
    assert list(tokens.values()) == [64, 128, 192, 320, 448, 576, 704, 832, 960, 1088]  # of 32 each
    assert "max_epochs=0.05 is 8 iterations" in run.stdout
    assert list(run.evals) == [0, 4, 6, 8, 10]
    assert "iter 10: " in run.stdout and ", 100.0%, 0:00 left" in run.stdout
    assert "stopped early" not in run.stdout

    part = done(train(*options, "--max_epochs=0.02", script=script))
    resumed = done(train(*options, "--init_from=resume", script=script, out_dir=part.out_dir))
    assert max(part.losses) == 5 and max(resumed.losses) == 10


def test_a_loop_that_leaves_a_ramp_out_is_refused(train, tmp_path):
    """The line as a comment doesn't count. Without the setting, such a loop trains."""
    script = ramp(tmp_path, "gradient_accumulation_steps  # not ramp.micro_steps(iter_num)")
    run = train(*COMMON, "--batch_ramp=2@0, 4@0.5", "--gradient_accumulation_steps=2", script=script)
    assert run.returncode == 2
    told = (
        "batch_ramp=2@0, 4@0.5 needs micro_steps = ramp.micro_steps(iter_num) in the loop of train_edited.py: edit "
        "it, or leave batch_ramp out\n"
    )
    assert run.stderr == told


@pytest.mark.parametrize("micro_steps", ["0", "1 + iter_num / 2"])
def test_what_is_no_number_of_micro_steps_is_refused(train, tmp_path, micro_steps):
    run = train(ranks=2, script=ramp(tmp_path, micro_steps))
    assert run.returncode == 2
    made = {"0": "0", "1 + iter_num / 2": "1.0"}[micro_steps]
    told = f"micro_steps={made} must be a whole number of at least 1: change the training loop"
    assert told in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize("loop", ["all but one", "one less on rank 1", "ZeRO-3, summed locally"])
def test_ranks_make_the_same_number_of_micro_steps(train, tmp_path, loop):
    """One sentence if they don't, whether their data or only their calls of the engine differ. ZeRO-3 that reduces
    nothing in backward still gathers weights there."""
    if loop == "all but one":
        script = ramp(tmp_path, "2 if ranks.rank else 3")
    else:
        made = "for micro_batch in batches.next_step(micro_steps, ramp.length(iter_num), micro):"
        script = edited_script(tmp_path, (made, made[:-1] + "[ranks.rank:]:"))
    options = []
    if loop == "ZeRO-3, summed locally":
        config = tmp_path / "zero3.json"
        config.write_text('{"zero_optimization": {"stage": 3, "stage3_max_live_parameters": 0}}')
        options = [f"--deepspeed_config={config}", "--accumulate_locally=True", "--n_layer=4"]
    run = train(*options, ranks=2, script=script)
    assert run.returncode == 2
    assert "micro-steps" in run.stderr
    assert "Traceback" not in run.stderr and "not finite" not in run.stdout + run.stderr


def test_a_module_in_eval_stays_so_after_evaluations_and_samples(train, tmp_path):
    """All dropout is in model.transformer. With it in eval(), losses are those without dropout."""
    place = "    model.crop_block_size(block_size)\n"
    script = edited_script(tmp_path, (place, f"{place}    model.transformer.eval()\n"))
    options = ("--eval_interval=2", "--sample_interval=3", "--sample_tokens=4", "--max_iters=6")
    expected = done(train(*options))
    run = done(train(*options, "--dropout=0.5", script=script))
    assert run.losses == expected.losses
    assert run.evals == expected.evals and len(run.evals) == 4
