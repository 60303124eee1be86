"""history.jsonl is JSON for every reader, whatever a run's numbers are."""

import json
import math

from conftest import done, not_json

from runtime.monitor.history import append_history, read_history, series, trim_history


def lines_of(folder):
    """The records as a strict reader of JSON sees them."""
    lines = (folder / "history.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=not_json) for line in lines]


def test_what_is_not_finite_is_null(tmp_path):
    """At any depth: a mixture's evaluation has a dict per dataset, and a step has lists."""
    record = {"iter": 1, "loss": math.nan, "grad_norm": math.inf, "lr": 1e-4, "ms": -math.inf, "mfu": None,
              "datasets": {"a": {"val_loss": math.nan, "share": 0.5}}, "list": [0.5, math.nan], "warning": "NaN"}
    append_history(tmp_path, record)
    assert lines_of(tmp_path) == [
        {"iter": 1, "loss": None, "grad_norm": None, "lr": 1e-4, "ms": None, "mfu": None,
         "datasets": {"a": {"val_loss": None, "share": 0.5}}, "list": [0.5, None], "warning": "NaN"}]
    assert math.isnan(record["loss"])  # the loggers get it, too


def test_a_resume_repairs_the_records_of_earlier_versions(tmp_path):
    (tmp_path / "history.jsonl").write_text('{"iter": 1, "loss": NaN}\n{"iter": 2, "loss": 2.5}\n{"iter": 3}\n')
    assert math.isnan(read_history(tmp_path)[0]["loss"])
    trim_history(tmp_path, 2)
    assert lines_of(tmp_path) == [{"iter": 1, "loss": None}, {"iter": 2, "loss": 2.5}]
    assert series(read_history(tmp_path), "loss") == [(2, 2.5)]


def test_a_run_whose_losses_are_nan_writes_json(train):
    """Its console says nan, and the records null."""
    run = train("--learning_rate=1e30", "--min_lr=1e30", "--grad_clip=0", "--max_iters=3", "--eval_interval=3")
    assert run.returncode == 2 and "step 3: train loss nan, val loss nan" in run.stdout
    steps = {record["iter"]: record["loss"] for record in lines_of(run.out_dir) if "loss" in record}
    assert steps[1] == run.losses[1] and steps[3] is None
    (last,) = [record for record in lines_of(run.out_dir) if "val_loss" in record and record["iter"] == 3]
    assert last["val_loss"] is last["train_loss"] is None


def test_a_checkpoint_before_the_first_evaluation_is_json(train):
    """No validation loss is the best one yet: the manifest has null, and the resume takes the first one."""
    plant = "import signal; from runtime.cluster import shutdown\n" \
            "from runtime.monitor.runlog import RunLog\nstep = RunLog.step\n" \
            "def stop(self, *args, **kwargs):\n    step(self, *args, **kwargs)\n" \
            "    os.kill(os.getpid(), signal.SIGTERM)\nRunLog.step = stop\n"
    run = train("--max_iters=6", "--eval_interval=6", plant=plant)
    tag = (run.out_dir / "latest").read_text()
    content = (run.out_dir / tag / "manifest.json").read_text()
    assert json.loads(content, parse_constant=not_json)["state"]["best_val_loss"] is None
    resumed = done(train("--max_iters=6", "--eval_interval=6", "--init_from=resume", out_dir=run.out_dir))
    content = (run.out_dir / "best" / "manifest.json").read_text()
    assert json.loads(content)["state"]["best_val_loss"] == resumed.evals[6][1]
