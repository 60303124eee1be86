"""Batch ramps: stages, totals, and what is refused."""

import numpy as np
import pytest

from runtime.data.loader import BatchSizes
from runtime.data.ramp import make_ramp
from runtime.errors import UserError

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
    assert [ramp.sequences_before(i) for i in (0, 7, 20)] == [0, 224, 640]


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
        ("0@0, 1024@0.3", "more tokens than"),
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
        ("6@0, 32@0.5", "6 is not divisible by batch_size x GPUs = 4"),
        ("8@0, 16@0.5", "ends with 16 sequences"),
    ],
)
def test_what_is_refused(text, message):
    with pytest.raises(UserError, match=message):
        make_ramp(text, None, 100, BATCH)
