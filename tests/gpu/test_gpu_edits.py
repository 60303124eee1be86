"""Edited models on a GPU: those that review D6 names, with the kernels that fit and everything else compiled, have the
loss, gradients and next tokens of the same model in plain PyTorch."""

from dataclasses import replace

import pytest
import torch
from kernels.test_fused_fit import EDITS, build, gradients, model_logits

from runtime.engine import setup
from runtime.engine.fast_paths import NOT_TAKEN, decide, inspect_model
from runtime.hardware import Execution
from runtime.kernels.decode import why_no_decode
from runtime.kernels.fused import FusedBlock

GPU = Execution("cuda", "bfloat16", True, 0)


@pytest.fixture(autouse=True)
def on_the_gpu():
    """Build models on the GPU, and compile each of them anew."""
    torch.compiler.reset()
    with torch.device("cuda"):
        yield


def distance(found, wanted):
    """Return the norm of the difference of all tensors, relative to the norm of those that are wanted."""
    squares = [0.0, 0.0]
    for name, tensor in wanted.items():
        squares[0] += (found[name].float() - tensor).square().sum().item()
        squares[1] += tensor.square().sum().item()
    return (squares[0] / squares[1]) ** 0.5


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_an_edited_model_trains_and_decodes_as_edited(edit, tmp_path):
    exact, source = build(edit, tmp_path)
    plain, ours = (build(edit, tmp_path)[0].bfloat16() for _ in range(2))
    generator = torch.Generator("cuda").manual_seed(1)
    idx, targets = torch.randint(61, (2, 2, 32), generator=generator)
    exact_loss, wanted = gradients(exact, idx, targets)
    plain_loss, plain_found = gradients(plain, idx, targets)

    # As the training script does
    by_kernels = why_no_decode(ours) is None
    assert by_kernels is edit.decodes
    paths = decide(inspect_model(ours), GPU, {"zero_optimization": {"stage": 2}}, world_size=1)
    paths = replace(paths, copies=NOT_TAKEN)  # which the engine's step fills
    setup.compile_blocks(ours, paths, GPU)
    assert sum(isinstance(block, FusedBlock) for block in ours.transformer.h) == edit.fused

    # Our error is at most twice that of plain bfloat16, plus some
    loss, found = gradients(ours, idx, targets)
    assert abs(loss - exact_loss) <= 2 * abs(plain_loss - exact_loss) + 1e-2 * abs(exact_loss), (loss, exact_loss)
    off, plain_off = distance(found, wanted), distance(plain_found, wanted)
    print(f"loss {exact_loss:.4f}, plain {plain_loss:.4f}, ours {loss:.4f}; gradients {plain_off:.4f}, {off:.4f}")
    assert off <= 2 * plain_off + 1e-2

    # The logits after each of 3 more tokens
    with torch.no_grad():
        logits = [
            model_logits(gpt.eval(), source, by_kernels and gpt is ours, idx).float()
            for gpt in (exact, plain, ours)
        ]
    spread = logits[0].abs().max().item()
    plain_off, off = ((found - logits[0]).abs().max().item() / spread for found in logits[1:])
    assert off <= 2 * plain_off + 1e-2
