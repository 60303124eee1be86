"""What a release has besides the code: the version, and files that other tools read."""

import os
import re
import shutil
import subprocess
import sys
import tomllib

import pytest
import yaml
from conftest import ROOT, done, launch

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
SCRIPTS = ("train_deepspeed.py", "launch_deepspeed.py", "plot.py", "data/prepare.py")  # one of each kind


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_says_its_version(script):
    done = subprocess.run([sys.executable, script, "--version"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"gpt2-deepspeed {VERSION}\n")


def test_the_citation_has_the_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == VERSION
    assert {"cff-version", "title", "message", "authors", "license"} <= citation.keys()


def test_the_workflow_runs_what_must_pass():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    (job,) = workflow["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_the_report_asks_for_what_explains_most():
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text())
    labels = " ".join(field["attributes"]["label"] for field in form["body"])
    assert "python doctor.py" in labels and "settings.json" in labels


def test_the_container_copies_files_that_are_here():
    """The recipe is not built here: its instructions are known, and what it copies and runs exists."""
    text = (ROOT / "Containerfile").read_text().replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and line[0] != "#"]
    assert lines[0] == ["FROM", "debian:13-slim"]
    assert {word for word, _ in lines} <= {"FROM", "RUN", "WORKDIR", "COPY", "ENV", "CMD"}
    copied = [path for word, rest in lines if word == "COPY" for path in rest.split()[:-1]]
    assert copied and all((ROOT / path).exists() for path in copied)
    # What the environment is made from has to be there when it is made
    made = next(i for i, (word, rest) in enumerate(lines) if word == "RUN" and "venv.sh" in rest)
    before = " ".join(rest for word, rest in lines[:made] if word == "COPY")
    for path in ("pyproject.toml", "requirements.txt", "runtime/venv.sh", "runtime/install.py"):
        assert path in before


def test_the_changelog_has_the_version():
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## (\S+)", text, re.M)
    assert versions[0] == ("Unreleased" if "dev" in VERSION else VERSION)


OLD = ROOT / "tests" / "old_checkpoint" / "iter_2"
OLD_SHAPE = ("--n_layer=1", "--n_embd=16")


def test_a_checkpoint_from_before_the_release_resumes_and_samples(train, tmp_path):
    """Saved by 2 ranks, resumed by one. The losses are those of the run that saved it."""
    out_dir = tmp_path / "out"
    shutil.copytree(OLD, out_dir / "iter_2")
    (out_dir / "latest").write_text("iter_2")
    same_batch = "--gradient_accumulation_steps=4"
    run = done(train("--init_from=resume", same_batch, *OLD_SHAPE, out_dir=out_dir))
    assert "resumed from iter_2" in run.stdout
    assert run.losses[3] == pytest.approx(3.3158302307128906, rel=1e-6)
    assert run.losses[4] == pytest.approx(3.3087350130081177, rel=1e-6)

    sample = launch("sample.py", f"--out_dir={out_dir}", "--tag=iter_2", "--num_samples=1", "--max_new_tokens=9")
    assert len(done(sample).stdout.strip()) > 9


def test_install_sh_installs_and_does_nothing_else():
    """Here the environment is there. tests/test_shell.py has what runtime/venv.sh does otherwise."""
    env = {**os.environ, "PYTHON": sys.executable}
    ready = subprocess.run([ROOT / "install.sh"], env=env, cwd="/", capture_output=True, text=True)
    assert ready.returncode == 0 and ready.stderr == ""
    assert re.fullmatch(r"setup: ready: \S+\n|setup: ready: source \S+/activate\n", ready.stdout)
    wrong = subprocess.run([ROOT / "install.sh", "--cpu"], env=env, capture_output=True, text=True)
    assert (wrong.returncode, wrong.stderr) == (2, "install.sh takes no argument: run ./install.sh\n")
