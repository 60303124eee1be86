"""One rank of test_muon.py: torchrun --nproc_per_node=N muon_worker.py OUT.pt

Trains a tiny GPT of three blocks with Muon, in each way of the table below, and in plain PyTorch with
torch.optim.Muon. Rank 0 writes {way: the weights after each step, {name: tensor}}."""

import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[n]) for n in (2, 1)]
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist
from muon_reference import PlainMuon, by_singular_values
from zero_training import initialize, paths, set_rates, weights

from model import GPT, GPTConfig
from runtime.cluster.ranks import shut_down
from runtime.data.loader import BatchSizes
from runtime.engine.engine import Engine
from runtime.engine.muon import split_matrices

SEQUENCES, ACCUMULATION, T, VOCAB, LAYERS, STEPS = 24, 2, 16, 61, 3, 4
ADAM, LR, MUON_LR, CLIP, DECAY = {"betas": (0.9, 0.95), "eps": 1e-5}, 1e-2, 3e-2, 0.3, 0.1
WAYS = {"muon": {}, "buckets": {"local": False}, "skipped": {"bad": "skip_above"}, "nan": {"bad": "nan"},
        "bfloat16": {"dtype": "bfloat16"}, "groups": {"own_groups": True}}


def fresh_model():
    torch.manual_seed(0)
    return GPT(GPTConfig(block_size=T, vocab_size=VOCAB, n_layer=LAYERS, n_head=2, n_embd=32))


def data(step):
    return torch.randint(VOCAB, (SEQUENCES, T + 1), generator=torch.Generator().manual_seed(step))


def groups_of_a_user(model, **options):
    """Freeze a matrix, and return three groups: vectors, matrices of the first block alone, and the other tensors.

    options: of the first block's matrices, which have a learning rate of their own."""
    model.transformer.h[2].mlp.c_fc.weight.requires_grad_(False)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    vectors = [p for p in trained.values() if p.dim() == 1]
    first = [p for name, p in trained.items() if ".h.0." in name and p.dim() == 2]
    others = [p for name, p in trained.items() if ".h.0." not in name and p.dim() == 2]
    return [
        {"params": vectors, "weight_decay": 0.0},
        {"params": first, "weight_decay": 3.0, **options},
        {"params": others, "weight_decay": 1.0},
    ]


def plain(orthogonalize=None, own_groups=False):
    """The same training in plain PyTorch, over the whole batch."""
    if orthogonalize:
        torch.optim._muon._zeropower_via_newtonschulz = orthogonalize
    model, trajectory = fresh_model(), []
    groups = groups_of_a_user(model, lr_ratio=2) if own_groups else None
    optimizer = PlainMuon(model, DECAY, MUON_LR / LR, groups=groups, **ADAM)
    for step in range(STEPS):
        set_rates(optimizer, LR * (1 - step / 8))
        model.zero_grad()
        model(data(step)[:, :-1], data(step)[:, 1:]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        trajectory.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return trajectory


def train(local=True, bad=None, dtype="float32", own_groups=False):
    """Train as the script does. bad: between the second and the third step is one that has to be skipped."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    batch, model, trajectory = BatchSizes(SEQUENCES // ACCUMULATION // ranks, ACCUMULATION, ranks, T), fresh_model(), []
    # Sorted as for one rank, so that 2 and 4 ranks cut matrices
    groups = groups_of_a_user(model, lr=2 * LR) if own_groups else model.parameter_groups(DECAY)
    groups = split_matrices(groups, model, MUON_LR / LR, world_size=1)
    deepspeeds = initialize(model, groups, {"zero_optimization": {"stage": 2}}, batch, CLIP, dtype, lr=LR, **ADAM)
    engine = Engine(deepspeeds, paths(deepspeeds, model, local))
    for step in [0, 1, *[2] * (bad is not None), *range(2, STEPS)]:
        is_bad, bad = bad if len(trajectory) == 2 else None, None if len(trajectory) == 2 else bad
        set_rates(deepspeeds.optimizer, LR * (1 - step / 8))
        hook = model.transformer.h[1].mlp.c_fc.weight.register_hook(
            lambda grad: grad * float("nan") if rank == ranks - 1 else grad) if is_bad == "nan" else None
        for sequences in data(step).view(ranks, ACCUMULATION, -1, T + 1)[rank]:
            engine.micro_step(sequences[:, :-1], sequences[:, 1:])
        result = engine.step(1e-9 if is_bad == "skip_above" else float("inf"))
        assert result.applied == (is_bad is None)
        if hook:
            hook.remove()
        if not is_bad:
            trajectory.append(weights(deepspeeds))
    deepspeeds.destroy()
    return trajectory


def main(out):
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.logger.setLevel("ERROR")
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    trajectories = {name: train(**options) for name, options in WAYS.items()}
    trajectories |= {"start": dict(fresh_model().named_parameters()), "torch": plain(),
                     "singular values": plain(by_singular_values),
                     "groups in PyTorch": plain(by_singular_values, own_groups=True)}
    if dist.get_rank() == 0:
        torch.save(trajectories, out)
    shut_down()


if __name__ == "__main__":
    main(sys.argv[1])
