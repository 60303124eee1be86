"""The steppers and sinks on plain tensors, without DeepSpeed: against torch.optim on whole tensors."""

import math
import subprocess
import sys

import pytest
import torch
from conftest import ROOT

from runtime.engine import offload
from runtime.engine.adamw import step_by_pytorch
from runtime.engine.any_optimizer import step_by_itself
from runtime.engine.clip import Clip, in_float32
from runtime.engine.grad_sink import GradSink, set_sink, take_grad
from runtime.engine.shard import Piece, Place, Shard, pieces_of

SIZES = (40, 7, 25)  # elements of the shards
OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
SCALE = 8.0  # the gradients have this loss scale in them
MAX_NORM = 1.0
SKIP_ABOVE = 50.0
STEPPERS = {
    "by PyTorch": lambda shard, clip: step_by_pytorch(shard, clip),
    "on the host": lambda shard, clip: offload.step_on_host(shard, clip, offload.PyTorchsAdam()),
}


def test_they_import_no_deepspeed():
    code = """
import sys
sys.modules["deepspeed"] = None  # importing it is an error
from runtime.engine import adamw, any_optimizer, clip, compact_adamw, grad_sink, muon, offload, shard
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def make_shards():
    """Shards of random weights, with AdamW's state at step 0, and the same weights as parameters."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], **OPTIONS)
    generator = torch.Generator().manual_seed(0)
    shards = []
    params = []
    for size in SIZES:
        master = torch.randn(size, generator=generator)
        master.grad = torch.zeros(size)  # where offload sends gradients
        optimizer.state[master] = {"step": torch.zeros(()), "exp_avg": torch.zeros(size),
                                   "exp_avg_sq": torch.zeros(size)}
        shards.append(Shard(master, master.bfloat16(), torch.zeros(size), optimizer, 0))
        params.append(torch.nn.Parameter(master.clone()))
    return shards, params


def gradients(step):
    """Gradients of a step. Their norms are about 8, but above SKIP_ABOVE in step 2, and small in step 3."""
    size = {2: 20.0, 3: 0.01}.get(step, 1.0)
    generator = torch.Generator().manual_seed(100 + step)
    return [size * torch.randn(n, generator=generator) for n in SIZES]


def plain_step(optimizer, params, grads):
    for param, grad in zip(params, grads):
        param.grad = grad.clone()
    torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
    optimizer.step()


@pytest.mark.parametrize("stepper", STEPPERS)
def test_adamw_is_pytorchs(stepper, monkeypatch):
    """Six steps, one of them skipped, clipped in all but one; on the host in pieces of 16 elements."""
    monkeypatch.setattr(offload, "PIECE", 16)
    shards, params = make_shards()
    optimizer = torch.optim.AdamW(params, **OPTIONS)
    for step in range(6):
        grads = gradients(step)
        norm = torch.cat(grads).norm()
        clip = Clip(norm, 1 / SCALE, MAX_NORM, SKIP_ABOVE)
        assert bool(clip.applies()) is (step != 2)
        for shard, grad in zip(shards, grads):
            shard.grads.copy_(SCALE * grad)
            STEPPERS[stepper](shard, clip)
            shard.state["step"] += clip.applies()
            assert not shard.grads.any()
        if step != 2:
            plain_step(optimizer, params, grads)
        for shard, param in zip(shards, params):
            assert torch.allclose(shard.master, param, rtol=1e-6, atol=1e-7)
            assert torch.equal(shard.half, shard.master.bfloat16())
    assert shards[0].state["step"] == 5


def test_an_optimizers_own_step_is_clipped_and_skipped():
    shards, params = make_shards()
    weights = [torch.nn.Parameter(shard.master) for shard in shards]
    ours = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    shards = [
        Shard(weight, shard.half, shard.grads, ours, 0)
        for weight, shard in zip(weights, shards)
    ]
    theirs = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    for step in range(4):
        grads = gradients(step)
        clip = Clip(torch.cat(grads).norm(), 1 / SCALE, MAX_NORM, SKIP_ABOVE)
        for shard, grad in zip(shards, grads):
            shard.grads.copy_(SCALE * grad)
        step_by_itself(ours, shards, clip)
        if step != 2:
            plain_step(theirs, params, grads)
        for shard, param in zip(shards, params):
            assert torch.allclose(shard.master, param, rtol=1e-6, atol=1e-7)
            assert not shard.grads.any()


def test_a_clip_without_a_limit_only_takes_the_loss_scale_away():
    assert Clip(torch.tensor(3.0), 0.25, math.inf, math.inf).factor() == 0.25
    assert Clip(torch.tensor(4.0), 0.25, 1.0, math.inf).factor().item() == pytest.approx(1 / 16, rel=1e-6)
    assert not Clip(torch.tensor(math.nan), 1.0, 1.0, math.inf).applies()


@pytest.mark.parametrize("factor, made", [(1 + 1e-9, False), (1 + 1e-6, True), (math.inf, True)])
def test_the_device_and_python_compare_a_norm_with_the_same_limit(factor, made):
    """The first limit is above the norm in float64 alone."""
    norm = torch.tensor(0.7)
    limit = in_float32(norm.item() * factor)
    assert Clip(norm, 1.0, math.inf, limit).applies().item() is made
    assert (norm.item() < limit) is made


def test_pieces_of_a_rank_make_up_the_parameters():
    """Three parameters of 5, 7 and 4 elements on three ranks of 6, the last two elements of which are padding."""
    params = [torch.nn.Parameter(torch.zeros(n)) for n in (5, 7, 4)]
    places = tuple(Place(param, offset) for param, offset in zip(params, (0, 5, 12)))
    found = [[(p.param.numel(), p.start, p.offset, p.numel) for p in pieces_of(places, 6, rank)]
             for rank in range(3)]
    assert found == [[(5, 0, 0, 5), (7, 0, 5, 1)], [(7, 1, 0, 6)], [(4, 0, 0, 4)]]
    assert isinstance(pieces_of(places, 6, 0)[0], Piece)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sink_of_one_backward_begins_anew_and_is_zero_if_nothing_comes(dtype):
    sink = GradSink(torch.full((2, 3), 7.0, dtype=dtype), one_backward=True)
    a, b = torch.ones(2, 4, dtype=dtype), torch.ones(4, 3, dtype=dtype)
    sink.add_product(a, b)
    sink.add(torch.ones(2, 3))
    sink.finish_backward()
    assert torch.equal(sink.total, torch.full((2, 3), 5.0, dtype=dtype))
    sink.add(torch.ones(2, 3))
    sink.add_product(a, b)  # the second of two uses
    sink.finish_backward()
    assert torch.equal(sink.total, torch.full((2, 3), 5.0, dtype=dtype))
    sink.finish_backward()
    assert not sink.total.any()


def test_a_sink_of_sums_takes_gradients_of_autograd_and_of_kernels():
    weight = torch.nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
    sink = GradSink(torch.zeros(2, 3))
    set_sink(weight, sink)
    for _ in range(3):
        weight.grad = torch.full_like(weight, 1 / 3)
        take_grad(weight)
        sink.add_product(torch.ones(2, 4).bfloat16(), torch.ones(4, 3).bfloat16())
        sink.finish_backward()
    take_grad(weight)  # a kernel has used it: there is none
    third = torch.tensor(1 / 3).bfloat16().float()
    assert weight.grad is None
    assert torch.allclose(sink.total, torch.full((2, 3), 12.0) + 3 * third)
