"""Whole runs, in processes of their own: losses, ranks, launchers, resuming, tags, weights, samples.

Most tests look at the same few runs, which the module's fixtures make once."""

import hashlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import time
import zipfile
from unittest.mock import Mock

import psutil
import pytest
import torch
from conftest import EIGHT, ROOT, SMALL, ForkedJob, done, kill, launch, patience, stage, wait_until

from runtime.checkpoint.load import load_model
from runtime.checkpoint.tags import TagStore
from runtime.data.permutation import mixed_seed
from runtime.data.tokenizer import tokenizer_of
from runtime.monitor.history import append_history
from runtime.monitor.loggers import Loggers
from runtime.monitor.runlog import RunLog

SIX = ("--max_iters=6", "--eval_interval=3", "--lr_schedule=linear", "--lr_decay_iters=4", "--min_lr=2e-4")


def manifest(out_dir, tag):
    return json.loads((out_dir / tag / "manifest.json").read_text())


@pytest.fixture(scope="module")
def one_rank(train):
    """6 iterations on one rank, batch 4."""
    return done(train(*SIX, "--batch_size=4"))


@pytest.fixture(scope="module")
def bf16(train):
    return done(train("--dtype=bfloat16", "--max_iters=3", "--lr_schedule=constant", "--warmup_iters=1",
                      "--eval_interval=9"))


def test_golden_losses(one_rank):
    """What this run gave under PyTorch 2.13 on an AMD EPYC. With 2 threads, and with the kernels for older CPUs
    (ATEN_CPU_CAPABILITY=default, MKL_ENABLE_INSTRUCTIONS=SSE4_2, ...), the first were the same to the bit and the
    second to 5e-9; 1e-6 is some ten roundings of float32, for CPUs that were not tried."""
    assert one_rank.losses == pytest.approx({
        1: 3.358039379119873, 2: 3.293123722076416, 3: 3.237603187561035, 4: 3.210908889770508,
        5: 3.1902079582214355, 6: 3.1943325996398926}, rel=1e-6)
    assert {it: val_loss for it, (_, val_loss) in one_rank.evals.items()} == pytest.approx({
        0: 3.358167658559978, 3: 3.208866869099438, 6: 3.175643028691411}, rel=1e-6)


@pytest.fixture(scope="module")
def two_ranks(train):
    """The run of one_rank on two: as many sequences per step and windows per evaluation."""
    return done(train(*SIX, "--batch_size=2", "--eval_iters=4", ranks=2))


def test_one_and_two_ranks_give_the_same_losses(one_rank, two_ranks):
    assert list(one_rank.losses) == [1, 2, 3, 4, 5, 6] and list(one_rank.evals) == [0, 3, 6]
    assert two_ranks.losses == pytest.approx(one_rank.losses, rel=1e-6)
    for it, pair in one_rank.evals.items():
        assert two_ranks.evals[it] == pytest.approx(pair, rel=1e-6)
    assert one_rank.losses[6] < one_rank.losses[1] - 0.1
    alone, together = ([r["grad_norm"] for r in run.history if "loss" in r] for run in (one_rank, two_ranks))
    assert together == pytest.approx(alone, rel=1e-5)  # Adam takes hardly any notice of a gradient's size


def test_batch_size_auto_is_the_same_run(train, one_rank):
    """4 x 2 sequences become 8 x 1, with the same evaluations, over a resume too."""
    args = (*SIX, "--batch_size=4", "--batch_size=auto")
    auto = done(train(*args, "--max_iters=3"))
    assert "batch      8 x 1 x 1 = 8 sequences" in auto.stdout
    assert "batch_size=auto: a micro-batch of 8 takes about " in auto.stdout
    auto = done(train(*args, "--init_from=resume", out_dir=auto.out_dir))
    assert auto.losses == pytest.approx(one_rank.losses, rel=1e-6)
    assert auto.evals.keys() == one_rank.evals.keys()
    for it, pair in one_rank.evals.items():
        assert auto.evals[it] == pytest.approx(pair, rel=1e-6)


def test_two_ranks_with_room_sum_their_gradients_first(train, one_rank):
    """In bfloat16, whose losses of all kinds are up to 0.006 apart here."""
    run = done(train(*SIX, "--batch_size=2", "--dtype=bfloat16", ranks=2))
    assert "each rank accumulates gradients" in run.stdout
    assert run.losses == pytest.approx(one_rank.losses, abs=0.02)


def test_estimate_loss_is_the_same_on_one_and_two_ranks_at_stage_3(train, tmp_path):
    """5 windows on 2 ranks: 3 and 2. Were the ranks to run different numbers of forwards, they would hang."""
    released = {"stage": 3, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0,
                "stage3_prefetch_bucket_size": 0, "stage3_param_persistence_threshold": 0}
    (tmp_path / "released.json").write_text(json.dumps({"zero_optimization": released}))
    args = ("--batch_size=1", "--eval_iters=5", "--max_iters=2", f"--deepspeed_config={tmp_path}/released.json")
    first = done(train(*args, "--gradient_accumulation_steps=4"))
    second = done(train(*args, "--gradient_accumulation_steps=2", ranks=2))
    records = [[r for r in run.history if "val_loss" in r] for run in (first, second)]
    assert [[r["iter"] for r in evals] for evals in records] == [[0, 2], [0, 2]]
    for a, b in zip(*records):
        assert a.pop("eval_s") > 0 and b.pop("eval_s") > 0
        assert b == pytest.approx(a, rel=1e-6)  # with the standard errors
        assert 0 < a["val_loss_stderr"] < 0.1


def test_learning_rates(whole, one_rank, bf16):
    lrs = {r["iter"]: r["lr"] for r in whole(2).history if "lr" in r}
    # warm-up over 2 iterations, then a cosine from 1e-3 at iteration 3 to a tenth at 9
    assert lrs == pytest.approx({1: 1e-3 / 3, 2: 2e-3 / 3, 3: 1e-3, 4: 9.3971143170299742e-4, 5: 7.75e-4, 6: 5.5e-4,
                                 7: 3.25e-4, 8: 1.6028856829700258e-4}, rel=1e-12)
    lrs = {r["iter"]: r["lr"] for r in one_rank.history if "lr" in r}
    assert lrs == pytest.approx({1: 1e-3, 2: 8e-4, 3: 6e-4, 4: 4e-4, 5: 2e-4, 6: 2e-4}, rel=1e-12)  # linear to 2e-4
    lrs = {r["iter"]: r["lr"] for r in bf16.history if "lr" in r}
    assert lrs == {1: 5e-4, 2: 1e-3, 3: 1e-3}  # constant after the warm-up


def continues(part, reference, after):
    """A run resumed after iteration `after` has the records of one that never stopped."""
    expected = {it: loss for it, loss in reference.losses.items() if it in part.losses}
    assert min(part.losses) == 1 and max(part.losses) > after
    assert part.losses == expected  # all bits
    assert part.evals == {it: pair for it, pair in reference.evals.items() if it in part.evals}
    assert [r["iter"] for r in part.history if "loss" in r] == sorted(part.losses)  # none twice
    assert [r["iter"] for r in part.history if "val_loss" in r] == list(range(0, max(part.losses) + 1, 2))


def test_a_run_that_stopped_and_went_on_is_the_run_that_did_not_stop(train, whole):
    first = done(train(*EIGHT, stage(2), "--max_iters=4", ranks=2))
    assert (first.out_dir / "final" / "manifest.json").exists() and list(first.losses) == [1, 2, 3, 4]
    second = done(train(*EIGHT, stage(2), "--init_from=resume", ranks=2, out_dir=first.out_dir))
    assert "resumed from iter_4" in second.stdout and "step 4:" not in second.stdout
    assert list(second.losses) == [1, 2, 3, 4, 5, 6, 7, 8]
    continues(second, whole(2), after=4)
    assert manifest(second.out_dir, "final")["iter_num"] == 8
    a, b = load_model(second.out_dir, "final")[0].state_dict(), load_model(whole(2).out_dir, "final")[0].state_dict()
    assert all(torch.equal(a[name], b[name]) for name in b) and a.keys() == b.keys()


def test_going_back_to_an_earlier_tag(train, whole, tmp_path):
    """From iteration 2 of a run that has 8: the same losses again, and what is newest now is kept, not what was."""
    out_dir = shutil.copytree(whole(3).out_dir, tmp_path / "out")
    again = done(train(*EIGHT, stage(3), "--max_iters=6", "--keep_last=1", "--init_from=resume", "--resume_tag=iter_2",
                       "--overwrite=True", ranks=2, out_dir=out_dir))
    assert list(again.losses) == [1, 2, 3, 4, 5, 6]
    continues(again, whole(3), after=2)
    assert (out_dir / "latest").read_text() == "iter_6" and TagStore(out_dir).find().name == "iter_6"
    assert manifest(out_dir, "final")["iter_num"] == 6 and "iter_4" not in TagStore(out_dir).list()


def test_patience_goes_on_over_a_resume(train):
    """Without learning the first evaluation is the best: after 2 more the run ends, in however many parts."""
    args = ("--learning_rate=0", "--decay_lr=False", "--patience=2", "--n_layer=1")
    first = done(train(*args, "--max_iters=4"))
    assert "stopped early" not in first.stdout and manifest(first.out_dir, "best")["iter_num"] == 2
    second = done(train(*args, "--max_iters=20", "--init_from=auto", out_dir=first.out_dir))
    words = "stopped early at step 6: no better validation loss in 2 evaluations"
    assert words in second.stdout and list(second.losses) == [1, 2, 3, 4, 5, 6]
    assert manifest(first.out_dir, "final")["iter_num"] == 6 and manifest(first.out_dir, "best")["iter_num"] == 2
    third = done(train(*args, "--max_iters=20", "--init_from=auto", out_dir=first.out_dir))
    assert words in third.stdout and "iter 7:" not in third.stdout
    fourth = done(train(*args, "--max_iters=20", "--patience=3", "--init_from=auto", out_dir=first.out_dir))
    assert list(fourth.losses) == [1, 2, 3, 4, 5, 6, 7, 8] and manifest(first.out_dir, "final")["iter_num"] == 8


NAN_AFTER_STEP_4 = """
from runtime.engine.engine import Engine
evaluate = Engine.evaluate
def evaluate_to_nan(self, x, y):
    losses = evaluate(self, x, y)
    if self.steps == 4:
        losses = losses * float("nan")
    return losses
Engine.evaluate = evaluate_to_nan
"""


# The validation losses that a run takes for its own, by iteration
LOSSES = """
from runtime.monitor.runlog import RunLog
def evaluation(self, iter_num, *args, evaluation=RunLog.evaluation):
    evaluation(self, iter_num, *args)
    return {losses}.get(iter_num, 9.0)
RunLog.evaluation = evaluation
"""


@pytest.mark.parametrize("parts", [(20,), (2, 8, 20)], ids=["whole", "resumed twice"])
def test_patience_begins_anew_at_each_better_loss(train, tmp_path, parts):
    """The best ones are those of 2 and 6: an equal loss is not better. Two worse ones in a row end the run."""
    losses = {0: 5.0, 2: 3.0, 4: 3.5, 6: 2.5, 8: 2.5, 10: 2.6, 12: 1.0}
    for max_iters in parts:
        run = done(train("--patience=2", "--keep_last=2", f"--max_iters={max_iters}", "--init_from=auto",
                         out_dir=tmp_path / "out", plant=LOSSES.format(losses=losses)))
    assert "stopped early at step 10: no better validation loss in 2 evaluations" in run.stdout
    assert list(run.losses) == list(range(1, 11))
    assert TagStore(run.out_dir).list() == ["iter_8", "iter_10", "best", "final"]
    tags = {tag: manifest(run.out_dir, tag) for tag in ("best", "iter_8", "final")}
    assert {tag: told["iter_num"] for tag, told in tags.items()} == {"best": 6, "iter_8": 8, "final": 10}
    found = {tag: (told["state"]["best_val_loss"], told["state"]["evals_since_best"]) for tag, told in tags.items()}
    assert found == {"best": (2.5, 0), "iter_8": (2.5, 1), "final": (2.5, 2)}


def test_a_validation_loss_that_is_no_number_is_not_the_best(train):
    """At iteration 4 of 6. The losses at 2 and 6 are better each."""
    args = ("--max_iters=6", "--always_save_checkpoint=False")
    run = done(train(*args, plant=NAN_AFTER_STEP_4))
    assert "step 4: train loss nan, val loss nan" in run.stdout
    assert run.evals[6][1] < run.evals[2][1]
    assert TagStore(run.out_dir).list() == ["iter_2", "iter_6", "best", "final"]
    assert manifest(run.out_dir, "best")["iter_num"] == 6


def test_a_history_with_bytes_that_are_no_text_stops_no_resume(train):
    run = done(train())
    with open(run.out_dir / "history.jsonl", "ab") as history:
        history.write(b"\xff\xfe\n")
    run = done(train("--max_iters=6", "--init_from=resume", out_dir=run.out_dir))
    assert list(run.losses) == [1, 2, 3, 4, 5, 6]
    assert list(run.evals) == [0, 2, 4, 6]


def test_deterministic_algorithms_are_used_on_demand(train):
    plant = """
import atexit, torch
atexit.register(lambda: print("deterministic:", torch.are_deterministic_algorithms_enabled()))
"""
    for wanted in ("True", "False"):
        run = done(train("--max_iters=1", f"--deterministic={wanted}", plant=plant))
        assert f"deterministic: {wanted}\n" in run.stdout


def test_dropout_of_each_rank_and_step_has_a_seed_of_its_own(train):
    """The first numbers that dropout could draw, in the first micro-step of each step."""
    plant = """
import torch
from runtime.engine.engine import Engine
def micro_step(self, *batch, micro_step=Engine.micro_step):
    if self.micro_steps == 0:
        print(f"rank {os.environ['RANK']} draws from {torch.initial_seed()}", flush=True)
    return micro_step(self, *batch)
Engine.micro_step = micro_step
"""
    run = done(train("--max_iters=3", "--seed=7", ranks=2, plant=plant))
    drawn = re.findall(r"^rank (\d) draws from (\d+)$", run.stdout, re.M)
    expected = {(str(rank), str(mixed_seed(7, step, rank))) for rank in (0, 1) for step in (0, 1, 2)}
    assert len(drawn) == 6 and set(drawn) == expected
    assert len({seed for _, seed in drawn}) == 6


def test_a_fresh_run_with_overwrite_leaves_nothing_of_the_one_before(train):
    """The run before was longer, and its best tag had a lower loss. Another learning rate, so no loss is the same."""
    before = done(train("--max_iters=8", "--keep_last=9"))
    assert "iter_8" in TagStore(before.out_dir).list()
    fresh = done(train("--max_iters=2", "--learning_rate=1e-4", "--overwrite=True", "--seed=7",
                       out_dir=before.out_dir))
    assert TagStore(fresh.out_dir).list() == ["iter_2", "best", "final"]
    assert (fresh.out_dir / "latest").read_text() == "iter_2"
    for tag in ("best", "final"):
        assert manifest(fresh.out_dir, tag)["state"]["best_val_loss"] == fresh.evals[2][1]
    assert fresh.evals[2][1] > before.evals[8][1]

    alone = done(train("--max_iters=2", "--learning_rate=1e-4", "--seed=7"))
    assert fresh.losses == alone.losses and fresh.evals == alone.evals
    kinds = [[key for key in ("val_loss", "loss", "saved") if key in record] for record in fresh.history]
    assert sorted(zip([record["iter"] for record in fresh.history], map(str, kinds))) == [
        (0, "['val_loss']"), (1, "['loss']"), (2, "['loss']"), (2, "['saved']"), (2, "['val_loss']")]


def test_a_start_that_overlaps_the_run_before_goes_on_from_its_last_tag(train, whole, tmp_path):
    """While the second start looked at its settings the first one saved iteration 4, or its first tag, and ended."""
    before = shutil.copytree(whole(2).out_dir, tmp_path / "before",
                             ignore=shutil.ignore_patterns("iter_4", "iter_6", "iter_8", "best", "final"))
    for out_dir, words, code in ((before, "resuming from {}/iter_4", 0),
                                 (tmp_path / "empty", "{} now holds a run (iter_4)", 2)):
        run = train(*EIGHT, stage(2), "--init_from=auto", "--max_iters=6", out_dir=out_dir, plant=f"""
import shutil
from runtime.checkpoint import tags
lock = tags.lock_folder
def lock_later(*args):
    shutil.copytree({str(whole(2).out_dir / "iter_4")!r}, {str(out_dir / "iter_4")!r})
    return lock(*args)
tags.lock_folder = lock_later
""")
        assert run.returncode == code and words.format(out_dir) in run.stdout + run.stderr, run.stdout + run.stderr
        assert "iter_4" in TagStore(out_dir).list()


def test_evaluations_updates_and_saves_happen_once(whole):
    run = whole(2)
    assert re.findall(r"^step (\d+): train loss \d\.\d{4}, val loss \d\.\d{4} ", run.stdout, re.M) == list("02468")
    assert re.findall(r"^iter (\d+): loss \d\.\d{4}, time \d+\.\d\dms, ", run.stdout, re.M) == list("12345678")
    assert re.findall(r"^saving checkpoint to (.*)$", run.stdout, re.M) == [
        f"{run.out_dir}/iter_{n}" for n in (2, 4, 6, 8)]
    order = [(r["iter"], "val_loss" in r) for r in run.history if "saved" not in r]  # another thread's records
    assert order == [(0, True), (1, False), (2, False), (2, True), (3, False), (4, False), (4, True), (5, False),
                     (6, False), (6, True), (7, False), (8, False), (8, True)]
    saves = [r for r in run.history if "saved" in r]
    assert [(r["iter"], r["saved"]) for r in saves] == [(n, f"iter_{n}") for n in (2, 4, 6, 8)]
    for r in saves:
        assert r["bytes"] == sum(entry["bytes"] for entry in manifest(run.out_dir, r["saved"])["files"].values())
        assert r["blocked_s"] > 0 and r["gb_per_s"] == r["bytes"] / r["save_s"] / 1e9
        assert f"saved {r['saved']} in {r['save_s']:.1f} s (" in run.stdout
    loss, best = min((val_loss, it) for it, (_, val_loss) in run.evals.items())
    assert f"best validation loss {loss:.4f} at step {best}\n" in run.stdout
    assert f"\nto sample from it: python sample.py --out_dir={run.out_dir} --tag=best\n" in run.stdout
    (first,) = [r for r in run.history if "first_step_s" in r]
    tails = re.findall(r"^iter \d: .*, memory \d+\.\d GB, ([\d.]+)%, (.*)$", run.stdout, re.M)
    assert [share for share, _ in tails] == ["12.5", "25.0", "37.5", "50.0", "62.5", "75.0", "87.5", "100.0"]
    assert first["iter"] == 1 and tails[0][1] == f"{first['first_step_s']:.1f} s after the start"
    assert all(re.fullmatch(r"\d+:\d\d left", left) for _, left in tails[1:]) and tails[-1][1] == "0:00 left"


@pytest.mark.parametrize("n, files", [
    (2, {"mp_rank_00_model_states.pt", *(f"zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in (0, 1))}),
    (3, {f"zero_pp_rank_{r}_mp_rank_00_{kind}_states.pt" for r in (0, 1) for kind in ("model", "optim")})])
def test_tags_and_their_files(whole, n, files):
    run = whole(n)
    out_dir = run.out_dir
    tags = TagStore(out_dir).list()
    assert tags == ["iter_2", "iter_4", "iter_6", "iter_8", "best", "final"]
    assert (out_dir / "latest").read_text() == "iter_8"
    assert {p.name for p in out_dir.iterdir()} == {
        ".lock", "latest", "history.jsonl", "settings.json", "zero_to_fp32.py", "zero_to_torch.py", *tags}
    for tag in tags:
        told = manifest(out_dir, tag)
        assert set(told["files"]) == files == {p.name for p in (out_dir / tag).iterdir()} - {"manifest.json"}
        for name, entry in told["files"].items():
            content = (out_dir / tag / name).read_bytes()
            assert entry == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        assert (told["stage"], told["world_size"], told["dtype"]) == (n, 2, "float32")
    best = min(list(run.evals)[1:], key=lambda it: run.evals[it][1])
    assert manifest(out_dir, "best")["iter_num"] == best
    assert manifest(out_dir, "best")["state"]["best_val_loss"] == run.evals[best][1]
    assert manifest(out_dir, "final")["state"]["settings"]["dropout"] == 0.1
    for tag, source in (("best", f"iter_{best}"), ("final", "iter_8")):
        assert all(os.path.samefile(p, out_dir / source / p.name) for p in (out_dir / tag).iterdir())


def test_what_is_the_users_own_is_not_tidied_away(tmp_path):
    for folder in ("iter_4.saving", "best.old", "final.old", "mine.old", "iter_4b.saving", "draft.saving"):
        (tmp_path / folder).mkdir()
    (tmp_path / "final.old" / "manifest.json").write_text("{}")  # killed between the two names
    (tmp_path / "iter_5.old").write_text("a file")
    TagStore(tmp_path).remove_leftovers()
    assert {p.name for p in tmp_path.iterdir()} == {"final", "mine.old", "iter_4b.saving", "draft.saving", "iter_5.old"}


@pytest.mark.parametrize("change", [(), ("--deepspeed_config=ds_config_zero3.json",)])
def test_new_betas_and_decay_are_heeded_on_a_resume(train, one_rank, tmp_path, change):
    """The same for a checkpoint that is loaded as it is and one that is re-sharded."""
    def last_loss(*args):
        out_dir = shutil.copytree(one_rank.out_dir, tmp_path / str(len(os.listdir(tmp_path))))
        run = done(train(*SIX, "--batch_size=4", "--max_iters=8", "--learning_rate=1e-2", "--init_from=resume", *args,
                         *change, out_dir=out_dir))
        return run.losses[8]

    plain, beta, decay = last_loss(), last_loss("--beta1=0.1"), last_loss("--weight_decay=20")
    assert abs(beta - plain) > 1e-4 and abs(decay - plain) > 1e-4


@pytest.mark.parametrize("content, problem", [(None, "it has no manifest.json; kept as"),
                                             ('{"tag": ', "OUT/iter_6/manifest.json has changed")])
def test_a_tag_without_a_manifest_that_can_be_read_is_kept_beside(train, one_rank, tmp_path, content, problem):
    """Not taken for a tag, and not overwritten by the one that gets its name. There is no traceback."""
    out_dir = shutil.copytree(one_rank.out_dir, tmp_path / "out")
    (out_dir / "iter_6" / "manifest.json").unlink()
    if content:
        (out_dir / "iter_6" / "manifest.json").write_text(content)
    (out_dir / ".latest.0123abcd.tmp").write_text("cut")
    fresh = train(*SIX, "--batch_size=4", out_dir=out_dir)
    assert fresh.returncode == 2 and "already holds a run (" in fresh.stderr and "Traceback" not in fresh.stderr
    run = done(train(*SIX, "--batch_size=4", "--init_from=auto", out_dir=out_dir))
    assert f"skipping {out_dir}/iter_6: {problem.replace('OUT', str(out_dir))}" in run.stdout
    assert f"resuming from {out_dir}/best, iteration 6" in run.stdout
    assert (out_dir / "iter_6.damaged" / "mp_rank_00_model_states.pt").exists()
    again = done(train(*SIX, "--batch_size=4", "--init_from=resume", "--resume_tag=iter_3", "--overwrite=True",
                       out_dir=out_dir))
    assert again.losses == one_rank.losses and (out_dir / "latest").read_text() == "iter_6"
    assert TagStore(out_dir).list() == ["iter_3", "iter_6", "best", "final"]
    assert not (out_dir / ".latest.0123abcd.tmp").exists()


def test_eval_only_gives_the_saved_losses_and_leaves_the_run_alone(train, one_rank, tmp_path):
    out_dir = shutil.copytree(one_rank.out_dir, tmp_path / "out")
    before = {p: p.read_bytes() for p in out_dir.rglob("*") if p.is_file()}
    run = done(train(*SIX, "--batch_size=4", "--init_from=resume", "--resume_tag=iter_3", "--eval_only=True",
                     out_dir=out_dir))
    assert "iter 4:" not in run.stdout and "saving" not in run.stdout
    train_loss, val_loss = one_rank.evals[3]
    assert f"step 3: train loss {train_loss:.4f}, val loss {val_loss:.4f} " in run.stdout
    assert {p: p.read_bytes() for p in out_dir.rglob("*") if p.is_file()} == before


def test_ctrl_c_twice_ends_a_run_at_once(characters, tmp_path):
    """In the middle of a step that would take minutes, which one Ctrl-C leaves to finish."""
    args = (*SMALL, f"--dataset={characters}", f"--out_dir={tmp_path}/out", "--gradient_accumulation_steps=100000")
    log = tmp_path / "log"
    job = ForkedJob([ROOT / "train_deepspeed.py", *args], 1, log, log)
    try:
        assert wait_until(lambda: log.exists() and "step 0:" in log.read_text())
        # The step has begun: so much CPU time isn't needed for anything between evaluation and step
        rank = psutil.Process(job.pids[0])
        evaluated = rank.cpu_times().user
        assert wait_until(lambda: rank.cpu_times().user > evaluated + 1.0)
        job.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            job.wait(timeout=patience(1))
        job.send_signal(signal.SIGINT)
        assert job.wait() == 130
    finally:
        kill(job)
    assert TagStore(tmp_path / "out").list() == []


@pytest.mark.parametrize("key", [2, 3])
def test_a_tag_has_no_enum(whole, key):
    """Python 3.11.2 pickles one by getattr, which could run code: no tag could be read with it."""
    files = [*(whole(key).out_dir / "final").glob("*.pt")]
    assert len(files) > 1
    for path in files:
        with zipfile.ZipFile(path) as file:
            (name,) = [name for name in file.namelist() if name.endswith("/data.pkl")]
            assert b"Enum" not in file.read(name) and b"getattr" not in file.read(name)


@pytest.mark.parametrize("key", [2, 3, "bf16"])
def test_zero_to_fp32_gives_the_weights_of_the_run(whole, bf16, tmp_path, key):
    """DeepSpeed's own script, which it copies into the run's folder."""
    out_dir = (bf16 if key == "bf16" else whole(key)).out_dir
    done(launch(out_dir / "zero_to_fp32.py", out_dir, tmp_path, "--tag", "final"))
    weights = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    ours = load_model(out_dir, "final")[0].state_dict()
    assert {w.dtype for w in weights.values()} == {torch.float32} and weights.keys() == ours.keys()
    assert all(torch.equal(weights[name], ours[name]) for name in weights)
    if key != 3:  # whose model file holds no weights
        run = torch.load(out_dir / "final" / "mp_rank_00_model_states.pt", weights_only=True)["module"]
        assert all(torch.equal(weights[name].to(w.dtype), w) for name, w in run.items())
    if key == "bf16":  # the optimizer's own precision, not the rounded weights
        assert any(not torch.equal(weights[name].bfloat16().float(), weights[name]) for name in weights)


def test_a_terminal_shows_a_bar_below_the_lines(train):
    told = done(train(plant="sys.stdout.isatty = lambda: True")).stdout
    assert re.search(r"100%\|.+\| 4/4 \[[\d:]+<00:00, .+, loss \d\.\d{4}\]", told), told[-2000:]
    assert "step 2: train loss" in told and "iter 4: loss" in told and "saved iter_4" in told


@pytest.mark.parametrize("options", [(), (stage(3),)], ids=["stage 2", "stage 3"])
def test_samples_while_training_leave_the_losses_alone(train, options):
    """With dropout, on two ranks: 12 characters after each second iteration, losses to the last bit as without. They
    are what the weights saved there say with the seed + iteration."""
    args = ("--dropout=0.1", "--max_iters=5", "--eval_interval=2", "--seed=7", *options)
    with_samples = ("--sample_interval=2", "--sample_start=the ", "--sample_tokens=12")
    plain, sampled = done(train(*args, ranks=2)), done(train(*args, *with_samples, ranks=2))
    assert sampled.losses == plain.losses and sampled.evals == plain.evals
    texts = {r["iter"]: r["sample"] for r in sampled.history if "sample" in r}
    assert list(texts) == [2, 4] and texts[2] != texts[4]
    for it, text in texts.items():
        assert text.startswith("the ") and len(text) == 16
        assert f"sample at step {it}: {text}" in sampled.stdout
        encode, decode = tokenizer_of(manifest(sampled.out_dir, f"iter_{it}")["state"]["data"]["tokenizer"])
        ids = load_model(sampled.out_dir, f"iter_{it}")[0].generate(
            torch.tensor([encode("the ")]), 12, 0.8, 200, generator=torch.Generator().manual_seed(7 + it))
        assert decode(ids[0].tolist()) == text


@pytest.mark.long
def test_wandb_offline_leaves_its_files(train, tmp_path):
    run = done(train("--wandb_log=True", "--max_iters=1", "--decay_lr=False", "--wandb_run_name=tiny",
                     WANDB_MODE="offline", WANDB_DIR=str(tmp_path), WANDB_SILENT="true"))
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    names = b"train/loss train/lr train/iter gpu/memory_allocated eval/train_loss eval/val_loss eval/perplexity".split()
    assert all(name in file.read_bytes() for name in names)
    wandb_id = re.search(r"run-(\w+)\.wandb", file.name)[1]
    assert manifest(run.out_dir, "final")["state"]["wandb_id"] == wandb_id
    done(train("--wandb_log=True", "--max_iters=2", "--decay_lr=False", "--init_from=resume", out_dir=run.out_dir,
               WANDB_MODE="offline", WANDB_DIR=str(tmp_path), WANDB_SILENT="true"))
    assert len(list(tmp_path.glob(f"wandb/offline-run-*/run-{wandb_id}.wandb"))) == 2  # one run, gone on


def test_tensorboard_goes_on_over_a_resume_without_doubles(train):
    """As TensorBoard's own reader reads it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    args = ("--tensorboard_log=True", "--keep_last=10", "--lr_decay_iters=6")
    first = done(train(*args, "--max_iters=4"))
    file, = (first.out_dir / "tensorboard").iterdir()  # named after its second and process, and read by name
    assert wait_until(lambda: time.time() >= int(file.name.split(".")[3]) + 1, 10)
    second = done(train(*args, "--max_iters=6", "--init_from=resume", "--resume_tag=iter_2", "--overwrite=True",
                        out_dir=first.out_dir))
    events = EventAccumulator(str(first.out_dir / "tensorboard")).Reload()
    shown = {event.step: event.value for event in events.Scalars("train/loss")}
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]
    assert shown == pytest.approx(second.losses, rel=1e-6)
    assert [event.step for event in events.Scalars("eval/val_loss")] == [0, 2, 4, 6]
    assert {"train/lr", "train/grad_norm", "eval/perplexity"} <= set(events.Tags()["scalars"])
    gb = [event.value for event in events.Scalars("gpu/memory_allocated")]
    assert gb[-2:] == pytest.approx([r["memory"] / 1e9 for r in second.history if "memory" in r][-2:])


def test_a_logger_that_fails_is_left_out_and_training_goes_on(capsys):
    log = RunLog.__new__(RunLog)
    log.settings = Mock(eval_only=True)
    log.writes = False
    log.loggers = Loggers(log.settings, {}, iter_num=0, resumes=False, wandb_id=None)
    bad, good = Mock(), Mock()
    log.loggers.running = {"bad": bad, "good": good}
    logged = []
    bad.log.side_effect = ZeroDivisionError
    good.log.side_effect = lambda values, step: logged.append((values, step))
    good.close.side_effect = ZeroDivisionError
    log.record({"iter": 1, "loss": 2.0})
    log.record({"iter": 2, "loss": 1.5, "memory": 3_500_000_000, "warning": "words are not curves"})
    assert logged == [({"train/iter": 1, "train/loss": 2.0}, 1),
                      ({"train/iter": 2, "train/loss": 1.5, "gpu/memory_allocated": 3.5}, 2)]
    log.sample(3, "a\x1b[2J\rb\n\tc")
    log.close(False, 0)
    words = capsys.readouterr().out
    assert "sample at step 3: a\\x1b[2J\\rb\n\tc\n" in words
    assert words.count("bad failed; continuing without it: ZeroDivisionError") == 1
    assert words.count("good failed; continuing without it: ZeroDivisionError") == 1


def test_a_record_is_written_whole_or_not_at_all(tmp_path):
    """The disk, which the system's limit on a file's size stands for, is full in the middle of the second record."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    append_history(tmp_path, {"iter": 1})
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, limits[1]))
    try:
        with pytest.raises(OSError):
            append_history(tmp_path, {"iter": 2, "loss": 1.5})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    append_history(tmp_path, {"iter": 3})
    assert (tmp_path / "history.jsonl").read_text() == '{"iter": 1}\n{"iter": 3}\n'


WANDB = """
import json, types
from runtime.monitor import runlog
calls = open({calls!r}, "a")
class Run:
    id = "new"
    def define_metric(self, name, step_metric=None):
        print(json.dumps(["metric", name, step_metric]), file=calls, flush=True)
    def log(self, values, **options):
        print(json.dumps(["log", values["train/iter"], options]), file=calls, flush=True)
    def finish(self):
        pass
def init(id=None, **options):
    print(json.dumps(["init", id]), file=calls, flush=True)
    run = Run()
    run.id = id or {own!r}
    return run
sys.modules["wandb"] = types.SimpleNamespace(init=init)
"""  # what stands for the server: it needs a network


def test_wandb_after_going_back_is_a_new_run_that_drops_nothing(train, tmp_path):
    """With a run's old id, wandb would drop all values up to its last step, and keep those that were discarded."""
    def calls(own, *args):
        file = tmp_path / own
        plant = WANDB.format(calls=str(file), own=own)
        run = done(train("--wandb_log=True", *args, out_dir=tmp_path / "out", plant=plant))
        return run, [json.loads(line) for line in file.read_text().splitlines()]

    _, first = calls("first", "--max_iters=6", "--keep_last=9")
    assert first[:3] == [["init", None], ["metric", "train/iter", None], ["metric", "*", "train/iter"]]
    assert {str(call[2]) for call in first[3:]} == {"{}"}  # no step of wandb's own
    _, resumed = calls("second", "--max_iters=8", "--init_from=resume")
    assert resumed[0] == ["init", "first"]
    back, again = calls("third", "--max_iters=8", "--init_from=resume", "--resume_tag=iter_4", "--overwrite=True")
    assert again[0] == ["init", None] and {call[1] for call in again[3:]} == {5, 6, 7, 8}
    assert "wandb: a new run, because overwrite=True discards what first has after step 4\n" in back.stdout
    _, last = calls("fourth", "--max_iters=9", "--init_from=resume")
    assert last[0] == ["init", "third"]


def test_wandb_that_does_not_start_costs_nothing(train, one_rank, tmp_path):
    out_dir = shutil.copytree(one_rank.out_dir, tmp_path / "out")
    before = {p: p.read_bytes() for p in out_dir.rglob("*") if p.is_file()}
    run = train("--wandb_log=True", "--overwrite=True", ranks=2, out_dir=out_dir,
                WANDB_MODE="nonsense", WANDB_DIR=str(tmp_path))
    (line,) = [line for line in run.stderr.splitlines() if "wandb failed to start" in line]
    assert "WANDB_MODE=offline, or set --wandb_log=False" in line and "iter 1:" not in run.stdout
    assert run.returncode == 2 and "train_deepspeed.py\", line" not in run.stderr
    assert {p: p.read_bytes() for p in out_dir.rglob("*") if p.is_file()} == before
