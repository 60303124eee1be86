"""Muon on a GPU, in bfloat16, against torch.optim.Muon on the same gradients."""

import pytest
import torch
from newton_schulz import by_singular_values, low_rank_and_noise

from runtime.engine import muon
from runtime.engine.fused_adamw import Partition

SHAPES = [(3 * 256, 256)] * 3 + [(256, 256)] * 3 + [(4 * 256, 256)] * 3 + [(256, 4 * 256)] * 3
LR, DECAY, CLIP = 0.02, 0.1, 1.0


@pytest.mark.parametrize("product", [muon.symmetric_product, muon.plain_product])
@pytest.mark.parametrize("shape", [(768, 768), (3072, 768), (768, 3072)], ids=str)
def test_newton_schulz_keeps_small_singular_values(shape, product):
    """In float16 3% off, emulated on a CPU, where torch.optim.Muon's Newton-Schulz is 29% off."""
    matrix = low_rank_and_noise(*shape)
    exact = by_singular_values(matrix)
    ours = muon.orthogonalize(muon.normalize(matrix[None].cuda()), product)[0].float().cpu()
    assert (ours - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize("max_batch, use_kernels", [(2**26, True), (3 * 4 * 256**2, True), (2**26, False)],
                         ids=["one batch per shape", "several", "without Triton"])
def test_three_steps_are_pytorchs(monkeypatch, max_batch, use_kernels):
    """Matrix by matrix, q, k and v apart. PyTorch's iterates in bfloat16. The second of the four steps is skipped."""
    monkeypatch.setattr(muon, "MAX_BATCH", max_batch)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: 0)
    torch.manual_seed(0)
    sizes = [rows * columns for rows, columns in SHAPES]
    start = 0.02 * torch.randn(sum(sizes), device="cuda")
    pieces = [(offset, 256 if rows == 768 else rows, columns)
              for (rows, columns), offset in zip(SHAPES, torch.tensor([0, *sizes]).cumsum(0).tolist())
              for offset in (range(offset, offset + 3 * 256**2, 256**2) if rows == 768 else [offset])]
    theirs = [torch.nn.Parameter(start[at:at + rows * columns].view(rows, columns).clone())
              for at, rows, columns in pieces]
    optimizer = torch.optim.Muon(theirs, lr=LR, weight_decay=DECAY)
    places = [(torch.empty(shape, device="meta"), at)
              for shape, at in zip(SHAPES, torch.tensor([0, *sizes]).cumsum(0).tolist())]
    ours, momentum = muon.Muon(places, sum(sizes), None, use_kernels), torch.zeros_like(start)
    p = Partition(start.clone(), None, start.bfloat16(), {"lr": LR, "weight_decay": DECAY})
    for step in range(4):
        grads = torch.randn_like(start)
        norm = grads.norm() if step != 1 else torch.tensor(float("inf"), device="cuda")
        torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")  # its many launches don't wait for backward
        ours.step(p._replace(grads=grads.clone()), momentum, norm, CLIP, 1e9)
        torch.cuda.set_sync_debug_mode("default")
        if step == 1:
            continue
        for (at, rows, columns), param in zip(pieces, theirs):
            param.grad = grads[at:at + rows * columns].view(rows, columns) * (CLIP / (norm + 1e-6))
        optimizer.step()
    for (at, rows, columns), param in zip(pieces, theirs):
        own, first = p.master[at:at + rows * columns], start[at:at + rows * columns]
        assert (own - param.detach().flatten()).norm() < 0.02 * (own - first).norm()
    assert torch.equal(p.half, p.master.bfloat16())
