"""launch_deepspeed.py as a user has it, with real runs of 2 ranks on CPU."""

import os
import re
import shlex
import signal
import subprocess
import sys

import psutil
import pytest
from conftest import ROOT, SMALL, read_history
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from runtime.checkpoint.tags import TagStore
from runtime.cluster.shutdown import EXIT_REASONS
from runtime.output import exit_with_error

SCRIPT = ROOT / "launch_deepspeed.py"
ASIDE = ("--batch_size", "--gradient_accumulation_steps", "--learning_rate", "--max_iters")
REST = [arg for arg in SMALL if not arg.startswith(ASIDE)]


@pytest.fixture
def start(characters, tmp_path):
    """start(*args) -> Popen, in another folder than the script's; none of it outlives the test."""
    jobs = []

    def started(*args):
        command = [sys.executable, SCRIPT, *REST, f"--dataset={characters}", f"--out_dir={tmp_path}/out", *args]
        jobs.append(subprocess.Popen(  # a shell's `&` starts it with SIGINT ignored, which does not count
            command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)))
        return jobs[-1]

    yield started
    for job in jobs:
        job.kill()
    for process in psutil.process_iter(["cmdline"]):
        if f"--out_dir={tmp_path}/out" in (process.info["cmdline"] or []):
            process.kill()


@pytest.mark.long
def test_named_options_become_settings_and_a_run_goes_on(start, tmp_path):
    (tmp_path / "mine.py").write_text("dtype = 'float32'\nlog_interval = 1\nmax_iters = 2\n")
    named = ("mine.py", "--num_gpus=2", "--batch_size", "4", "--gradient_accumulation_steps=1",
             "--learning_rate=5e-4", "--decay_lr=False", "--dtype=bfloat16")
    first = start(*named)
    stdout, stderr = first.communicate(timeout=200)
    assert first.returncode == 0, stderr
    command = shlex.split(stdout.splitlines()[0])
    assert command[:6] == [sys.executable, str(SCRIPT), "torchrun", "--standalone", "--nproc_per_node=2",
                           str(ROOT / "train_deepspeed.py")]
    assert command[6] == "--init_from=scratch" and command[-7:] == [
        "mine.py", "--batch_size", "4", "--gradient_accumulation_steps=1", "--learning_rate=5e-4", "--decay_lr=False",
        "--dtype=bfloat16"]
    assert "batch      4 x 2 x 1 = 8 sequences" in stdout and "bfloat16, ZeRO-2 (ds_config_zero2.json)" in stdout
    again = start(*named, "--deepspeed_config=ds_config_zero3.json", "--max_iters=3", "--num_gpus=1",
                  "--init_from=resume", "--resume_tag=final")
    stdout, stderr = again.communicate(timeout=200)
    assert again.returncode == 0 and "resuming from" in stdout and "ZeRO-3 (ds_config_zero3.json)" in stdout, stderr
    records = [record for record in read_history(tmp_path / "out") if "loss" in record]
    assert [(record["iter"], record["lr"]) for record in records] == [(1, 5e-4), (2, 5e-4), (3, 5e-4)]


def test_a_signal_is_passed_on_and_the_run_saves(start, tmp_path):
    """SIGUSR1, which plain torchrun doesn't pass on."""
    job = start("--num_gpus=2", "--max_iters=1000000", "--eval_interval=1000000", "--log_interval=10")
    assert next((line for line in job.stdout if line.startswith("iter 10:")), None), job.stderr.read()
    os.kill(job.pid, signal.SIGUSR1)
    stdout, stderr = job.communicate(timeout=200)
    assert job.returncode == 138, stdout + stderr
    assert f"stop requested ({EXIT_REASONS[138]})" in stdout
    assert TagStore(tmp_path / "out").find().manifest["iter_num"] >= 10


@pytest.mark.long
def test_a_second_ctrl_c_ends_it_at_once(start, tmp_path):
    job = start("--num_gpus=2", "--max_iters=1000000", "--eval_interval=1000000", "--log_interval=10")
    assert next((line for line in job.stdout if line.startswith("iter 10:")), None), job.stderr.read()
    for process in psutil.Process(job.pid).children(recursive=True):
        process.suspend()  # nobody saves
    os.kill(job.pid, signal.SIGINT)
    assert any(line.startswith("Stopping: ") for line in job.stderr)
    for number in (signal.SIGUSR1, signal.SIGINT):  # the first of them does nothing
        os.kill(job.pid, number)
    job.communicate(timeout=200)
    assert job.returncode == 130
    assert not [p for p in psutil.process_iter(["cmdline"]) if f"--out_dir={tmp_path}/out" in (p.info["cmdline"] or [])]


def test_the_exit_code_of_a_refusal(start):
    """What only the ranks see: the JSON is there for the launcher."""
    job = start("--num_gpus=2", "--deepspeed_config=nowhere.json")
    _, stderr = job.communicate(timeout=200)
    assert job.returncode == 2 and stderr.count("nowhere.json") == 1
    assert "Traceback" not in stderr and "error.json" not in stderr  # torchrun's file


def test_torchrun_repeats_a_refusal_below_its_traceback(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(SystemExit):
        exit_with_error("one=É\ntwo")
    failure = ProcessFailure(0, 1, 2, str(tmp_path / "error.json"))
    assert re.search("traceback : one=É\n  two\n=+$", str(ChildFailedError("train_deepspeed.py", {0: failure})))


@pytest.mark.parametrize("args, sentence", [
    (["--num_gpus=two"], "launch_deepspeed.py: argument --num_gpus: invalid int value: 'two'"),
    (["--num_gpus=0"], "launch_deepspeed.py: --num_gpus=0 must be at least 1"),
    (["--batch_size=many"], "command line: batch_size takes auto or int, not 'many'"),
    (["--learing_rate=1"], "command line: there is no setting 'learing_rate': did you mean 'learning_rate'?"),
    (["--resume"], "command line: there is no setting 'resume': use --init_from=resume"),
    (["nowhere.py"], "config file nowhere.py does not exist: name a .py file, or write --key=value"),
])
def test_bad_arguments_are_refused_before_anything_starts(start, args, sentence):
    stdout, stderr = start(*args).communicate(timeout=200)
    assert (stdout, stderr) == ("", sentence + "\n")
