"""Another DeepSpeed than the tested one is refused, and checkpoints record versions."""

import json
import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT, SMALL, done

from runtime.checkpoint.tags import TagStore, sign_manifest
from runtime.versions import DEEPSPEED, version_note

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


def test_another_deepspeed_is_refused(train, older):
    refused = train(plant=f"sys.path.insert(0, {older!r})")
    assert (refused.returncode, refused.stdout, refused.stderr) == (2, "", REFUSAL) and not refused.out_dir.exists()


def test_a_resume_notes_other_versions(train):
    run = done(train())
    tag, manifest = TagStore(run.out_dir).find()
    manifest["versions"]["torch"] = "2.4.1+cu124"
    (run.out_dir / tag / "manifest.json").write_text(sign_manifest(manifest))
    on = done(train("--init_from=resume", "--max_iters=5", out_dir=run.out_dir))
    assert "note       the checkpoint was written with torch 2.4.1+cu124 (installed: " in on.stdout
    assert version_note(TagStore(run.out_dir).find().manifest["versions"]) is None
    assert json.loads((run.out_dir / "iter_5" / "manifest.json").read_text())["versions"].keys() == {
        "torch", "deepspeed"}


def test_an_environment_of_the_users_own_gets_the_same_check_before_the_run(characters, older, tmp_path):
    command = [ROOT / "run_deepspeed_xl.sh", *SMALL, f"--dataset={characters}", f"--out_dir={tmp_path}/out"]
    refused = subprocess.run([*command, "--dry_run=True"], cwd=tmp_path, capture_output=True, text=True, env={
        **os.environ, "PYTHON": sys.executable, "PYTHONPATH": older, "DS_ACCELERATOR": "cpu"})
    assert (refused.returncode, refused.stderr) == (2, REFUSAL)
