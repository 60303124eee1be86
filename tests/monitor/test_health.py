"""Steps that go wrong, planted: what is reported, what is skipped, and how the run ends."""

import json
import math
import os

import pytest
import torch
from conftest import FLOAT16, ROOT, done, stage

from runtime.engine.engine import StepResult
from runtime.monitor.health import STRAGGLER_WINDOW, SpikeDetector, StepHealth, StragglerDetector

# train_deepspeed.py with a loss that is spoilt, times `factor`: in these training forwards of some ranks, of which the
# first one is 1
SPOILT = """
import torch
import model
from runtime.monitor import health
health.HISTORY, health.RISE_WINDOW = {history}
forwards = {forwards}
ranks, factor, training = {ranks_of_it}, {factor}, {training}
plain, count = model.GPT.forward, 0
def forward(self, idx, targets=None, reduction="mean"):
    global count
    loss = plain(self, idx, targets, reduction)
    if self.training is training:
        count += 1
        if int(os.environ["RANK"]) in ranks and count in forwards:
            if factor == "memory":
                raise torch.OutOfMemoryError("CUDA out of memory")
            loss = loss * factor
    return loss
model.GPT.forward = forward
"""


@pytest.fixture
def spoilt(train, tmp_path):
    def run(forwards, *args, rank=1, factor="float('nan')", ranks=2, training=True, history=(2000, 300)):
        ranks_of_it = [rank] if isinstance(rank, int) else rank
        plant = SPOILT.format(forwards=forwards, ranks_of_it=ranks_of_it, factor=factor, training=training,
                              history=history)
        return train("--eval_interval=100", *args, ranks=ranks, out_dir=tmp_path / "out",
                     plant=FLOAT16 + plant if "--dtype=float16" in args else plant)
    return run


def warnings_in(run):
    """{iter: warning} of a run."""
    return {r["iter"]: r["warning"] for r in run.history if "warning" in r}


def rises_in(run):
    """The iterations of warnings, but for those of a straggler: on a busy machine, one rank may be late by itself."""
    return [it for it, text in warnings_in(run).items() if "is a straggler" not in text]


@pytest.mark.parametrize("args", [(stage(2),), (stage(2), "--dtype=bfloat16"), (stage(3),)],
                         ids=["stage 2", "stage 2 bfloat16", "stage 3"])
def test_a_nan_on_one_rank_skips_the_step_on_both(spoilt, args):
    """In the second micro-step of the third iteration, of rank 1's two."""
    run = done(spoilt([6], "--max_iters=5", *args))
    assert warnings_in(run) == {3: "the loss is not finite on rank 1; step skipped"}
    assert "step 3: the loss is not finite on rank 1; step skipped" in run.stdout
    assert [it for it, loss in run.losses.items() if not math.isfinite(loss)] == [3] and run.losses[5] < run.losses[1]


def test_all_ranks_with_a_nan_are_named(spoilt):
    run = done(spoilt([4], "--max_iters=3", rank=[0, 2], ranks=3))
    assert warnings_in(run) == {2: "the loss is not finite on rank 0, rank 2; step skipped"}


def test_a_run_whose_gradient_stays_bad_saves_and_ends(spoilt):
    run = spoilt(range(5, 99), "--max_iters=20", "--max_skipped_steps=2", rank=0)
    assert run.returncode == 3 and "too many consecutive steps were skipped: lower the learning rate)\n" in run.stdout
    assert list(warnings_in(run)) == [3, 4, 5] and (run.out_dir / "latest").read_text() == "iter_5"
    assert json.loads((run.out_dir / "iter_5" / "manifest.json").read_text())["iter_num"] == 5


def test_bad_steps_with_good_ones_between_end_no_run(spoilt):
    """The steps 2, 4 and 5, of two micro-steps each: three in all, but only the allowed two in a row."""
    run = done(spoilt([4, 7, 9], "--max_iters=7", "--max_skipped_steps=2"))
    told = "the loss is not finite on rank 1; step skipped"
    assert warnings_in(run) == {2: told, 4: told, 5: told}
    assert list(run.losses) == [1, 2, 3, 4, 5, 6, 7]


def test_ruined_weights_push_out_no_tag_and_a_resume_outlives_its_logger(train):
    """A huge learning rate makes every weight NaN. Older tags stay. TensorBoard can't start, which stops nothing."""
    run = done(train("--max_iters=4", "--eval_interval=2", "--keep_last=2"))
    (run.out_dir / "tensorboard").write_text("in the way")
    wild = ("--learning_rate=1e30", "--min_lr=1e30", "--grad_clip=0", "--tensorboard_log=True", "--max_skipped_steps=4")
    on = train("--max_iters=40", "--eval_interval=2", "--keep_last=2", *wild, "--init_from=resume", out_dir=run.out_dir)
    assert on.returncode == 3 and "Traceback" not in on.stderr, on.stderr
    assert "tensorboard failed to start" in on.stdout and "; continuing without it" in on.stdout
    assert "checkpoint not saved, because the loss is not finite: start again with a lower learning rate, " in on.stdout
    assert {"iter_2", "iter_4"} <= {*os.listdir(run.out_dir)}
    assert (run.out_dir / "latest").read_text() == "iter_4"


@pytest.mark.parametrize("options, code", [(["--max_iters=3"], 2), (["--max_iters=9", "--max_skipped_steps=2"], 3)])
def test_a_run_that_saves_nothing_names_no_checkpoint(train, options, code):
    """Every loss is NaN after the first step, and every evaluation is later."""
    run = train("--learning_rate=1e30", "--min_lr=1e30", "--grad_clip=0", "--eval_interval=100", *options)
    assert run.returncode == code and "best" not in run.stdout and not (run.out_dir / "best").exists(), run.stdout
    assert "the loss is not finite: start again with" in run.stdout and "to continue from here" not in run.stdout


def test_a_run_that_recovers_from_nan_ends_as_any_other(spoilt):
    """The evaluation of iteration 2 is NaN, and saves nothing. That of iteration 4 saves the end."""
    run = done(spoilt(range(5, 9), "--eval_interval=2", rank=0, ranks=1, training=False))
    assert "step 2: train loss nan" in run.stdout
    assert not (run.out_dir / "iter_2").exists()
    assert (run.out_dir / "final" / "manifest.json").exists()


def test_a_run_that_ends_with_nan_names_the_best_checkpoint_alone(spoilt):
    """The evaluation of iteration 4, the last one, is NaN."""
    run = spoilt(range(9, 99), "--eval_interval=2", rank=0, ranks=1, training=False)
    assert run.returncode == 2 and "step 4: train loss nan" in run.stdout
    assert f"to sample from it: python sample.py --out_dir={run.out_dir} --tag=best\n" in run.stdout
    assert "final" not in run.stdout and not (run.out_dir / "final").exists()


@pytest.mark.parametrize("skip", [True, False])
def test_a_spike_is_told_of_and_skipped_on_demand(spoilt, skip):
    """One rank, two micro-steps per iteration; the 30th is a thousand times as loud. The run resumes after 25, when 20
    norms of its own would be too few."""
    done(spoilt((), "--max_iters=25", "--lr_decay_iters=32", ranks=1))
    run = done(spoilt([9, 10], "--max_iters=32", f"--skip_grad_spikes={skip}", "--grad_clip=0", "--init_from=resume",
                      rank=0, factor=1000, ranks=1))
    (warning,) = warnings_in(run).items()
    assert warning[0] == 30 and "times the recent median" in warning[1]
    assert warning[1].endswith("; step skipped") is skip


@pytest.mark.parametrize("training", [True, False], ids=["in a step", "in an evaluation"])
def test_out_of_memory_names_settings_that_take_less(spoilt, training):
    run = spoilt([1], "--max_iters=4", "--batch_size=4", factor="'memory'", rank=0, training=training)
    assert run.returncode and "out of memory: the estimate was " in run.stderr
    assert "OutOfMemoryError" not in run.stderr  # a traceback's
    suggested = run.stderr.split("It doesn't fit. Add one of these to your command")[1]
    assert "  --batch_size=" in suggested and "--gradient_checkpointing=True" in suggested


def test_a_straggler_is_not_noise():
    for slow, others, named in ((0.185, 0.058, True), (0.016, 0.005, True), (0.005, 0.003, False),
                                (0.07, 0.058, False)):
        detector = StragglerDetector()
        (*early, last) = [detector.check([others, slow]) for _ in range(STRAGGLER_WINDOW)]
        assert not any(early) and bool(last) is named and (not named or last.startswith("rank 1 is a straggler: "))


def test_a_straggler_is_reported_once_until_it_has_caught_up():
    detector = StragglerDetector()

    def reports(*seconds):
        """Return {measurement: the rank that was reported} of so many seconds per rank."""
        found = {}
        for number in range(STRAGGLER_WINDOW):
            message = detector.check(seconds)
            if message:
                found[number] = message.split(" is a straggler: ")[0]
        return found

    # The median of 20 measurements is 0.2 s when 10 of them are slow, and 0.3 s when 11 are
    assert reports(0.1, 0.1, 0.3) == {STRAGGLER_WINDOW - 1: "rank 2"}
    assert reports(0.1, 0.1, 0.3) == {}
    assert reports(0.3, 0.1, 0.1) == {10: "rank 0"}  # another one
    assert reports(0.1, 0.1, 0.1) == {}
    assert reports(0.3, 0.1, 0.1) == {9: "rank 0"}  # again


def test_a_norm_is_a_spike_by_those_before_it():
    spikes = SpikeDetector()
    assert [spikes.update(1.0) for _ in range(19)] == [None] * 19 and spikes.threshold() == math.inf
    assert spikes.update(100.0) is None and spikes.update(math.nan) is None and spikes.threshold() == 6.0
    assert spikes.update(9.0) == 9.0 and spikes.update(5.9) is None and spikes.threshold() == 6.0
    assert [spikes.update(9.0, applied=False) for _ in range(60)] == [9.0] * 60  # skipped ones stay spikes
    zeros = SpikeDetector([0.0] * 20)  # of data with nothing to learn
    assert zeros.update(0.0) is None and zeros.update(1.0) is None and zeros.threshold() == math.inf


@pytest.fixture
def warnings_of(process_group):
    """Return the warnings, {step: [messages]}, of a run with these norms. It resumes after step `first`."""
    def check_all(norms, first=0, skipped=None):
        warnings, before = {}, SpikeDetector()
        for norm in norms[:first]:
            before.update(norm)
        health = StepHealth(lambda step, message: message and warnings.setdefault(step, []).append(message),
                            {"grad_norms": list(before.norms), "grad_norm_ratios": list(before.ratios)})
        for iter_num in range(first + 1, len(norms) + 1):
            step = StepResult(norms[iter_num - 1], iter_num != skipped, None, math.inf)
            health.check(step, torch.zeros(()), iter_num)
        return warnings

    return check_all


def norms_of(name):
    """Those of a run in results/, of each step. Where every 10th was logged, each stands for ten steps."""
    record = json.loads((ROOT / "results" / f"{name}.json").read_text(encoding="utf-8"))
    logged = [r["grad_norm"] for r in record.get("history", ()) if "grad_norm" in r]
    return record.get("grad_norms") or [norm for norm in logged for _ in range(10)]


def test_norms_that_rise_are_told_before_the_loss_rises(warnings_of):
    """The norms of two runs that became unstable (docs/pretrain.md). The first one's loss rises from step 8,650 on."""
    again = warnings_of(norms_of("h200_x2_long_run_again"))
    assert [step for step, texts in again.items() if "rise" in texts[0]] == [9100]
    norms = norms_of("h200_x2_long_run")
    whole = warnings_of(norms)
    assert list(whole) == [7800, 8600, 8650, 8700, 9903] and whole[7800] == [
        "gradient norms rise: 8 of the last 300 are more than 1.25 times the median of the 300 before each. If the "
        "validation loss rises too, resume from an earlier checkpoint with a lower learning_rate"]
    assert whole[9903] == ["gradient norm 32.9 is 7 times the recent median"]
    for first in (7790, 4763):  # it resumes, also between two of the steps at which it looks for a rise
        assert warnings_of(norms[:8350], first) == {7800: whole[7800]}
    norms[7799] = math.nan
    assert warnings_of(norms[:8350], 7000, skipped=7800) == {7800: [*whole[7800],
                                                                    "the gradient is not finite; step skipped"]}
    jump = warnings_of([1.0] * 2000 + [10.0] * 2000)  # each of the first 25 is a spike, then they are the median
    assert list(jump) == [*range(2001, 2026), 2050] and "50 of the last 300 are more than 1.25 times" in jump[2050][0]


def test_norms_of_stable_runs_do_not_rise(warnings_of):
    noise = torch.randn(20000, generator=torch.Generator().manual_seed(0)).exp().tolist()
    names = "x2_long_run_24m", *(f"x{gpus}_long_run{name}" for gpus, name in (
        (2, "_1337"), (2, "_1338"), (1, ""), (1, "_half"))), "x1_char_adamw"
    for norms in *(norms_of(f"h200_{name}") for name in names), noise, [0.0] * 2100 + [1.0] * 100, [None] * 2100:
        assert not [text for texts in warnings_of(norms).values() for text in texts if "rise" in text]


def test_a_run_whose_norms_rise_ends_and_resumes_once(spoilt):
    """The model hardly learns. From iteration 201 on, rank 1's loss is 5 times as large, so norms are 3 times as large.
    The history has 200 norms instead of 2,000. The resumed run doesn't stop for the same rise."""
    options = "--learning_rate=1e-7", "--max_iters=320", "--on_rising_norms=stop", "--log_interval=10"
    run = spoilt(range(401, 999), *options, factor=5, history=(200, 100))
    assert run.returncode == 4 and "stop requested (gradient norms rise)\nexiting after step 250\n" in run.stdout
    assert rises_in(run) == [250]
    assert (run.out_dir / "latest").read_text() == "iter_250"
    run = done(spoilt(range(1, 999), *options, "--init_from=resume", factor=5, history=(200, 100)))
    assert rises_in(run) == [250] and max(run.losses) == 320


def test_a_loss_scale_that_collapses_is_explained_and_ends_the_run(spoilt, tmp_path):
    """From 4 down to 1, two steps that look for the scale; then three that fail at 1, of which two are allowed."""
    config = {"zero_optimization": {"stage": 2}, "fp16": {"initial_scale_power": 2, "hysteresis": 1}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    run = spoilt(range(3, 99), "--dtype=float16", f"--deepspeed_config={tmp_path / 'ds.json'}", "--max_iters=9",
                 "--max_skipped_steps=2", rank=0, factor=1e9, ranks=1)
    assert run.returncode == 3 and "Traceback" not in run.stderr, run.stdout + run.stderr
    told = warnings_in(run)
    assert sorted(told) == [2, 3, 4, 5, 6]
    assert [r["loss_scale"] for r in run.history if "loss" in r] == [4, 2, 1, 1, 1, 1]
    assert told[2] == "float16 gradient overflow: step skipped, loss scale is now 2"
    assert all(told[it].startswith("float16 gradient overflow at the minimum loss scale 1: resume from") and
               told[it].endswith("; step skipped") for it in (4, 5, 6))
    assert all(map(math.isfinite, run.losses.values()))


def test_a_straggler_is_named(train):
    """Rank 1 waits in each forward, as a process does whose CPU is not its own. The warning then stops the run."""
    run = done(train("--max_iters=100000", "--eval_interval=100000", ranks=2, plant="""
import time
import model
from runtime.monitor import runlog
forward, warn = model.GPT.forward, runlog.RunLog.warn
def late(*args, **options):
    time.sleep(0.05 * (os.environ["RANK"] == "1"))
    return forward(*args, **options)
def warn_and_stop(self, iter_num, message):
    warn(self, iter_num, message)
    if message and "straggler" in message and os.environ["RANK"] == "0":
        open(f"{self.out_dir}/STOP", "w").close()
model.GPT.forward, runlog.RunLog.warn = late, warn_and_stop
"""))
    assert "rank 1 is a straggler: " in run.stdout and "the file STOP" in run.stdout
    assert any(text.startswith("rank 1 is a straggler: ") for text in warnings_in(run).values())
    assert not (run.out_dir / "STOP").exists()
