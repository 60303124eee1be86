"""Batch ramps: stages, totals, and what is refused."""

import numpy as np
import pytest

from runtime.data.loader import BatchSizes
from runtime.data.ramp import make_ramp
from runtime.errors import UserError
from runtime.plan.ramps import note_missing_stages

BATCH = BatchSizes(micro=2, accumulation=8, world_size=2, block_size=1024)


def test_stages_and_totals():
    ramp = make_ramp("8@0, 16@0.1, 32@0.3", None, 1000, BATCH)

    # A share of 0.1, 0.2 and 0.7 of the tokens: 1/80, 1/80 and 7/320 of the steps
    assert ramp.starts == (0, 267, 533)
    sizes = np.array([ramp.size(i) for i in range(1200)])
    assert list(sizes[[0, 266, 267, 532, 533, 1199]]) == [8, 8, 16, 16, 32, 32]
    before = np.concatenate([[0], np.cumsum(sizes)])
    assert [ramp.sequences_before(i) for i in range(1201)] == before.tolist()
    assert ramp.total == before[1000] == 21336
    assert abs(ramp.sequences_before(267) / ramp.total - 0.1) < 0.001
    assert abs(ramp.sequences_before(533) / ramp.total - 0.3) < 0.001


def test_without_a_ramp_all_steps_are_equal():
    ramp = make_ramp(None, None, 10, BATCH)
    assert [ramp.size(i) for i in (0, 9, 20)] == [32, 32, 32]
    assert [(ramp.micro_steps(i), ramp.micro(i)) for i in (0, 9, 20)] == [(8, 2)] * 3
    assert ramp.whole_from == 0
    assert [ramp.sequences_before(i) for i in (0, 7, 20)] == [0, 224, 640]


@pytest.mark.parametrize(
    "text, batch, split",
    [
        # micro-batch, accumulation and ranks; (micro-steps, sequences of each) of each stage
        ("15@0, 30@0.1, 60@0.4", (60, 1, 1), [(1, 15), (1, 30), (1, 60)]),
        ("15@0, 30@0.1, 60@0.4", (30, 2, 1), [(1, 15), (1, 30), (2, 30)]),
        ("15@0, 30@0.1, 60@0.4", (15, 4, 1), [(1, 15), (2, 15), (4, 15)]),
        ("15@0, 30@0.1, 60@0.4", (20, 1, 3), [(1, 5), (1, 10), (1, 20)]),
        ("4@0, 10@0.1, 60@0.4", (15, 2, 2), [(1, 2), (1, 5), (2, 15)]),
    ],
)
def test_a_stage_below_batch_size_x_gpus_is_one_smaller_micro_step(text, batch, split):
    ramp = make_ramp(text, None, 1000, BatchSizes(*batch, block_size=1024))
    for begin, end, expected in zip(ramp.starts, (*ramp.starts[1:], 1200), split, strict=True):
        for it in (begin, end - 1):
            assert (ramp.micro_steps(it), ramp.micro(it)) == expected
            assert (ramp.micro(it) == batch[0]) == (it >= ramp.whole_from)
    assert ramp.starts == make_ramp(text, None, 1000, BatchSizes(1, 60, 1, 1024)).starts


def test_the_lengths_stages_begin_at_their_shares_of_the_tokens():
    """Alone: at steps 200 and 450 of 1,000. With the batch ramp above, of 21,336 sequences: after 4,267.2 of them,
    which are 267 steps of 8 and 133 of 16; and after 9,601.2, which are 266 of 16 and 100 of 32."""
    text = "256@0, 512@0.2, 1024@0.45"
    alone = make_ramp(None, text, 1000, BATCH)
    assert alone.lengths == (256, 512, 1024) and alone.length_starts == (0, 200, 450)
    assert [alone.length(i) for i in (0, 199, 200, 449, 450, 2000)] == [256, 256, 512, 512, 1024, 1024]
    assert alone.sequences_left(0) == {256: 6400, 512: 8000, 1024: 17_600}
    assert alone.sequences_left(440) == {512: 320, 1024: 17_600}
    assert alone.sequences_left(1000) == {}

    ramp = make_ramp("8@0, 16@0.1, 32@0.3", text, 1000, BATCH)
    assert ramp.starts == (0, 267, 533)
    assert ramp.length_starts == (0, 400, 633)
    assert ramp.sequences_before(400) == 4264 and ramp.sequences_before(633) == 9592
    assert ramp.sequences_left(0) == {256: 4264, 512: 5328, 1024: 11_744}
    assert ramp.describe_lengths() == (
        "256 from step 0, 512 from step 400, 1,024 from step 633 (tokens per sequence; a step keeps its tokens)"
    )
    for other in ("1024@0", None):
        same = make_ramp("8@0, 16@0.1, 32@0.3", other, 1000, BATCH)
        assert same.lengths == (1024,) and same.length(0) == 1024
        assert (same.sizes, same.starts) == (ramp.sizes, ramp.starts)
    assert ramp.possible_lengths == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]


def test_a_ramp_of_no_steps():
    ramp = make_ramp("8@0, 32@0.5", "256@0, 1024@0.5", 0, BATCH)
    assert (ramp.length(0), ramp.total, ramp.sequences_left(0)) == (1024, 0, {})


@pytest.mark.parametrize(
    "text, message",
    [
        ("256", 'TOKENS@SHARE, TOKENS@SHARE: write --length_ramp="256@0, 512@0.2, 1024@0.45"'),
        ("256@0.1, 1024@0.5", "begin at share 0"),
        ("512@0, 256@0.2, 1024@0.5", "each stage needs more tokens than the one before"),
        ("256@0, 512@0.5, 1024@0.3", "larger share than"),
        ("256@0, 2048@0.3", "2048 is above block_size=1024"),
        ("0@0, 1024@0.3", "each stage needs at least 1 of the tokens"),
        ("300@0, 1024@0.3", "block_size=1024 is not divisible by 300"),
        ("256@0, 512@0.5", "ends with 512 tokens, but block_size=1024"),
    ],
)
def test_what_is_refused_as_a_length(text, message):
    with pytest.raises(UserError, match=f"^length_ramp={text}.*{message}"):
        make_ramp(None, text, 100, BATCH)


@pytest.mark.parametrize(
    "text, message",
    [
        ("8", "not of the form"),
        ("8@0, x@0.5", "not of the form"),
        ("8@0.1, 32@0.5", "begin at share 0"),
        ("8@0, 32@1", "stay below 1"),
        ("16@0, 8@0.2, 32@0.5", "more sequences than"),
        ("8@0, 16@0.5, 32@0.3", "larger share than"),
        ("0@0, 32@0.5", "batch_ramp=0@0, 32@0.5: each stage needs at least 1 of the sequences"),
        ("8@0, 16@0.5", "ends with 16 sequences"),
    ],
)
def test_what_is_refused(text, message):
    with pytest.raises(UserError, match=message):
        make_ramp(text, None, 100, BATCH)


@pytest.mark.parametrize(
    "text, batch, told",
    [
        (
            "6@0, 32@0.5",
            (2, 8, 2),
            "6 is above batch_size x GPUs = 4 and not divisible by it: "
            "use --batch_size=1 --gradient_accumulation_steps=16, or change the ramp",
        ),
        (
            "3@0, 24@0.1, 60@0.5",
            (20, 3, 1),
            "24 is above batch_size x GPUs = 20 and not divisible by it: "
            "use --batch_size=12 --gradient_accumulation_steps=5, or change the ramp",
        ),
        (
            "15@0, 30@0.1, 60@0.4",
            (30, 1, 2),
            "15 is not divisible by the number of GPUs, 2: use 1 GPU with --batch_size=30 "
            "--gradient_accumulation_steps=2, or change the ramp",
        ),
        (
            "7@0, 30@0.1, 60@0.4",
            (15, 1, 4),
            "7 is not divisible by the number of GPUs, 4: use 1 GPU with --batch_size=15 "
            "--gradient_accumulation_steps=4, or change the ramp",
        ),
        (
            "14@0, 28@0.4",
            (7, 1, 4),
            "14 is not divisible by the number of GPUs, 4: use 2 GPUs with --batch_size=7 "
            "--gradient_accumulation_steps=2, or change the ramp",
        ),
    ],
)
def test_a_stage_that_does_not_fit_the_gpus_is_refused_with_the_fix(text, batch, told):
    with pytest.raises(UserError) as refused:
        make_ramp(text, None, 100, BatchSizes(*batch, block_size=1024))
    assert str(refused.value) == f"batch_ramp={text}: {told}"


@pytest.mark.parametrize("text, max_iters, missing", [
    ("3@0, 72@0.5", 12, ["72 sequences"]),
    ("6@0, 12@0.2, 72@0.99", 1, ["6 sequences", "72 sequences"]),
    ("6@0, 72@0.5", 100, []),
])
def test_a_stage_without_a_step_is_named(text, max_iters, missing):
    ramp = make_ramp(text, None, max_iters, BatchSizes(24, 1, 3, block_size=1024))
    told = ramp.stages_without_steps
    assert told == missing
    assert ("no step of" in " ".join(note_missing_stages(ramp))) == bool(missing)
