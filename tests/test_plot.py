"""plot.py: two runs of the training script compared, a long run with spikes, and every mistake's sentence."""

import io
import json
import math
import os
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
from conftest import ROOT, done, launch
from PIL import Image

import plot
from runtime import report

HOSTILE = "<script>alert('x')</script> & \"more\""
VOID = {"meta", "wbr"}


class Page(HTMLParser):
    """A page's elements [(tag, attributes)], its texts, and the cells of its tables' rows [(marked, cells)]."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.texts, self.rows, self.open = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self.open += [tag] * (tag not in VOID)
        if tag == "tr":
            self.rows.append((dict(attributes).get("class") == "differs", []))
        if tag in ("th", "td"):
            self.rows[-1][1].append("")

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data):
        self.texts.append(data)
        if {"th", "td"} & set(self.open[-1:]):
            self.rows[-1][1][-1] += data

    def row(self, label):
        """(marked, cells) of the only row that begins with this."""
        (found,) = [(marked, cells[1:]) for marked, cells in self.rows if cells[0] == label]
        return found


def draw(*args, **env):
    return launch(ROOT / "plot.py", *args, **env)


def add(path, record):
    with open(path, "a") as f:
        f.write(json.dumps(record) + "\n")


def write_run(folder, records, made=None):
    folder.mkdir(parents=True)
    for record in records:
        add(folder / "history.jsonl", record)
    if made is not None:
        (folder / "settings.json").write_text(json.dumps(made))
    return folder


def colours(picture):
    """Each colour of a picture: in how many of its pixels."""
    return {colour: count for count, colour in picture.convert("RGB").getcolors(2**24)}


@pytest.fixture(scope="module")
def compared(train):
    """Two runs, with a hostile text in the second, and what `plot.py a b` makes of them."""
    with ThreadPoolExecutor(2) as pool:
        a, b = map(done, pool.map(lambda lr: train(f"--learning_rate={lr}"), ("1e-3", "2e-3")))
    add(b.out_dir / "history.jsonl", {"iter": 4, "sample": HOSTILE})
    made = json.loads((b.out_dir / "settings.json").read_text())
    made["settings"]["wandb_project"] = HOSTILE
    made.update(git_diff="+x <= y", hardware="NVIDIA H200",
                memory_plan={"weights": 3e9, "optimizer": 1.25e9, "CUDA and NCCL": 1e9})
    (b.out_dir / "settings.json").write_text(json.dumps(made))
    run = draw(a.out_dir, b.out_dir)
    assert run.returncode == 0, run.stderr
    text = (a.out_dir / "report.html").read_text()
    return SimpleNamespace(a=a, b=b, run=run, text=text, page=Page(text))


def test_both_are_written_and_told(compared):
    out_dir = compared.a.out_dir
    assert compared.run.stdout == f"written to {out_dir}/curves.png\nwritten to {out_dir}/report.html\n"
    assert compared.run.stderr == ""


def test_the_picture_has_both_runs_colours(compared):
    picture = Image.open(compared.a.out_dir / "curves.png")
    assert picture.format == "PNG" and picture.size == (1800, 960)
    seen = colours(picture)
    assert seen[255, 255, 255] < 0.98 * 1800 * 960
    for colour in plot.COLOURS[:2]:
        assert seen[tuple(bytes.fromhex(colour[1:]))] > 500
    assert tuple(bytes.fromhex(plot.COLOURS[2][1:])) not in seen


def test_the_report_tells_the_best_losses_and_what_else_there_is(compared):
    page, runs = compared.page, (compared.a, compared.b)
    best = [min(run.evals.items(), key=lambda item: item[1][1]) for run in runs]
    assert page.open == [] and page.row("best validation loss")[1] == [
        f"{val_loss:.4f} at iteration {it}" for it, (_, val_loss) in best]
    assert page.row("last training loss")[1] == [f"{run.losses[4]:.4f} at iteration 4" for run in runs]
    assert page.row("MFU")[1] == ["n/a", "n/a"] and page.row("not finite")[1] == ["none", "none"]
    names = [str(run.out_dir) for run in runs]
    assert [cells for _, cells in page.rows if cells == ["", *names]]
    assert [tag for tag, _ in page.elements].count("svg") == len(plot.PANELS) == 6
    planned = sum(json.loads((compared.a.out_dir / "settings.json").read_text())["memory_plan"].values())
    assert 5e5 < planned < 2e6  # 27,392 parameters
    assert page.row("together, without CUDA and NCCL")[1] == [f"{planned / 1e6:.2f} MB", "4.25 GB"]
    assert "+x <= y" in page.texts
    assert page.row("measured peak of these")[1][0] == report.NONE != page.row("measured peak of these")[1][1]
    assert page.row("peak of the whole process on CPU, with Python and PyTorch")[1][1] == report.NONE


def test_settings_are_a_difference_from_the_defaults(compared):
    page = compared.page
    assert page.row("learning_rate") == (True, ["0.001", "0.002", "3e-05"])
    assert page.row("max_iters") == (False, ["4", "4", "20"])
    assert page.row("torch")[0] is False
    assert not [cells for _, cells in page.rows if cells[0] in ("weight_decay", "seed")]


def test_tags_of_the_same_files_share_a_row(compared):
    found = [cells[1:4] for _, cells in compared.page.rows if cells[0] == str(compared.a.out_dir)]
    assert found == [["iter_2", "2", f"{compared.a.evals[2][1]:.4f}"],
                     ["iter_4 = best = final", "4", f"{compared.a.evals[4][1]:.4f}"]]


def test_what_the_users_files_say_is_text(compared):
    assert "<script" not in compared.text and HOSTILE in compared.page.texts
    assert compared.page.row("wandb_project") == (True, ["'gpt2-deepspeed'", repr(HOSTILE), "'gpt2-deepspeed'"])


def test_the_report_loads_nothing(compared):
    loads = [value for _, attributes in compared.page.elements for name, value in attributes.items()
             if name in ("src", "href", "xlink:href", "srcset", "data", "action")]
    assert loads and all(value.startswith("#") for value in loads)
    assert "url(http" not in compared.text and "@import" not in compared.text
    ids = [attributes["id"] for _, attributes in compared.page.elements if "id" in attributes]
    assert {value[1:] for value in loads} <= set(ids)
    assert plot.INK not in compared.text and "currentColor" in compared.text  # drawn in the page's own ink


def test_long_runs_keep_their_spikes_and_show_what_is_not_finite():
    points = [(it, 1.0) for it in range(5000)]
    points[1234], points[3000], points[3001] = (1234, 50.0), (3000, math.nan), (3001, math.inf)
    groups = plot.grouped(points)
    assert len(groups) == 385 and groups[94] == (1228, 1.0, (12 + 50) / 13, 50.0, True)  # 13 in each
    assert [(mean, finite) for _, _, mean, _, finite in groups if not finite] == [(1.0, False)]
    assert plot.grouped(points[3000:3002])[0][4] is False and plot.grouped([]) == []
    assert [it for it, *_ in plot.grouped(points[:5])] == [0, 1, 2, 3, 4]
    history = [{"iter": it, "loss": value, "grad_norm": None} for it, value in points]
    drawn = plot.svg({"a": {"history": history}}, "loss")
    assert "log scale" in drawn and "× not finite" in drawn
    assert "not recorded" in plot.svg({"a": {"history": history}}, "grad_norm")
    assert report.summary(history)["not finite"] == "2, the first at iteration 3000"
    assert report.summary(history)["told of"] == "nothing"
    history += [{"iter": it, "trouble": f"rank {it} lags"} for it in (7, 9)]
    assert report.summary(history)["told of"] == "2, the last at iteration 9: rank 9 lags"


def test_a_run_that_has_just_begun_or_has_only_nan(tmp_path):
    begun = write_run(tmp_path / "_begun $x$", [{"iter": 0, "val_loss": 3.5, "val_error": 0.1}], {"settings": {}})
    strange = write_run(tmp_path / "nan", [{"iter": 0, "val_loss": math.nan}, {"iter": 1, "loss": math.nan, "ms": "x"}])
    (strange / "history.jsonl").open("a").write('{"iter": 2, "lo')
    run = draw(f"{begun}/", strange, "--png", tmp_path / "p.png", "--html", tmp_path / "r.html")
    assert run.returncode == 0 and run.stderr == (
        f"{strange}/history.jsonl: passing over line 3, which is no whole record\n"
        f"{strange} has no settings.json that can be read: going without\n")
    page = Page((tmp_path / "r.html").read_text())
    assert page.row("best validation loss")[1] == ["3.5000 at iteration 0", "–"]
    assert page.row("last training loss")[1] == ["–", "nan at iteration 1"]
    assert Image.open(io.BytesIO((tmp_path / "p.png").read_bytes())).size == (1800, 960)


def test_every_mistake_is_told_in_a_sentence(tmp_path):
    good = write_run(tmp_path / "good", [{"iter": 0, "val_loss": 3.5}], {"settings": {}})
    empty, cut = write_run(tmp_path / "empty", []), write_run(tmp_path / "cut", [])
    (empty / "history.jsonl").touch()
    (cut / "history.jsonl").write_text('{"iter": 0, "val')
    none = write_run(tmp_path / "none", [])
    run = draw(good, tmp_path / "nowhere", none, empty, cut)
    assert (run.returncode, run.stdout) == (2, "") and run.stderr.splitlines() == [
        f"{cut}/history.jsonl: passing over line 1, which is no whole record",
        f"{tmp_path}/nowhere is no folder: name the out_dir of a run",
        f"{none}/history.jsonl cannot be read (No such file or directory): name the out_dir of a run",
        f"{empty}/history.jsonl has no whole record: wait for the run's first evaluation",
        f"{cut}/history.jsonl has no whole record: wait for the run's first evaluation"]
    run = draw(good, f"--html={tmp_path}/nowhere/r.html")
    assert run.returncode == 2 and run.stderr == (f"{tmp_path}/nowhere/r.html cannot be written (No such file or "
                                                  "directory): choose another with --html=FILE\n")
    (tmp_path / "matplotlib.py").write_text("raise ModuleNotFoundError(\"No module named 'matplotlib'\")")
    run = draw(good, PYTHONPATH=os.fspath(tmp_path))
    assert run.returncode == 2 and run.stderr == ("the curves need matplotlib (No module named 'matplotlib'): "
                                                  "pip install -r requirements.txt\n")


def test_help_and_no_folder():
    run = draw("--help")
    assert run.returncode == 0 and "--png FILE" in run.stdout and "python plot.py out-a out-b" in run.stdout
    assert draw().returncode == 2
