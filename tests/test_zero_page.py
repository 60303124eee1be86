"""docs/zero.md: its commands, in its order, and the sizes, losses and collectives that they print."""

import os
import re
import shlex
import subprocess
import sys

import pytest
from conftest import ROOT, done, launch, read_history
from test_readme import blocks, read

PAGE = ROOT / "docs" / "zero.md"
PROGRAMS = ("python", "wc", "zgrep")


def python_block():
    """Return the Python code of the page, and the output that follows it."""
    (code, output), = re.findall(r"^```python\n(.*?)^```\n\n```\n(.*?)^```", read(PAGE), re.M | re.S)
    return code, output


def run_command(line, folder):
    """Run a command of the page with the data and the output in `folder`. Return what it prints."""
    words = shlex.split(line)
    place = 3 if "launch_deepspeed.py" in words else 1 if words[0] == "python" else None  # of the script
    if place is None or words[place].startswith("data/"):
        python, root, prefix = map(shlex.quote, (sys.executable, str(ROOT), sys.prefix))
        line = line.replace(".venv/", f"{prefix}/").replace("--name=", f"--name={folder}/")
        line = re.sub("^python data", f"{python} {root}/data", line)
        run = subprocess.run(["bash", "-c", line], cwd=folder, capture_output=True, text=True)
    else:
        out_dir, = (word.partition("=")[2] for word in words if word.startswith("--out_dir="))
        arguments = [*words[place + 1:], f"--dataset={folder}/zero", f"--out_dir={folder}/{out_dir}"]
        run = launch(ROOT / words[place], *arguments, ranks=2 if place == 3 else 1)
    return done(run).stdout.replace(f"{folder}/", "")


@pytest.mark.long
def test_the_commands_print_what_the_page_shows(tmp_path):
    lines = blocks(PAGE)
    printed = [run_command(line, tmp_path) for line in lines if line.split()[0] in PROGRAMS]
    assert len(printed) == 8
    sizes = [re.findall(r"(\d+) out-(\S+)", text) for text in (printed[2], printed[4])]
    shown = [(int(size), name) for size, name in re.findall(r"^ *(\d+) out-(\S+)$", read(PAGE), re.M)]
    assert [name for _, name in shown] == [name for group in sizes for _, name in group]
    for (wanted, name), (size, _) in zip(shown, sizes[0] + sizes[1], strict=True):
        assert int(size) == pytest.approx(wanted, abs=2000), name  # settings and names are in the file, too

    code, output = python_block()
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
                         capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout.endswith(output), run.stdout + run.stderr
    counted = [line.split() for text in printed[5:7] for line in text.splitlines()]
    assert counted == [line.split() for line in lines if re.fullmatch(r"\d+ c10d::\w+", line)]
    assert next(line for line in lines if line.startswith("re-sharding")) in printed[7]
    assert "1 x CPU, float32, ZeRO-2" in printed[7] and "iter 21: " in printed[7]
    wanted = float(re.search(r"^iter 20: loss ([\d.]+)", read(PAGE), re.M)[1])
    for name in ("out-zero2", "out-zero3"):
        loss, = (r["loss"] for r in read_history(tmp_path / name) if r["iter"] == 20 and "loss" in r)
        assert loss == pytest.approx(wanted, abs=0.002)


def test_the_functions_that_the_page_names_are_in_the_code():
    code = "".join(path.read_text() for path in (ROOT / "runtime").rglob("*.py"))
    named = re.findall(r"`((?:[A-Z]\w+\.)?\w+)`", read(PAGE))
    assert {"OurStep.step", "Zero2Layout.gather_weights", "Zero3Blocks.gather_first", "global_norm"} <= set(named)
    for name in named:
        owner, _, function = name.rpartition(".")
        start = rf"^class {owner}\b(?:(?!^class ).)*?^    " if owner else "^ *"
        assert re.search(rf"{start}(?:def|class) {function}\b", code, re.M | re.S), name
