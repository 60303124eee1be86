"""Batch ramps: stages, totals, and what is refused."""

import numpy as np
import pytest

from runtime.data.ramp import make_ramp
from runtime.errors import UserError


def test_stages_and_totals():
    ramp = make_ramp("8@0, 16@0.1, 32@0.3", max_iters=1000, sequences=32, per_micro_step=4)

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
    ramp = make_ramp(None, max_iters=10, sequences=32, per_micro_step=4)
    assert [ramp.size(i) for i in (0, 9, 20)] == [32, 32, 32]
    assert [ramp.sequences_before(i) for i in (0, 7, 20)] == [0, 224, 640]


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
        make_ramp(text, max_iters=100, sequences=32, per_micro_step=4)
