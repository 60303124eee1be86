"""A check of the Triton kernels, on a GPU or in Triton's interpreter."""

from functools import partial

import torch
from torch import nn

from runtime.check.logits import decoder_of
from runtime.check.tiny import (
    Different,
    Tiny,
    Unchecked,
    differing,
    gradients,
    owner_of,
    tokens,
)
from runtime.kernels import device_has_triton, triton
from runtime.kernels.decode import decode_step
from runtime.kernels.fit import Fit, fit, ranges, why_not_decoded
from runtime.kernels.fused import use_fused_blocks

LENGTH = 6  # tokens: in the interpreter a row takes milliseconds
RTOL = {"cpu": 1e-4, "cuda": 1e-2}  # a GPU multiplies in TF32


def kernels_and_pytorch(tiny: Tiny) -> str:
    """Check that blocks on our kernels have the loss and gradients of plain PyTorch, and the next
    tokens.

    Says which blocks run on the kernels, and why the others don't.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if triton is None or not device_has_triton(torch.empty(0, device=device)):
        raise Unchecked("Triton doesn't run here, so PyTorch runs all blocks")
    plain = tiny.stirred().to(device)
    ours = tiny.stirred().to(device)
    found = fit(ours)
    why_not = why_not_decoded(ours)
    if found.fused():
        use_fused_blocks(ours)
        compare_training(plain, ours, device)
    if why_not is None:
        compare_decoding(plain.eval(), ours.eval(), device)
    decoding = "decoding, too" if why_not is None else f"not decoding: {why_not}"
    return f"{describe_fit(found)}; {decoding}"


def compare_training(plain: nn.Module, ours: nn.Module, device: str) -> None:
    """Raise Different unless loss and gradients are the same."""
    idx = tokens(rows=1, length=LENGTH).to(device)
    targets = tokens(seed=1, rows=1, length=LENGTH).to(device)
    loss = plain(idx, targets)
    fused_loss = ours(idx, targets)
    wrong = differing(gradients(ours, fused_loss), gradients(plain, loss), RTOL[device])
    if wrong or not torch.allclose(loss, fused_loss, rtol=RTOL[device]):
        what = f"the gradient of {wrong}" if wrong else "the loss"
        where = owner_of(plain, wrong) if wrong else "Block.forward"
        raise Different(
            f"{what} on the kernels is not PyTorch's: look at why_not_fused in "
            f"runtime/kernels/fit.py, which takes {where} for the one that the kernels compute"
        )


@torch.no_grad()
def compare_decoding(plain: nn.Module, ours: nn.Module, device: str) -> None:
    """Raise Different unless the decoding kernels have the logits of PyTorch."""
    idx = tokens(rows=1, length=LENGTH).to(device)
    step = partial(decode_step, ours)
    decoder = decoder_of(ours)(ours, 1, LENGTH, custom_step=step, cuda_graphs=False)
    decoder.prefill(idx[:, :-1])
    logits = decoder.custom_step(
        idx[:, -1:], torch.tensor([LENGTH - 1], device=device), decoder.caches
    )
    if not torch.allclose(logits, plain(idx)[:, -1], atol=10 * RTOL[device]):
        raise Different(
            "the logits of the decoding kernels are not PyTorch's: look at why_not_decoded in "
            "runtime/kernels/fit.py"
        )


def describe_fit(found: Fit) -> str:
    """Return which blocks run on the kernels, and why the others don't."""
    fused = found.fused()
    texts = []
    if fused:
        which = "all blocks" if len(fused) == len(found.reasons) else f"blocks {ranges(fused)}"
        way = "chained" if found.no_chain is None else f"closed because {found.no_chain}"
        texts.append(f"{which} on kernels have PyTorch's loss and gradients ({way})")
    for blocks, reason in found.others():
        texts.append(f"blocks {blocks} run in PyTorch: {reason}")
    return "; ".join(texts) or "no block runs on kernels: the model has no transformer.h"
