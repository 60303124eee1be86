"""Another DeepSpeed than the tested one is refused."""

import re

from conftest import ROOT

from runtime.engine.fixes import DEEPSPEED


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
