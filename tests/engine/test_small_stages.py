"""A batch ramp whose early stages are smaller than one micro-batch: right, or one sentence."""

import re

import numpy as np
import pytest
from conftest import done, edited_script, stage
from test_edited_script import COMMON
from test_length_ramp import BLOCK, killed_in_step, plain_losses

from runtime.checkpoint.tags import TagStore

RAMP = "--batch_ramp=6@0, 12@0.2, 24@0.6"
SIZES = [6] * 3 + [12] * 3 + [24] * 2  # sequences of each step
# (sequences, tokens per sequence) of each step with LENGTHS, too: 102 sequences, of which 41 and 71 are the shares
LENGTHS = "--length_ramp=8@0, 16@0.4, 32@0.7"
BOTH = [(6, 8)] * 3 + [(12, 8)] * 2 + [(12, 16)] + [(24, 16), (24, 32)]


def whole_steps(ranks):
    """Settings with which the last stage is one micro-step on so many ranks, and no stage is more."""
    return (*COMMON, RAMP, f"--batch_size={24 // ranks}", "--gradient_accumulation_steps=1")


@pytest.fixture(scope="module")
def expected(characters):
    """The losses with RAMP."""
    return plain_losses(characters, [(size, BLOCK) for size in SIZES])


@pytest.fixture(scope="module")
def expected_of_both(characters):
    """The losses with RAMP and LENGTHS."""
    return plain_losses(characters, BOTH)


@pytest.mark.parametrize("ranks, zero", [(1, 2), (2, 2), (3, 2), (1, 3), (2, 3)])
def test_small_stages_train_as_plain_pytorch(train, expected, ranks, zero):
    run = done(train(*whole_steps(ranks), stage(zero), ranks=ranks))
    assert [*run.losses.values()] == pytest.approx(expected, abs=2e-6)
    assert "ramp       6 from step 0, 12 from step 3, 24 from step 6 (sequences per step)\n" in run.stdout
    assert f"batch      {24 // ranks} x {ranks} x 1 = 24 sequences, 768 tokens per step" in run.stdout
    assert "iter 8: " in run.stdout and ", 100.0%, 0:00 left" in run.stdout

    # What is counted and reported follows the sequences
    records = [record for record in run.history if "loss" in record]
    assert [record["tokens"] for record in records] == (BLOCK * np.cumsum(SIZES)).tolist()
    for record, size in zip(records, SIZES, strict=True):
        per_s = BLOCK * size / (record["ms"] / 1000)
        assert record["tokens_per_s"] == pytest.approx(per_s, rel=1e-6)


def test_micro_steps_below_and_above_the_micro_batch(train, expected):
    """Three sequences on each of two ranks, then 6, and then two micro-steps of 6."""
    run = done(train(*COMMON, RAMP, "--batch_size=6", "--gradient_accumulation_steps=2", ranks=2))
    assert [*run.losses.values()] == pytest.approx(expected, abs=2e-6)


def test_both_ramps_train_as_plain_pytorch(train, expected_of_both):
    run = done(train(*whole_steps(2), LENGTHS, ranks=2))
    assert [*run.losses.values()] == pytest.approx(expected_of_both, abs=2e-6)


@pytest.fixture(scope="module")
def parent(train):
    """The folder of a run, whose weights LoRA needs."""
    return done(train("--max_iters=1")).out_dir


@pytest.mark.parametrize(
    "options",
    [
        ("--init_from=PARENT", "--n_layer=None", "--n_head=None", "--n_embd=None", "--lora_rank=4"),
        ("--gradient_checkpointing=True",),
        ("--optimizer=muon",),
        ("--deepspeed_config=config/ds/zero2_offload.json",),
        ("--deepspeed_config=config/ds/zero3_offload.json",),
        ("--grad_clip=0", "--dtype=bfloat16"),
    ],
    ids=lambda options: options[-1][2:],
)
def test_losses_and_norms_are_those_of_accumulated_micro_steps(train, parent, options):
    """The same ramp with the smallest stage as the micro-batch: 1, 2 and 4 micro-steps."""
    options = [option.replace("PARENT", str(parent)) for option in options]
    whole = done(train(*whole_steps(1), *options))
    split = done(train(*COMMON, RAMP, "--batch_size=6", "--gradient_accumulation_steps=4", *options))
    loss_bound, norm_bound = 2e-6, 2e-6  # seen: 5e-7 and 4e-7
    if "--dtype=bfloat16" in options:
        loss_bound, norm_bound = 2e-4, 5e-3  # seen: 3e-5 and 1e-3
    assert [*whole.losses.values()] == pytest.approx([*split.losses.values()], abs=loss_bound)
    norms = [record["grad_norm"] for record in whole.history if "loss" in record]
    split_norms = [record["grad_norm"] for record in split.history if "loss" in record]
    assert norms == pytest.approx(split_norms, rel=norm_bound)


@pytest.mark.parametrize("with_lengths", [False, True], ids=["batch", "both"])
def test_a_run_that_is_killed_in_each_stage_has_the_losses_of_one_that_is_not(
    train, expected, expected_of_both, with_lengths
):
    """In steps 3, 5, 7 and 8, and each time resumed on another number of ranks."""
    options = ["--eval_interval=1", "--async_save=False", "--init_from=auto"]
    if with_lengths:
        options.append(LENGTHS)
    run = train(*whole_steps(2), *options, "--init_from=scratch", ranks=2, plant=killed_in_step(3))
    saved = 2
    for ranks, killed_at in ((1, 5), (3, 7), (2, 8), (1, None)):
        assert run.returncode != 0 and "Traceback" not in run.stderr
        plant = killed_in_step(killed_at - saved) if killed_at else ""
        run = train(*whole_steps(ranks), *options, ranks=ranks, plant=plant, out_dir=run.out_dir)
        assert f"resumed from iter_{saved}" in run.stdout
        if killed_at:
            saved = killed_at - 1
    done(run)
    assert [*run.losses] == list(range(1, 9))
    assert [*run.losses.values()] == pytest.approx(expected_of_both if with_lengths else expected, abs=2e-6)
    assert TagStore(run.out_dir).find("iter_8").manifest["state"]["sequences"] == 102


def test_a_resume_on_a_number_of_ranks_that_does_not_divide_a_stage_is_refused(train):
    first = done(train(*whole_steps(2), "--max_iters=2", ranks=2))
    run = train(*COMMON, RAMP, "--batch_size=6", "--gradient_accumulation_steps=1", "--init_from=resume", ranks=4,
                out_dir=first.out_dir)
    assert run.returncode == 2 and "Traceback" not in run.stderr
    told = "batch_ramp=6@0, 12@0.2, 24@0.6: 6 is not divisible by the number of GPUs, 4: use 3 GPUs with "
    assert f"{told}--batch_size=4 --gradient_accumulation_steps=2, or change the ramp" in run.stderr
    done(train(*COMMON, RAMP, "--batch_size=4", "--gradient_accumulation_steps=2", "--init_from=resume", ranks=3,
               out_dir=first.out_dir))


def test_a_stage_between_micro_steps_is_refused(train):
    run = train("--batch_ramp=1@0, 3@0.2, 4@0.6")
    assert run.returncode == 2 and "Traceback" not in run.stderr
    told = "batch_ramp=1@0, 3@0.2, 4@0.6: 3 is above batch_size x GPUs = 2 and not divisible by it: use "
    assert f"{told}--batch_size=1 --gradient_accumulation_steps=4, or change the ramp" in run.stderr


def test_the_advice_on_memory_fits_the_ramp(train):
    """20 divides the last stage, but not the second one."""
    options = ("--n_layer=24", "--n_head=16", "--n_embd=1024", "--block_size=1024", "--dtype=bfloat16",
               "--target_gpu=24", "--dry_run=True", "--batch_size=60", "--gradient_accumulation_steps=1")
    for ramp, fits in (("15@0, 30@0.1, 60@0.4", {"15", "60"}), ("15@0, 60@0.4", {"15", "20", "60"})):
        run = train(*options, f"--batch_ramp={ramp}")
        advice = run.stdout.partition("It doesn't fit. Add one of these to your command")[2]
        sizes = re.findall(r"--batch_size=(\d+) ", advice)
        assert set(sizes) == fits, run.stdout + run.stderr


def test_a_loop_that_does_not_follow_the_ramp_is_refused(train, tmp_path):
    """A copy of the script from before there was one. Without smaller stages it trains."""
    edits = [
        ("micro_steps = ramp.micro_steps(iter_num)", "micro_steps = ramp.size(iter_num) // batch.per_micro_step"),
        ("    micro = ramp.micro(iter_num)  # sequences per GPU in each\n", ""),
        ("next_step(micro_steps, ramp.length(iter_num), micro)", "next_step(micro_steps, ramp.length(iter_num))"),
    ]
    # With only one of the two edits, a small stage would have no micro-step
    half = edited_script(tmp_path, edits[0])
    run = train("--batch_ramp=1@0, 4@0.5", script=half)
    assert run.returncode == 2 and "needs micro_steps = ramp.micro_steps(iter_num) and" in run.stderr
    script = edited_script(tmp_path, *edits)
    assert len(done(train("--batch_ramp=2@0, 4@0.5", "--length_ramp=8@0, 32@0.5", script=script)).losses) == 4
    run = train("--batch_ramp=1@0, 4@0.5", script=script)
    assert run.returncode == 2 and "Traceback" not in run.stderr
    assert (
        "batch_ramp=1@0, 4@0.5: 1 is below batch_size x GPUs = 2, which needs micro_steps = "
        "ramp.micro_steps(iter_num) and batches.next_step(micro_steps, ramp.length(iter_num), ramp.micro(iter_num)) "
        "in the loop of train_edited.py: edit it, or use --batch_size=1 --gradient_accumulation_steps=4\n" in run.stderr
    )
