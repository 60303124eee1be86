"""A run in three parts against plain PyTorch, with settings that are not the defaults.

Each part is on another number of ranks and at another ZeRO stage. So the second and the third one
read what another resume has saved.
"""

import math

import numpy as np
import pytest
import torch
from conftest import CHARS, done, stage

from model import GPT, GPTConfig
from runtime.checkpoint.load import load_model
from runtime.data.loader import locate_sequences, read_sequences
from runtime.data.sequences import TokenStream

STEPS = 9
SEQUENCES = 6  # of a step
T = 24
WINDOWS = 6  # of an evaluation
SEED = 7
SHAPE = {"n_layer": 3, "n_head": 4, "n_embd": 20, "bias": False}
WARMUP = 2
PEAK = 3e-3
LOWEST = 5e-4
DECAY_STEPS = 8
CLIP = 0.7  # norms are 0.9 to 3
DECAY = 0.3
BETAS = (0.8, 0.97)
SETTINGS = (
    f"--seed={SEED}",
    f"--block_size={T}",
    *[f"--{name}={value}" for name, value in SHAPE.items()],
    f"--learning_rate={PEAK}",
    f"--min_lr={LOWEST}",
    f"--warmup_iters={WARMUP}",
    f"--lr_decay_iters={DECAY_STEPS}",
    f"--grad_clip={CLIP}",
    f"--weight_decay={DECAY}",
    f"--beta1={BETAS[0]}",
    f"--beta2={BETAS[1]}",
    "--eval_interval=3",
    "--keep_last=9",
)
# (ranks, ZeRO stage, sequences of a micro-batch, micro-steps)
PARTS = ((3, 3, 1, 2), (2, 2, 3, 1), (1, 3, 2, 3))


def learning_rate(step):
    """After a linear warmup, a cosine from the peak to the lowest."""
    if step < WARMUP:
        return PEAK * (step + 1) / (WARMUP + 1)
    progress = min(1, (step - WARMUP) / (DECAY_STEPS - WARMUP))
    return LOWEST + (PEAK - LOWEST) * (1 + math.cos(math.pi * progress)) / 2


def train_plainly(characters):
    """Return what AdamW on whole steps gives: {key of a record: values}, and the weights."""
    tokens = {}
    for split in ("train", "val"):
        tokens[split] = np.fromfile(characters / f"{split}.bin", np.uint16)
    torch.manual_seed(SEED)
    model = GPT(GPTConfig(block_size=T, vocab_size=len(CHARS), **SHAPE))
    decayed = [param for param in model.parameters() if param.dim() == 2]
    others = [param for param in model.parameters() if param.dim() < 2]
    groups = [
        {"params": decayed, "weight_decay": DECAY},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=BETAS)
    offsets = np.linspace(0, len(tokens["val"]) - T - 1, WINDOWS).astype(int)
    windows = np.stack([tokens["val"][offset : offset + T + 1] for offset in offsets])
    windows = torch.from_numpy(windows.astype(np.int64))

    result = {"loss": [], "grad_norm": [], "lr": [], "val_loss": []}
    for step in range(STEPS):
        if step % 3 == 0:
            with torch.no_grad():
                result["val_loss"].append(model(windows[:, :-1], windows[:, 1:]).item())
        ids = np.arange(step * SEQUENCES, (step + 1) * SEQUENCES)
        located = locate_sequences(ids, [(TokenStream(tokens["train"], T), 1)], SEED)
        x, y = read_sequences(located, len(CHARS))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        loss = model(x, y)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        result["loss"].append(loss.item())
        result["grad_norm"].append(norm.item())
        result["lr"].append(learning_rate(step))
    with torch.no_grad():
        result["val_loss"].append(model(windows[:, :-1], windows[:, 1:]).item())
    return result, model.state_dict()


def test_three_parts_are_one_run_of_plain_pytorch(train, characters, tmp_path):
    expected, weights = train_plainly(characters)
    assert min(expected["grad_norm"]) > CLIP
    for number, (ranks, n, micro_batch, micro_steps) in enumerate(PARTS):
        start = "resume" if number else "scratch"
        run = done(
            train(
                *SETTINGS,
                stage(n),
                f"--init_from={start}",
                f"--max_iters={3 * (number + 1)}",
                f"--batch_size={micro_batch}",
                f"--gradient_accumulation_steps={micro_steps}",
                f"--eval_iters={WINDOWS // micro_batch}",
                ranks=ranks,
                out_dir=tmp_path / "out",
            )
        )
    for key, values in expected.items():
        found = [record[key] for record in run.history if key in record]
        assert found == pytest.approx(values, rel=1e-5), key
    tokens = [record["tokens"] for record in run.history if "tokens" in record]
    assert tokens == [SEQUENCES * T * step for step in range(1, STEPS + 1)]

    trained, _ = load_model(run.out_dir, "final")
    for name, weight in trained.state_dict().items():
        assert torch.allclose(weight, weights[name], atol=1e-6), name
