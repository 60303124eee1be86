"""launch_deepspeed.py as a user has it, with real runs of 2 ranks on CPU."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys

import psutil
import pytest
from conftest import ROOT, SMALL, done, free_port, launch, planted, wait_until
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import launch_deepspeed
from runtime.checkpoint.tags import TagStore
from runtime.cluster.launchers import find_launcher
from runtime.cluster.shutdown import EXIT_REASONS
from runtime.cluster.store import is_launcher

SCRIPT = ROOT / "launch_deepspeed.py"


@pytest.fixture
def start(characters, tmp_path):
    """start(*args) -> Popen of 2 ranks, in another folder than the script's; none of it outlives the test."""
    jobs = []

    def started(*args):
        command = [sys.executable, SCRIPT, "--standalone", "--nproc_per_node=2", ROOT / "train_deepspeed.py", *SMALL,
                   f"--dataset={characters}", f"--out_dir={tmp_path}/out", *args]
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


def test_a_signal_is_passed_on_and_the_run_saves(start, tmp_path):
    """SIGUSR1, which plain torchrun doesn't pass on."""
    job = start("--max_iters=1000000", "--eval_interval=1000000", "--log_interval=10")
    assert next((line for line in job.stdout if line.startswith("iter 10:")), None), job.stderr.read()
    os.kill(job.pid, signal.SIGUSR1)
    stdout, stderr = job.communicate()
    assert job.returncode == 138, stdout + stderr
    assert f"stop requested ({EXIT_REASONS[138]})" in stdout
    assert TagStore(tmp_path / "out").find().manifest["iter_num"] >= 10


@pytest.mark.long
def test_a_second_ctrl_c_ends_it_at_once(start, tmp_path):
    job = start("--max_iters=1000000", "--eval_interval=1000000", "--log_interval=10")
    assert next((line for line in job.stdout if line.startswith("iter 10:")), None), job.stderr.read()
    for process in psutil.Process(job.pid).children(recursive=True):
        process.suspend()  # nobody saves
    os.kill(job.pid, signal.SIGINT)
    assert any(line.startswith("Stopping: ") for line in job.stderr)
    for number in (signal.SIGUSR1, signal.SIGINT):  # the first of them does nothing
        os.kill(job.pid, number)
    job.communicate()
    assert job.returncode == 130
    assert not [p for p in psutil.process_iter(["cmdline"]) if f"--out_dir={tmp_path}/out" in (p.info["cmdline"] or [])]


def test_the_exit_code_of_a_refusal(start):
    job = start("--deepspeed_config=nowhere.json")
    _, stderr = job.communicate()
    assert job.returncode == 2 and stderr.count("nowhere.json") == 1
    assert "Traceback" not in stderr and "error.json" not in stderr  # torchrun's file


@pytest.mark.parametrize("arguments, problem", [
    ([], "there is no script to start"), (["--nproc_per_node=2"], "there is no script to start"),
    (["--nproc_per_node"], "argument --nproc-per-node/--nproc_per_node: expected one argument"),
    (["--max-restarts=x", "train_deepspeed.py"], "argument --max-restarts/--max_restarts: invalid int value: 'x'")])
def test_arguments_that_start_nothing_are_one_sentence(arguments, problem):
    """torchrun prints its usage, 30 lines of options that nobody has asked for."""
    job = subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True)
    assert (job.returncode, job.stdout) == (2, "")
    assert job.stderr == (
        f"{problem}: run python launch_deepspeed.py [torchrun's options] SCRIPT [its options], such as "
        "python launch_deepspeed.py --nproc_per_node=4 train_deepspeed.py config/xl_shakespeare.py; "
        "--help lists the options\n")


def test_help_lists_the_options_under_its_own_name():
    job = subprocess.run([sys.executable, SCRIPT, "--help"], capture_output=True, text=True)
    assert (job.returncode, job.stderr) == (0, "")
    assert job.stdout.startswith("usage: python launch_deepspeed.py [torchrun's options] SCRIPT [its options]\n")
    assert "--nproc_per_node" in job.stdout


@pytest.mark.parametrize("arguments", [
    ["--nproc_per_node=1", ROOT / "train_deepspeed.py", "--dry_run=True"], ["--headline", "--dry_run=True"]])
def test_several_launchers_of_one_node_are_refused(arguments):
    """`srun -n 2 python launch_deepspeed.py` would be two runs, each with half of the batch."""
    env = {**os.environ, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}
    job = subprocess.run([sys.executable, SCRIPT, *arguments], env=env, capture_output=True, text=True)
    assert (job.returncode, job.stdout) == (2, "") and job.stderr.count("\n") == 1
    assert job.stderr.startswith(
        "SLURM_STEP_NUM_TASKS=2 in the environment: Slurm's srun has started 2 of this launcher, and each")


@pytest.mark.parametrize("size, nodes, refused", [("1", 1, False), ("2", 2, False), ("4", 2, True)])
def test_one_launcher_for_each_node_is_right(monkeypatch, capsys, size, nodes, refused):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", size)
    monkeypatch.setattr("runtime.cluster.launchers.STARTED_BY", find_launcher({"SLURM_STEP_NUM_TASKS": size}))
    with pytest.raises(SystemExit) if refused else contextlib.nullcontext():
        launch_deepspeed.refuse_further_launchers(nodes)
    assert ("has started 4 of this launcher" in capsys.readouterr().err) == refused


def start_second_node(host: str) -> subprocess.Popen:
    """Start the launcher of node 1 of 2."""
    return subprocess.Popen(
        [sys.executable, SCRIPT, "--nnodes=2", "--node_rank=1", "--nproc_per_node=1", f"--master_addr={host}",
         ROOT / "train_deepspeed.py"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_master_that_is_not_known_is_named_at_once():
    """The launcher waits for it: names of other containers may appear later. The resolver's own words differ."""
    host = "no-such-host.invalid"
    job = start_second_node(host)
    try:
        line = job.stderr.readline()
        assert job.poll() is None
    finally:
        job.terminate()
        job.communicate()
    assert line.startswith(f"waiting for --master_addr={host}, which can't be resolved (")
    assert line.endswith("): check its spelling, or give the IP address of node 0\n")


def test_a_master_with_an_impossible_name_is_refused():
    job = start_second_node("node..1")
    out, error = job.communicate()
    assert (job.returncode, out) == (2, "")
    assert error == "torchrun can't use its arguments: --master_addr=node..1 is not the name of a host\n"


EIGHT_CORES = """
import atexit, os, sys, torch
from runtime import cores
os.sched_getaffinity = lambda pid: range(8)
cores.cpu_quota = lambda: {quota}
atexit.register(lambda: sys.stdout.write(f"{{torch.get_num_threads()}} threads\\n"))
"""


@pytest.mark.parametrize("chosen, quota, threads", [(None, None, 4), (None, 4.5, 2), ("1", None, 1), ("2", None, 2)])
@pytest.mark.parametrize("launcher", ["torchrun", "launch_deepspeed.py"])
def test_ranks_share_the_cores_of_a_node(train, monkeypatch, launcher, chosen, quota, threads):
    """torchrun leaves each rank one thread. What the user has chosen stays. This node has 8 cores."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    if chosen is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    run = train("--max_iters=1", ranks=2, launcher=launcher, plant=EIGHT_CORES.format(quota=quota))
    assert done(run).stdout.count(f"{threads} threads\n") == 2


def test_a_sample_keeps_to_the_cpu_quota(train, monkeypatch, tmp_path):
    monkeypatch.delenv("OMP_NUM_THREADS")
    run = done(train("--max_iters=1"))
    script = planted(tmp_path, EIGHT_CORES.format(quota=3.0), ROOT / "sample.py")
    sample = launch(script, f"--out_dir={run.out_dir}", "--num_samples=1", "--max_new_tokens=2", launcher="python")
    assert done(sample).stdout.endswith("3 threads\n")


@pytest.mark.parametrize("command", ["accelerate", "accelerate-launch", "/opt/bin/accelerate",
                                     "accelerate.commands.launch", "torchrun", "deepspeed"])
def test_launchers_are_known_by_their_commands(command):
    with subprocess.Popen([sys.executable, "-c", "input()", command, "launch"], stdin=subprocess.PIPE) as process:
        found = wait_until(lambda: is_launcher(psutil.Process(process.pid)), 20)  # after the fork, it has our command
        process.communicate(b"\n")
    assert found


MODULE = [sys.executable, "-m"]
RANKS = ["--nproc_per_node=2", "--master_port={port}"]
TRAIN = str(ROOT / "train_deepspeed.py")


@pytest.mark.parametrize("command", [
    [*MODULE, "deepspeed.launcher.runner", "--num_gpus=2", "--master_port={port}", TRAIN],
    [sys.executable, str(SCRIPT), *RANKS, TRAIN],
    [str(ROOT / "run_deepspeed_xl.sh"), str(ROOT / "config" / "shakespeare_char_cpu.py")],
    # As docs/troubleshooting.md has it: without the address, torchrun itself waits
    [*MODULE, "torch.distributed.run", "--standalone", "--local_addr=localhost", "--nproc_per_node=2", TRAIN],
], ids=["deepspeed", "ours", "headline", "torchrun"])
def test_a_host_name_that_does_not_resolve_delays_nothing(characters, tmp_path, command):
    """As in containers and with some VPNs. Whoever looks the name up waits for its timeout: ten minutes in torchrun."""
    namespace = ["unshare", "--uts", "sh", "-c", 'hostname no-such-host && exec "$@"', "sh"]
    if shutil.which("unshare") is None:
        # Without it there is no host name that doesn't resolve, which is what this tests
        pytest.skip("needs unshare (util-linux), which gives a process a host name of its own")
    probe = subprocess.run([*namespace, "true"], capture_output=True, text=True)
    if probe.returncode:
        # Only root may have another host name, and some containers forbid it. Nothing of ours has run: this was `true`
        pytest.skip(f"another host name is not allowed here: {probe.stderr.strip()}")
    port = free_port()
    command = [word.format(port=port) for word in command]
    command += [*SMALL, "--optimizer=adamw", f"--dataset={characters}", f"--out_dir={tmp_path}/out"]
    job = subprocess.run([*namespace, *command], cwd=ROOT, capture_output=True, text=True,
                         env={**os.environ, "PYTHON": sys.executable})
    assert job.returncode == 0 and "iter 4:" in job.stdout, job.stdout + job.stderr
    assert " 2 x CPU, " in job.stdout


@pytest.mark.parametrize(
    "codes, expected",
    [((2, -signal.SIGTERM), 2), ((-signal.SIGTERM, 2), 2), ((1, -signal.SIGKILL), 137), ((-signal.SIGTERM,), 143)],
)
def test_the_exit_code_is_that_of_the_rank_that_failed_first(codes, expected):
    """torchrun ends the other ranks by SIGTERM, some before they handle it, and counts them as failed, too."""
    failures = {rank: ProcessFailure(rank, 1, code, "none") for rank, code in enumerate(codes)}
    assert launch_deepspeed.code_of_failure(ChildFailedError("train", failures)) == expected
