"""Every attention kernel that training may choose, on hard inputs, against float64."""

import pytest
import torch
from test_attention import SEEN, check

from runtime.hardware import attention_backends


@pytest.mark.parametrize("case", SEEN)
def test_attention_and_its_gradients(case):
    for dtype in (torch.bfloat16, torch.float16):
        for backend in attention_backends("cuda"):
            check(case, backend, dtype)
