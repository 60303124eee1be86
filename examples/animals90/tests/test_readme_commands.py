"""README's commands for a machine without a GPU, by the launcher, in a copy of the example."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from animals90_runs import EXAMPLE, ROOT
from conftest import done, launch

README = (EXAMPLE / "README.md").read_text(encoding="utf-8")
SMALL_PICTURES = ("--classes=2", "--train=8", "--val=4", "--size=32")
SMALL_RUN = ("--epochs=1", "--batch_size=4", "--image_size=32", "--num_workers=0")


@pytest.fixture
def example(tmp_path) -> Path:
    """A copy of the example in a copy of the programs that it uses. It writes into itself."""
    shutil.copytree(ROOT / "runtime", tmp_path / "runtime")
    for path in [*ROOT.glob("*.py"), ROOT / "pyproject.toml"]:
        shutil.copy2(path, tmp_path)
    copy = tmp_path / "examples" / "animals90"
    shutil.copytree(EXAMPLE / "src", copy / "src")
    for path in EXAMPLE.iterdir():
        if path.is_file():
            shutil.copy2(path, copy)
    return copy


def line_of(pattern: str) -> str:
    """Return the only line of README's code that fits a pattern, without its comment."""
    lines = {line for line in README.splitlines() if re.match(pattern, line)}
    (line,) = lines
    return re.sub(r"\s\s+#.*", "", line)


@pytest.mark.long
def test_the_commands_without_a_gpu(example):
    """Pictures, a run of 2 ranks, its curves and a resume, each with smaller numbers."""

    def fork(pattern: str, *small: str) -> subprocess.CompletedProcess:
        _, script, *arguments = shlex.split(line_of(pattern))
        return done(launch(example / script, *arguments, *small, cwd=example))

    fork("python prepare.py --made_up --classes 10 ", *SMALL_PICTURES)
    checked = launch(example / "prepare.py", "--check", cwd=example)
    assert "24 pictures, 0 unreadable" in done(checked).stdout

    # By the launcher of the example, and by the script that makes an environment
    env = {**os.environ, "PYTHON": sys.executable}
    trained = shlex.split(line_of("python launch_deepspeed.py --num_gpus 2 --epochs 8 "))
    resumed = shlex.split(line_of("python launch_deepspeed.py --resume "))
    by_script = shlex.split(line_of("bash train_deepspeed.sh$"))
    commands = [
        [sys.executable, *trained[1:], *SMALL_RUN],
        [*by_script, *resumed[2:], "--num_gpus=1", *SMALL_RUN, "--pretrained=none", "--epochs=2"],
    ]
    for command in commands:
        run = subprocess.run(command, cwd=example, env=env, capture_output=True, text=True)
        assert run.returncode == 0, run.stdout + run.stderr
    history = json.loads((example / "logs" / "training_history.json").read_text())
    assert [record["epoch"] for record in history["epochs"]] == [1, 2]

    # The code that loads a checkpoint, in `src`
    (code,) = re.findall(r"^```\n(from model import .*?)^```", README, re.M | re.S)
    script = example / "src" / "code_of_the_page.py"
    script.write_text(code.replace("num_classes=90", "num_classes=2"))
    done(launch(script, cwd=script.parent))

    fork("python src/utils.py ")
    assert (example / "curves.png").stat().st_size > 10_000
    told = done(launch(example / "launch_deepspeed.py", "--help", cwd=example)).stdout
    assert "--num_gpus" in told and "--fp16" in told
