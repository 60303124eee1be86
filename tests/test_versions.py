"""The versions of Python and of packages: where they are named, and another DeepSpeed is refused."""

import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, SMALL, done

import doctor
from runtime.engine.fixes import DEEPSPEED


def test_the_versions_of_python_are_those_of_pyproject_toml():
    """3.11 to 3.14, in what a user reads."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11,<3.15"
    assert "You need Linux and Python 3.11 to 3.14" in (ROOT / "README.md").read_text()
    assert "for Python 3.11 to 3.14." in (ROOT / "requirements.txt").read_text().splitlines()[0]


@pytest.mark.parametrize("minor, status", [(10, "WARN"), (11, "OK"), (13, "OK"), (14, "OK"), (15, "WARN")])
def test_doctor_takes_the_same_versions(minor, status, monkeypatch):
    monkeypatch.setattr(sys, "version_info", SimpleNamespace(minor=minor))
    ((found, _, _, fix),) = doctor.python()
    assert found == status and (fix == "") == (status == "OK")
    assert status == "OK" or fix.startswith("install Python 3.11 to 3.14, and set PYTHON")


def test_processes_are_forks_on_every_version_of_python():
    """Python 3.14 has another default, which is planted here. A script's own choice stays.

    With that default, tqdm's lock alone ended a run with "1 leaked semaphore objects".
    """
    method = "import runtime, multiprocessing; print(multiprocessing.get_start_method())"
    of_314 = (
        "import multiprocessing.context as c; "
        "c._default_context._default_context = c._concrete_contexts['forkserver']; "
    )
    own = "import multiprocessing as m; m.set_start_method('spawn'); "
    for code, expected in ((method, "fork"), (of_314 + method, "fork"), (own + method, "spawn")):
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
        assert (done.stdout, done.stderr) == (f"{expected}\n", "")


def test_pyproject_toml_has_the_versions_of_requirements_txt():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = project["optional-dependencies"]
    assert groups.pop("all") == [f"gpt2-deepspeed[{','.join(groups)}]"]
    pins = [*project["dependencies"], *(pin for group in groups.values() for pin in group)]
    locked = re.findall(r"^(\w[^#]*?) *#", (ROOT / "requirements.txt").read_text(), re.M)
    assert sorted(pins) == sorted([*locked, "pip"]) and len(locked) == 27


def extras() -> list[str]:
    """Return the names of the packages of all extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = project["optional-dependencies"]
    return [pin.split("==")[0] for group in groups.values() for pin in group if "==" in pin]


@pytest.fixture(scope="module")
def start_without_extras(tmp_path_factory):
    """start(*words): run a script with the installed packages, but those of the extras."""
    # Links to all that is installed
    site = tmp_path_factory.mktemp("site")
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        (site / path.name).symlink_to(path)
    for name in extras():
        for file in importlib.metadata.files(name):
            if file.parts[0] != "..":
                (site / file.parts[0]).unlink(missing_ok=True)

    def start(*words):
        # -S: without the folder that the links lead to
        command = [sys.executable, "-S", *map(str, words)]
        env = {**os.environ, "PYTHONPATH": str(site)}
        return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)

    return start


def test_what_is_in_no_extra_is_enough(start_without_extras, characters, tmp_path):
    """To prepare, train, sample and export; a logger, the plot and the Hub name what is missing."""
    start = start_without_extras
    assert {"matplotlib", "datasets", "wandb", "pytest"} <= {*extras()}
    for name in ("wandb", "PIL", "pytest"):
        assert start("-c", f"import {name}").stderr.endswith(f"No module named '{name}'\n")

    out_dir = tmp_path / "out"
    options = [*SMALL, f"--dataset={characters}", f"--out_dir={out_dir}"]
    done(start("train_deepspeed.py", *options))
    done(start("data/prepare.py", "README.md", f"--name={tmp_path}/readme", "--tokenizer=char",
               "--max_document_bytes=400"))
    done(start("sample.py", f"--out_dir={out_dir}", "--num_samples=1", "--max_new_tokens=9"))
    done(start("export_hf.py", f"--out_dir={out_dir}", f"--to={tmp_path}/hf"))

    install = "python -m pip install -r requirements.txt"
    activate = f"run source .venv/bin/activate, or {install}"
    refusals = [
        (["plot.py", out_dir], f"No module named 'matplotlib': {activate}"),
        (
            ["data/prepare_hub.py", "--dataset=a/b", f"--name={tmp_path}/hub"],
            f"No module named 'datasets': {activate}",
        ),
        (
            ["train_deepspeed.py", *options, "--overwrite=True", "--wandb_log=True"],
            f"wandb failed to start (No module named 'wandb'): {install}, wandb login or "
            "WANDB_MODE=offline, or set --wandb_log=False",
        ),
        (
            ["train_deepspeed.py", *options, "--overwrite=True", "--tensorboard_log=True"],
            f"tensorboard failed to start (No module named 'tensorboard'): {install}, or set "
            "--tensorboard_log=False",
        ),
    ]
    for words, line in refusals:
        refused = start(*words)
        assert (refused.returncode, refused.stderr) == (2, line + "\n"), words
    assert not (tmp_path / "hub").exists()


def test_the_tests_say_which_packages_they_need(tmp_path):
    """In an environment of one's own, here one without any package."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)
    env = {**os.environ, "PYTHON": str(python), "PYTHONPATH": ""}
    refused = subprocess.run([ROOT / "run_tests.sh"], env=env, capture_output=True, text=True)
    needed = "the tests need pytest, pytest-timeout and pytest-xdist"
    line = f"{needed}: run {python} -m pip install -r requirements.txt\n"
    assert (refused.returncode, refused.stdout, refused.stderr) == (2, "", line)


def test_the_requirements_for_v100_differ_in_pytorch_alone():
    now, volta = (re.findall(r"^(\w[^\s#;]*)", (ROOT / file).read_text(), re.M)
                  for file in ("requirements.txt", "requirements-volta.txt"))
    assert {*volta} - {*now} == {"torch==2.7.1", "triton==3.3.1"} and len(volta) == len(now)


def test_another_deepspeed_is_refused(train, tmp_path):
    """What makes DeepSpeed 0.19.7 of the installed one comes first in sys.path."""
    folder = tmp_path / "deepspeed-0.19.7.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.19.7\n")
    refused = train(plant=f"sys.path.insert(0, {str(tmp_path)!r})")
    assert (refused.returncode, refused.stdout) == (2, "") and not refused.out_dir.exists()
    assert refused.stderr == (f"DeepSpeed 0.19.7 is installed, but only {DEEPSPEED} is tested: run python -m pip "
                              f"install deepspeed=={DEEPSPEED}\n")
