"""python plot.py OUT --report: one HTML file that opens offline, of a real run."""

import html
import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from conftest import ROOT, done

ATTACK = "</pre><script>alert(1)</script><img src=https://example.com/x.png>"


class Page(HTMLParser):
    """All tags of a page, with their attributes, and its text."""

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text += data


def write_report(out_dir):
    return subprocess.run([sys.executable, "plot.py", out_dir, "--report"], cwd=ROOT, capture_output=True, text=True)


@pytest.fixture(scope="module")
def page(train):
    """The report of a resumed run, with a warning and a sample of others in its records."""
    run = done(train("--max_iters=4", "--eval_interval=2"))
    run = done(train("--max_iters=6", "--eval_interval=2", "--init_from=resume", out_dir=run.out_dir))
    with (run.out_dir / "history.jsonl").open("a") as file:
        file.write(json.dumps({"iter": 6, "warning": f"skipped {ATTACK}"}) + "\n")
        file.write(json.dumps({"iter": 6, "sample": f"line 1\nline 2 {ATTACK}"}) + "\n")
    assert write_report(run.out_dir).returncode == 0
    text = (run.out_dir / "report.html").read_text()
    return run, text, Page(text)


def test_it_has_what_happened(page):
    run, _, page = page
    best = min(record["val_loss"] for record in run.history if "val_loss" in record)
    assert f"{best:.4f} at iteration" in page.text
    assert "tokens per second, median" in page.text
    rows = re.sub(r"\s+", " ", page.text)
    assert "max_iters6" in rows.replace(" ", "") and "eval_interval2" in rows.replace(" ", "")
    assert "weight_decay" not in page.text.split("Command")[0]  # at its default
    assert "started" in page.text and "resumed" in page.text and "saved iter_6" in page.text
    assert "line 1\nline 2" in page.text


def test_it_loads_nothing_and_escapes_its_texts(page):
    _, text, page = page
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "img", "link", "iframe", "object", "embed"})
    assert html.escape(ATTACK) in text and ATTACK not in text
    for tag, attributes in page.tags:
        for name, value in attributes.items():
            assert not name.startswith("on")  # a handler
            if name in ("src", "href", "xlink:href", "action", "data"):
                assert value.startswith("#"), (tag, name, value)
    assert "url(http" not in text and "@import" not in text


def test_other_files_are_refused_in_one_sentence(tmp_path):
    (tmp_path / "history.jsonl").write_text('{"iter": 1, "loss": 2.0}\n')
    for content, why in (("[1", "cannot be read"), ("[]", "it has no settings")):
        (tmp_path / "settings.json").write_text(content)
        refused = write_report(tmp_path)
        assert refused.returncode == 2 and why in refused.stderr
        assert len(refused.stderr.splitlines()) == 1
    assert not (tmp_path / "report.html").exists()
