"""The figures that a run reports, against a planted clock and against plain PyTorch."""

import math

import numpy as np
import pytest
import torch
from conftest import done

from runtime.checkpoint.load import load_model
from runtime.monitor.lines import format_peak

# A clock that moves by 0.3 s in each micro-step and 7 s in each batch of an evaluation.
# Each look takes a nanosecond, because a save divides by its time. Waiting for data takes 0.125 s
# per step. The GPU that there isn't would make 1 GFLOP/s
CLOCK = """
import time
from types import SimpleNamespace
from runtime.data import loader
from runtime.engine.engine import Engine
from runtime.monitor import runlog

seconds = 1000.0
waited = 0.0

def monotonic():
    global seconds
    seconds += 1e-9
    return seconds

def look_at_data_clock():
    global waited
    waited += 0.125
    return waited

def taking(method, duration):
    def timed(*args):
        global seconds
        seconds += duration
        return method(*args)
    return timed

time.monotonic = monotonic
loader.time = SimpleNamespace(perf_counter=look_at_data_clock)
Engine.micro_step = taking(Engine.micro_step, 0.3)
Engine.evaluate = taking(Engine.evaluate, 7.0)
runlog.peak_flops = lambda device: 1e9
"""
# 6 N + 12 n_layer n_embd T. N: 28 x 32, two blocks of 12 x 32^2 + 13 x 32, and the last layer norm
FLOPS_PER_TOKEN = 6 * (28 * 32 + 2 * (12 * 32**2 + 13 * 32) + 2 * 32) + 12 * 2 * 32 * 32


def test_speed_is_that_of_all_ranks_without_evaluations(train):
    """Steps of 2 x 0.3 s, of which lines 3 and 6 cover two each. Evaluations after 0, 4 and 8."""
    args = ("--max_iters=8", "--eval_interval=4", "--log_interval=3")
    run = done(train(*args, ranks=2, plant=CLOCK))
    steps = [record for record in run.history if "loss" in record]
    assert [record["iter"] for record in steps] == [1, 3, 6, 8]
    # 2 ranks x 2 micro-steps x 2 sequences x 32 tokens in 0.6 s
    for record in steps:
        assert record["ms"] == pytest.approx(600, rel=1e-6)
        assert record["data_ms"] == pytest.approx(125)
        assert record["tokens_per_s"] == pytest.approx(256 / 0.6, rel=1e-6)
        assert record["mfu"] == pytest.approx(256 / 0.6 * FLOPS_PER_TOKEN / 1e9 / 2, rel=1e-6)
        assert record["tokens"] == record["iter"] * 256

    # The first evaluation, of one batch per split and rank, and the first step
    assert steps[0]["first_step_s"] == pytest.approx(14.6, rel=1e-6)
    evaluations = [record for record in run.history if "val_loss" in record]
    assert [record["eval_s"] for record in evaluations] == pytest.approx([14] * 3, rel=1e-6)

    # Since the first step: 2 steps in 1.2 s leave 5 in 3 s, and 5 in 17 s leave 2 in 6.8 s
    lines = [line for line in run.stdout.splitlines() if line.startswith("iter ")]
    for line, time_left in zip(
        lines[1:], ("37.5%, 0:03", "75.0%, 0:07", "100.0%, 0:00"), strict=True
    ):
        assert "time 600.00ms" in line and "427 tokens/s, mfu 3.9%" in line
        assert line.endswith(f"{time_left} left")


def test_speed_and_time_left_follow_the_length_of_sequences(train):
    """Steps of 2 x 0.3 s, of 4 sequences of 32 tokens: 30 of them cut to 8 tokens, 30 whole."""
    args = ("--max_iters=60", "--length_ramp=8@0, 32@0.5", "--eval_interval=100")
    run = done(train(*args, "--log_interval=20", plant=CLOCK))
    short = FLOPS_PER_TOKEN - 12 * 2 * 32 * (32 - 8)
    steps = [record for record in run.history if "loss" in record]
    assert [record["iter"] for record in steps] == [1, 20, 40, 60]
    flops = [short, short, (short + FLOPS_PER_TOKEN) / 2, FLOPS_PER_TOKEN]
    for record, per_token in zip(steps, flops, strict=True):
        assert record["tokens_per_s"] == pytest.approx(128 / 0.6, rel=1e-6)
        assert record["mfu"] == pytest.approx(128 / 0.6 * per_token / 1e9, rel=1e-6)

    # A whole step has 1.112 times the FLOPs of a short one. After 20 steps of 0.6 s, 10 short and
    # 30 whole ones are left: 43.36 x 0.6 s = 26.0 s. After 40, the clock has been as fast for whole
    # steps: 20 are left, and since the first one 29 short and 10 whole took 23.4 s
    assert FLOPS_PER_TOKEN / short == pytest.approx(1.112, abs=1e-3)
    lines = [line for line in run.stdout.splitlines() if line.startswith("iter ")]
    for line, time_left in zip(lines[1:], ("0:26", "0:13", "0:00"), strict=True):
        assert line.endswith(f"{time_left} left"), line


def window_losses(out_dir, tag, tokens, offsets):
    """The mean loss of each window of 32 targets, in plain PyTorch with the weights of a tag."""
    model, _ = load_model(out_dir, tag)
    model.eval()
    losses = []
    for offset in offsets:
        window = torch.from_numpy(tokens[offset : offset + 33].astype(np.int64))
        with torch.no_grad():
            logits = model(window[None, :-1])[0].double()
        losses.append(torch.nn.functional.cross_entropy(logits, window[1:]).item())
    return np.array(losses)


def test_an_evaluation_is_that_of_plain_pytorch(train, characters):
    """9 windows on 2 ranks: 5 and 4, in batches of 3. So both ranks pad their second batch."""
    sizes = ("--batch_size=3", "--gradient_accumulation_steps=1")
    run = done(train(*sizes, "--eval_iters=3", "--keep_last=9", ranks=2))
    evaluations = [record for record in run.history if "val_loss" in record]
    assert [record["iter"] for record in evaluations] == [0, 2, 4]
    for record in evaluations[1:]:
        for split in ("train", "val"):
            tokens = np.fromfile(characters / f"{split}.bin", np.uint16)
            offsets = np.linspace(0, len(tokens) - 33, 9).astype(int)  # evenly spaced
            losses = window_losses(run.out_dir, f"iter_{record['iter']}", tokens, offsets)
            assert record[f"{split}_loss"] == pytest.approx(losses.mean(), rel=1e-5)
            error = losses.std(ddof=1) / 9**0.5
            assert record[f"{split}_loss_stderr"] == pytest.approx(error, rel=1e-4)
        assert record["perplexity"] == pytest.approx(math.exp(record["val_loss"]), rel=1e-9)
        # Each character is one byte
        bits = record["val_loss"] / math.log(2)
        assert record["bits_per_byte"] == pytest.approx(bits, rel=1e-9)


@pytest.mark.parametrize("iter_num, whole_from, told", [
    (2, 0, "peak memory 10.3 GB (estimated: 40.0 GB)"),
    (1201, 1200, "peak memory 10.3 GB (estimated: 40.0 GB)"),
    (1200, 1200, "peak memory 10.3 GB (estimated: 40.0 GB from step 1,200 on, with micro-batches of batch_size)"),
])
def test_the_planned_peak_is_of_whole_micro_batches(iter_num, whole_from, told):
    assert format_peak(10.26e9, 40e9, iter_num, whole_from) == told
