"""Compact optimizer state on a GPU: the kernel against plain PyTorch, Muon, and whole runs."""

import math
import shutil

import pytest
import torch
from conftest import ROOT, done, launch, read_history

from runtime.engine import compact, compact_adamw
from runtime.engine.clip import Clip
from runtime.engine.shard import Shard

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
SIZE = 10 * compact.CHUNK // 4 + 77  # three chunks of PyTorch's, and a block that is shorter
RUN = ("--init_from=scratch", "--n_layer=2", "--n_head=2", "--n_embd=64", "--block_size=64", "--batch_size=4",
       "--gradient_accumulation_steps=2", "--learning_rate=1e-3", "--warmup_iters=2", "--max_iters=8",
       "--eval_interval=4", "--eval_iters=2", "--keep_last=10", "--compact_optimizer=True", "--deterministic=True")


def make_shard():
    generator = torch.Generator("cuda").manual_seed(0)
    weights = torch.randn(SIZE, generator=generator, device="cuda")
    half = weights.bfloat16()
    state = compact.compact_state(half, compact.take_remainder(weights, half), is_muon=False)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(compact.placeholder(SIZE, half.device))], **OPTIONS)
    master = optimizer.param_groups[0]["params"][0]
    optimizer.state[master] = {"step": torch.zeros((), device="cuda")}
    return Shard(master, half, torch.zeros(SIZE, device="cuda"), optimizer, 0, compact=state)


def stored(shard):
    moments = shard.compact.moments
    return [shard.half.view(torch.int16), shard.compact.remainder, moments["exp_avg"].codes, moments["exp_avg"].scales,
            moments["exp_avg_sq"].codes, moments["exp_avg_sq"].scales]


def test_the_kernel_stores_the_bits_of_pytorch():
    """Six steps, one of them with NaN and one above the limit. The kernel waits for nothing."""
    by_kernel, by_pytorch = make_shard(), make_shard()
    generator = torch.Generator("cuda").manual_seed(1)
    for step in range(6):
        scale = 10.0 ** torch.randint(-9, 2, (SIZE,), generator=generator, device="cuda")
        grads = scale * torch.randn(SIZE, generator=generator, device="cuda")
        norm = {2: torch.tensor(math.nan), 4: torch.tensor(99.0)}.get(step, torch.tensor(3.0)).cuda()
        clip = Clip(norm, 1 / 8, 1.0, 50.0)
        for shard, stepper in ((by_kernel, compact_adamw.step_by_kernel), (by_pytorch, compact_adamw.step_by_pytorch)):
            shard.grads.copy_(grads)
            is_kernel = shard is by_kernel
            torch.cuda.set_sync_debug_mode("error" if is_kernel and step > 1 else "default")
            stepper(shard, clip)
            torch.cuda.set_sync_debug_mode("default")
            shard.state["step"] += clip.applies()
            assert not shard.grads.any()
        for name, got, expected in zip(("half", "remainder", "m", "m scales", "v", "v scales"), stored(by_kernel),
                                       stored(by_pytorch)):
            assert torch.equal(got, expected), (step, name, (got != expected).sum().item())
    assert by_kernel.state["step"] == 4


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_resume_is_exact_and_losses_are_those_of_fp32_state(characters, tmp_path, optimizer):
    def run(name, *args):
        settings = (*RUN, f"--optimizer={optimizer}", f"--dataset={characters}", f"--out_dir={tmp_path / name}", *args)
        done(launch(ROOT / "train_deepspeed.py", *settings))
        return {r["iter"]: r["loss"] for r in read_history(tmp_path / name) if "loss" in r}

    straight = run("straight")
    plain = run("plain", "--compact_optimizer=False")
    for iteration, loss in plain.items():
        assert straight[iteration] == pytest.approx(loss, abs=0.02), iteration
    shutil.copytree(tmp_path / "straight", tmp_path / "resumed", symlinks=True)
    assert run("resumed", "--init_from=resume", "--resume_tag=iter_4", "--overwrite=True") == straight
