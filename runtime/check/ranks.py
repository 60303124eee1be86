"""One of two ranks of doctor.py --model, on CPUs: ranks.py FOLDER

Trains a tiny model at ZeRO-2 and 3. Rank 0 writes FOLDER/NAME.pt for each way, {"losses",
"weights"}, or FOLDER/NAME.txt with why there is none, and saves checkpoints in FOLDER/tags-STAGE.
"""

import os
import sys
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from runtime.check.optimizer import optimizer_in_use
from runtime.check.tiny import VOCAB, Tiny, Unchecked, default_config, describe_error, tiny_of
from runtime.check.training import (
    ACCUMULATION,
    CLIP,
    CPU,
    MICRO,
    RANKS,
    STEPS,
    gradient_descent,
    json_of,
    start_engine,
    train_step,
    weights_of,
)
from runtime.checkpoint.model_source import source_of
from runtime.checkpoint.saver import Saver
from runtime.checkpoint.tags import TagStore
from runtime.chosen_model import GPT, GPTConfig
from runtime.cluster.join import set_network_interfaces
from runtime.cluster.ranks import all_reduce_sum, shut_down
from runtime.engine import setup
from runtime.engine.engine import Engine
from runtime.model_parts import ties_of
from runtime.output import exit_on_error

TIMEOUT_S = 60  # of a collective
# What the code of a model raises
OF_THE_MODEL = (RuntimeError, AttributeError, TypeError, ValueError, KeyError)
# (stage, fast); what may be refused is last
GRADIENTS = [(2, True), (3, True), (2, False), (3, False)]


def write(folder: Path, name: str, losses: list[float], engine: Engine) -> None:
    """Write the result of a way, with a rename, so that a reader sees all of it."""
    losses = [total / RANKS for total in all_reduce_sum(*losses)]
    weights = weights_of(engine)
    if dist.get_rank() == 0:
        torch.save({"losses": losses, "weights": weights}, folder / "unfinished")
        os.rename(folder / "unfinished", folder / f"{name}.pt")


def train_and_save(tiny: Tiny, folder: Path, stage: int) -> None:
    """Train with the optimizer in use, and save a checkpoint."""
    config = json_of(stage, RANKS, ACCUMULATION, CLIP)
    engine = start_engine(tiny, config, RANKS, optimizer_in_use, fast=True)
    model = engine.module
    model_state = {
        "model": asdict(tiny.config),
        "ties": ties_of(model),
        "model_source": source_of(model),
    }
    # Train
    losses = [train_step(engine, step, RANKS, ACCUMULATION) for step in range(STEPS)]
    write(folder, f"training-{stage}", losses, engine)

    # Save what a training run would save
    store = TagStore(folder / f"tags-{stage}", read_only=False)
    saver = Saver(engine, store, 1, 0, False, on_saved=lambda *_: None)
    state = {
        "iter_num": STEPS,
        "sequences": STEPS * ACCUMULATION * RANKS * MICRO,
        "best_val_loss": 0.0,
        "evals_since_best": 0,
        "improved": False,
        "wandb_id": None,
        "grad_norms": [],
        "grad_norm_ratios": [],
        "settings": {
            "dataset": "none",
            "seed": 0,
            "optimizer": "adamw",
            "batch_size": 1,
            "gradient_accumulation_steps": ACCUMULATION,
        },
        "sources": ["scratch"],
        "lora": None,
        "data": {
            "tokenizer": {"kind": "char", "chars": "".join(map(chr, range(64, 64 + VOCAB)))},
            "vocab_size": VOCAB,
            "template": None,
            "datasets": [],
        },
        **model_state,
    }
    saver.save(f"iter_{STEPS}", [], state)
    saver.wait_or_exit()
    engine.deepspeed.destroy()


def take_gradients(tiny: Tiny, folder: Path, stage: int, fast: bool) -> None:
    """Make a step of two micro-steps that subtracts the gradient."""
    config = json_of(stage, RANKS, ACCUMULATION, 0.0)
    engine = start_engine(tiny, config, RANKS, gradient_descent, fast)
    losses = [train_step(engine, 0, RANKS, ACCUMULATION)]
    write(folder, f"gradients-{stage}-{'fast' if fast else 'slow'}", losses, engine)
    engine.deepspeed.destroy()


def main(folder: Path) -> None:
    """Train in all ways. What another rank can't follow ends this process with exit code 2."""
    rank = int(os.environ["RANK"])
    # Join the other rank
    set_network_interfaces()
    store = dist.FileStore(str(folder / "store"), RANKS)
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timeout)
    torch.set_num_threads(1)
    setup.setup_device(CPU, 0, json_of(2, RANKS, ACCUMULATION, CLIP))
    tiny = tiny_of(GPT, default_config(GPTConfig))
    for stage in (2, 3):
        try:
            train_and_save(tiny, folder, stage)
        except Unchecked as reason:  # the same on all ranks
            (folder / f"training-{stage}.txt").write_text(str(reason), encoding="utf-8")
    for stage, fast in GRADIENTS:
        take_gradients(tiny, folder, stage, fast)
    shut_down()


if __name__ == "__main__":
    with exit_on_error("interrupted"):
        try:
            main(Path(sys.argv[1]))
        except OF_THE_MODEL as error:
            print(describe_error(error), file=sys.stderr, flush=True)
            os._exit(2)
