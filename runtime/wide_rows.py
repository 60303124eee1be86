"""A choice that PyTorch's compiler makes badly for GPT-2 XL.

Inductor reads a row of up to 1,024 numbers once, and a longer one twice: first for its mean and variance, then to scale
it. Layer norms over the XL's 1,600 take half the time when they are read once, too: forward over 32 x 1,024 tokens in
48 layers 18.2 ms became 8.5 on H200 (results/h200_x1_profile.json).
"""

import torch
from torch._inductor import config
from torch._inductor.choices import InductorChoices
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.virtualized import V

LONGEST = 2048  # numbers in a row; a block of threads holds them in registers


class WideRows(InductorChoices):
    """Inductor's choices, but for rows that are read once."""

    @staticmethod
    def should_use_persistent_reduction(features, cooperative_reduction):
        inner = features.get_reduction_hint() == ReductionHint.INNER
        if inner and V.graph.sizevars.statically_known_leq(features.reduction_numel, LONGEST):
            return True
        return InductorChoices.should_use_persistent_reduction(features, cooperative_reduction)

    def uuid(self):
        """Part of the name under which what was compiled is cached."""
        return f"rows of {LONGEST}, {torch.__version__}"


def read_once():
    """Let blocks that are compiled from now on read such rows once."""
    config.inductor_choices_class = WideRows
