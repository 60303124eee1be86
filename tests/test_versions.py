"""The versions of Python and of packages: where they are named, and another DeepSpeed is refused."""

import re
import subprocess
import sys
import tomllib
from types import SimpleNamespace

import pytest
from conftest import ROOT

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
