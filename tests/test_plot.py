"""plot.py: two runs of the training script compared, a long run with spikes, and folders without records."""

import json
import math
import re

from conftest import ROOT, launch
from matplotlib.figure import Figure
from PIL import Image

import plot


def draw(*args, **env):
    return launch(ROOT / "plot.py", *args, **env)


def write_run(folder, *lines):
    """Write these lines, or records, as a run's history."""
    folder.mkdir(parents=True)
    (folder / "history.jsonl").write_text("".join(
        line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return folder


def panel(history, key):
    """Return the axes of one panel with one run."""
    axes = Figure().subplots()
    plot.draw_panel(axes, {"a": history}, key)
    return axes


def test_long_runs_keep_their_spikes_and_leave_out_what_is_not_finite():
    points = [(it, 1.0) for it in range(5000)]
    points[1234] = (1234, 50.0)
    groups = plot.downsample(points)
    assert len(groups) == 385 and groups[94] == (1228, 1.0, (12 + 50) / 13, 50.0)  # 13 in each
    assert [group[1:] for group in groups if group[3] != 1.0] == [groups[94][1:]] and plot.downsample([]) == []
    assert [it for it, *_ in plot.downsample(points[:5])] == [0, 1, 2, 3, 4]
    points[3000], points[3001] = (3000, math.nan), (3001, math.inf)
    history = [{"iter": it, "loss": value, "grad_norm": None} for it, value in points]
    drawn = panel(history, "loss")
    assert "log scale" in drawn.get_title(loc="left")
    assert all(map(math.isfinite, drawn.lines[0].get_ydata())) and 3000 not in dict(plot.series(history, "loss"))
    assert [text.get_text() for text in panel(history, "grad_norm").texts] == ["not recorded"]


def test_a_run_that_has_just_begun_or_has_only_nan(tmp_path):
    begun = write_run(tmp_path / "_begun", {"iter": 0, "val_loss": 3.5, "val_loss_stderr": 0.1})
    strange = write_run(tmp_path / "nan", {"iter": 0, "val_loss": math.nan}, {"iter": 1, "loss": math.nan, "ms": "x"},
                        {"iter": "a"}, '{"iter": 2, "lo')
    run = draw(f"{begun}/", strange, "--png", tmp_path / "p.png")
    assert run.returncode == 0 and run.stderr.splitlines() == [
        f"{strange}/history.jsonl: skipping line {n}, which is not a complete record" for n in (3, 4)]
    assert Image.open(tmp_path / "p.png").size == (1800, 960)
    run = draw(begun, "--png=/nowhere/x.png")
    assert run.returncode == 2 and run.stderr == (
        "/nowhere/x.png cannot be written (No such file or directory): choose another with --png=FILE\n")


def test_folders_without_records_are_all_named(tmp_path):
    good, empty = write_run(tmp_path / "good", {"iter": 0, "val_loss": 3.5}), write_run(tmp_path / "empty")
    cut = write_run(tmp_path / "cut", '{"iter": 0, "val')
    why = "has no complete record: check the folder's name, or wait for the first evaluation"
    run = draw(good, tmp_path / "nowhere", empty, cut)
    assert (run.returncode, run.stdout) == (2, "") and run.stderr.splitlines() == [
        f"{cut}/history.jsonl: skipping line 1, which is not a complete record",
        *(f"{folder}/history.jsonl {why}" for folder in (tmp_path / "nowhere", empty, cut))]


def test_help_and_no_folder():
    run = draw("--help", PYTHONPROFILEIMPORTTIME="1")
    assert "runtime.monitor.history" in run.stderr and not re.search(r"\b(torch|numpy)$", run.stderr, re.M)  # quick
    assert run.returncode == 0 and "--png FILE" in run.stdout and "python plot.py out-a out-b" in run.stdout
    assert draw().returncode == 2
