"""Muon on a GPU, in bfloat16, against torch.optim.Muon on the same gradients."""

import itertools

import pytest
import torch
from muon_reference import PlainMuon, by_singular_values, low_rank_and_noise

from model import GPT, GPTConfig
from runtime.engine import muon
from runtime.engine.clip import Clip
from runtime.engine.shard import Place, Shard

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
    model = GPT(GPTConfig(block_size=8, vocab_size=64, n_layer=3, n_head=4, n_embd=256)).cuda()
    group = muon.split_matrices(model.parameter_groups(DECAY), model, 1, world_size=1)[-1]
    matrices = group["params"]
    sizes, start = [p.numel() for p in matrices], torch.cat([p.detach().flatten() for p in matrices])
    optimizer = PlainMuon(model, DECAY, 1)
    optimizer.param_groups[0]["lr"] = LR
    places = [Place(p, offset) for p, offset in zip(matrices, itertools.accumulate(sizes, initial=0))]
    ours, momentum = muon.Muon(places, group["parts"], start.numel(), None, use_kernels), torch.zeros_like(start)
    options = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=LR, weight_decay=DECAY)
    p = Shard(start.clone(), start.bfloat16(), torch.empty_like(start), options, group_index=0)
    options.state[p.master] = {"exp_avg": momentum}
    for step in range(4):
        grads = torch.randn_like(start)
        norm = grads.norm() if step != 1 else torch.tensor(float("inf"), device="cuda")
        torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")  # its many launches don't wait for backward
        p.grads.copy_(8 * grads)
        ours.step(p, Clip(norm, 1 / 8, CLIP, 1e9))
        torch.cuda.set_sync_debug_mode("default")
        if step == 1:
            continue
        for matrix, grad in zip(matrices, grads.split(sizes)):
            matrix.grad = grad.view_as(matrix) * (CLIP / (norm + 1e-6))
        optimizer.step()
    for matrix, own, first in zip(matrices, p.master.split(sizes), start.split(sizes)):
        assert (own - matrix.detach().flatten()).norm() < 0.02 * (own - first).norm()
    assert torch.equal(p.half, p.master.bfloat16())
