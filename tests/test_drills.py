"""The drills of tests/drills/, run short, each as a user would run it."""

import json
import os
import sys
from subprocess import run

import pytest
from conftest import ROOT

NO_RIGHT = 77  # diskfull.py ends with it before it has started anything


@pytest.mark.long
@pytest.mark.parametrize("drill, options, figures", [
    ("kill", ["--kills=3", "--seed=5"], {"kills": 3, "losses_equal": True, "went_back": []}),
    ("corrupt", ["--resumes=1", "--seed=1"], {"tried": 58, "noticed": 58, "wrong": []}),
    ("diskfull", ["--most=3"], {}), ("reshard", ["--most=3"], {"changes": 3}),
    ("reshard", ["--most=1", "--dtype=bfloat16", "--tolerance=1e-3"], {"changes": 1}),
    ("signals", ["--launchers=torchrun,deepspeed,run_deepspeed_xl.sh", "--only=SIGTERM"],
     {"trials": 3, "failed": [], "orphans": 0}),
    ("signals", ["--moments=6"], {"trials": 6, "failed": []}),
    ("prepare", ["--mb=20", "--kills=2", "--tokenizer=char"], {"kills": 2, "same_bytes": True}),
    ("signals", ["--launchers=torchrun", "--only=a rank killed", "--resume=0"],
     {"trials": 1, "failed": [], "orphans": 0})])
def test_drill(drill, options, figures, tmp_path):
    script, out = ROOT / "tests" / "drills" / f"{drill}.py", tmp_path / "report.json"
    done = run([sys.executable, script, *options, f"--folder={tmp_path}/drill", f"--json={out}"], capture_output=True,
               text=True, env={k: v for k, v in os.environ.items() if k != "DRILL_INSIDE"})
    if drill == "diskfull" and done.returncode == NO_RIGHT:
        # The drill needs a real file system that fills up, so it mounts one of its own, which some containers forbid to
        # everyone. It tries that before anything of ours runs and ends with 77 for no other reason, so no fault of ours
        # can come here; and nothing but a file system says "no space left" in the middle of a write.
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads(out.read_text())
    assert report["passed"] and {key: report[key] for key in figures} == figures
