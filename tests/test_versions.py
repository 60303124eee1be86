"""Another DeepSpeed than the tested one is refused."""

import re

import pytest
from conftest import ROOT

from runtime.engine.fixes import DEEPSPEED

REFUSAL = (f"DeepSpeed 0.19.7 is installed, but only {DEEPSPEED} is tested: run python -m pip install "
           f"deepspeed=={DEEPSPEED}\n")


@pytest.fixture
def older(tmp_path):
    """A folder for sys.path that makes DeepSpeed 0.19.7 of the installed one."""
    folder = tmp_path / "older" / "deepspeed-0.19.7.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.19.7\n")
    return str(folder.parent)


def test_the_pinned_version_is_the_one_in_requirements():
    assert re.search(r"^deepspeed==(\S+)", (ROOT / "requirements.txt").read_text(), re.M)[1] == DEEPSPEED


def test_the_requirements_for_v100_differ_in_pytorch_alone():
    now, volta = (re.findall(r"^(\w[^\s#;]*)", (ROOT / file).read_text(), re.M)
                  for file in ("requirements.txt", "requirements-volta.txt"))
    assert {*volta} - {*now} == {"torch==2.7.1", "triton==3.3.1"} and len(volta) == len(now)


def test_another_deepspeed_is_refused(train, older):
    refused = train(plant=f"sys.path.insert(0, {older!r})")
    assert (refused.returncode, refused.stdout, refused.stderr) == (2, "", REFUSAL) and not refused.out_dir.exists()
