"""How a run ends on request: signals, the file STOP, and what stands in their way."""

import os
import signal
import subprocess
import sys

import psutil
import pytest
from conftest import (
    ROOT,
    SMALL,
    ForkedJob,
    command_line,
    done,
    free_port,
    kill,
    launch,
    long,
    patience,
    planted,
    wait_until,
)

from runtime.checkpoint.tags import TagStore
from runtime.cluster.shutdown import EXIT_REASONS, Shutdown

ENDLESS = ("--max_iters=1000000", "--eval_interval=1000000", "--log_interval=10")


@pytest.fixture
def start(characters, tmp_path):
    """start(*args, ...) -> (job, its log) of an endless run that has made ten steps; it does not outlive the test."""
    jobs = []

    def started(*args, script=ROOT / "train_deepspeed.py", launcher="fork", ranks=1, prefix=()):
        log = tmp_path / "log"
        command = [*prefix, *command_line(script, *SMALL, *ENDLESS, f"--dataset={characters}",
                                          f"--out_dir={tmp_path}/out", *args, ranks=ranks, launcher=launcher)]
        with open(log, "w") as f:
            jobs.append(ForkedJob(command, ranks, log, log) if launcher == "fork" else subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=f, stderr=subprocess.STDOUT, cwd=ROOT,
                start_new_session=True, env={**os.environ, "PYTHON": sys.executable}))
        assert wait_until(lambda: "iter 10:" in log.read_text() or jobs[-1].poll() is not None), log.read_text()
        assert jobs[-1].poll() is None, log.read_text()
        return jobs[-1], log

    yield started
    for job in jobs:
        kill(job)


def iterations(log):
    return [int(line.split()[1][:-1]) for line in log.read_text().splitlines() if line.startswith("iter ")]


def test_of_two_requests_the_first_sets_the_exit_code():
    """Slurm sends SIGUSR1 some time before the limit and SIGTERM at it; by exit code 138 the job queues again."""
    shutdown = object.__new__(Shutdown)
    shutdown.exit_code = shutdown.signals = None
    for code in (138, 143):
        shutdown.request_exit(code)
    assert shutdown.exit_code == 138


def test_a_launcher_that_waits_for_another_node_ends_at_sigterm_or_in_a_sentence():
    argv = [sys.executable, "launch_deepspeed.py", "--nnodes=2", f"--master_port={free_port()}"]
    job = subprocess.Popen([*argv, "none.py"], cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        assert wait_until(lambda: psutil.Process(job.pid).net_connections())  # the store that the nodes join
        job.terminate()
        assert job.wait() == -signal.SIGTERM
    finally:
        job.kill()
    late = subprocess.run([*argv, "--rdzv_conf=timeout=1", "none.py"], cwd=ROOT, capture_output=True, text=True)
    assert late.stdout == "node 0 waits for all 2, at 127.0.0.1\n"
    for wrong, told in (("--nproc_per_node=0", "check --nproc_per_node\n"), ("--node_rank=2", "2 must be 0 to 1\n"),
                        ("config/train_gpt2.py", "is a config: put train_deepspeed.py before it\n")):
        refused = subprocess.run([*argv, wrong, "none.py"], cwd=ROOT, capture_output=True, text=True)
        assert refused.returncode == 2 and refused.stderr.endswith(told) and refused.stderr.count("\n") == 1
    assert late.returncode == 2 and late.stderr.startswith("not all nodes joined (Timed out"), late.stderr


def test_a_stop_that_cannot_be_removed_stops_the_run_too(start, tmp_path):
    """A folder, which stands for another user's file."""
    job, log = start()
    (tmp_path / "out" / "STOP").mkdir()
    assert job.wait() == 0, log.read_text()
    assert TagStore(tmp_path / "out").find().manifest["iter_num"] >= 10 and "the file STOP" in log.read_text()


def test_a_check_that_fails_is_reported_once_and_signals_still_count(start, tmp_path):
    """As psutil does with an OSError where too many files are open."""
    job, log = start(script=planted(tmp_path, """
from runtime.cluster import shutdown
def fails(process):
    raise OSError(24, "Too many open files")
shutdown.is_running, shutdown.is_launcher, shutdown.INTERVAL = fails, lambda process: True, 0.1
"""))
    seen = iterations(log)[-1]
    assert wait_until(lambda: iterations(log)[-1] > seen + 20)
    job.send_signal(signal.SIGTERM)
    assert job.wait() == 143, log.read_text()
    words = "rank 0: check_launchers failed (OSError: [Errno 24] Too many open files); trying again"
    assert log.read_text().count(words) == 1 and TagStore(tmp_path / "out").find().manifest["iter_num"] > seen


@pytest.mark.parametrize("launcher, ranks, name", [
    ("fork", 1, "SIGHUP"), ("fork", 2, "SIGUSR1"), long("launch_deepspeed.py", 2, "SIGHUP")])
def test_a_signal_saves_and_ends(start, tmp_path, launcher, ranks, name):
    job, log = start(launcher=launcher, ranks=ranks)
    number = getattr(signal, name)
    job.send_signal(number)
    assert job.wait() == 128 + number, log.read_text()
    assert f"stop requested ({EXIT_REASONS[128 + number]})" in log.read_text()
    assert log.read_text().count("to continue from here, repeat the command with --init_from=resume\n") == 1
    assert TagStore(tmp_path / "out").find().manifest["iter_num"] >= 10


def assert_outlives(send, job, log):
    seen = iterations(log)[-1]
    send()
    assert wait_until(lambda: iterations(log)[-1] > seen + 50 or job.poll() is not None) and job.poll() is None
    job.send_signal(signal.SIGTERM)
    assert job.wait() == 143, log.read_text()


def test_an_ignored_sighup_stays_ignored(start, tmp_path):
    """As nohup starts it."""
    job, log = start(script=planted(tmp_path, "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"))
    assert_outlives(lambda: job.send_signal(signal.SIGHUP), job, log)


@pytest.mark.long
def test_nohup_outlives_its_terminal(start):
    """SIGHUP to the whole process group, as a terminal that is closed sends it."""
    job, log = start(prefix=["nohup"], launcher="launch_deepspeed.py", ranks=2)
    assert_outlives(lambda: os.killpg(job.pid, signal.SIGHUP), job, log)


@pytest.mark.parametrize("plant, stderr", [
    ("ranks.all_gather_scalars = waits", "/dev/full"),
    ("def ends(code=0, shut_down=ranks.shut_down):\n  torch.distributed.barrier = waits\n  shut_down(code)\n"
     "ranks.shut_down = ends", "log")], ids=["its errors can't be printed", "in the last barrier"])
def test_a_rank_that_dies_leaves_nobody_waiting(characters, tmp_path, plant, stderr):
    """Without a launcher, which would end rank 0 too. NCCL waits for a dead rank; gloo would raise."""
    script = planted(tmp_path, f"""
import time, torch
from runtime.cluster import ranks
def waits(*args, **kwargs):
    while os.environ["RANK"] == "1":
        time.sleep(0.01)
        if os.path.exists({str(tmp_path / "waits")!r}):
            os._exit(7)
    open({str(tmp_path / "waits")!r}, "w").close()
    time.sleep(1000)
{plant}
""")
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [script, *SMALL, f"--dataset={characters}", f"--out_dir={tmp_path}/out"]
    ranks = [ForkedJob(command, 1, tmp_path / "log", tmp_path / stderr, {**env, "RANK": rank, "LOCAL_RANK": rank})
             for rank in "01"]
    try:
        assert ranks[1].wait() == 7 and ranks[0].wait() == 1
        assert stderr != "log" or "rank 0: rank 1 has died" in (tmp_path / "log").read_text()
    finally:
        for rank in ranks:
            kill(rank)


# Ranks that find a problem, hang, or can't be reached

SHORT_TIMEOUT = """
import datetime, time
from runtime.cluster import join
join.group_timeout = lambda: datetime.timedelta(seconds=2)
"""


@pytest.mark.parametrize("rank, place", [(0, "run_plan.find_start"), (1, "run_plan.find_start"), (1, "Engine.step")])
def test_a_problem_of_one_rank_is_printed_once_also_if_the_group_cannot_be_destroyed(train, rank, place):
    run = train(ranks=2, plant=f"""
import time, torch, runtime.plan.run_plan as run_plan
from runtime.cluster import ranks
from runtime.engine.engine import Engine
from runtime.errors import UserError
def fails(*args, **options):
    raise UserError("the hub is busy: try again")
if os.environ["RANK"] == "{rank}":
    {place} = fails
ranks.DESTROY_TIMEOUT_S, torch.distributed.destroy_process_group = 0.1, lambda: time.sleep(1000)
""")
    assert run.stderr.count("the hub is busy: try again\n") == 1 and run.returncode in (1, 2), run.stderr
    exact = (run.returncode, run.stdout, run.stderr.count("\n")) == (2, "", 1)
    assert "Traceback" not in run.stderr and (exact or place == "Engine.step")


def test_a_command_line_that_fails_on_one_rank_is_printed_once(train, tmp_path):
    (tmp_path / "own.py").write_text("import os\nmax_iters = 1 if os.environ['RANK'] == '0' else 'x'\n")
    run = train(tmp_path / "own.py", ranks=2)
    assert (run.returncode, run.stderr) == (2, f"{tmp_path}/own.py: max_iters takes int, not 'x'\n")


def test_a_rank_without_others_says_so(characters, tmp_path):
    job = ForkedJob([planted(tmp_path, SHORT_TIMEOUT), *SMALL, f"--dataset={characters}", f"--out_dir={tmp_path}/out"],
                    1, tmp_path / "log", tmp_path / "log", {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())})
    assert job.wait() == 2
    assert " could not join the other ranks within 0.0333333 minutes (" in (tmp_path / "log").read_text()


def test_every_group_has_the_timeout(train):
    run = done(train("--max_iters=1", ranks=2, plant=SHORT_TIMEOUT + """
import torch
from runtime.cluster import ranks
shut_down = ranks.shut_down
def ends(code=0):
    groups = torch.distributed.distributed_c10d._world.pg_map
    timeouts = [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]
    print("timeouts", len(timeouts), set(timeouts))
    shut_down(code)
ranks.shut_down = ends
"""))
    assert "timeouts 3 {2.0}" in run.stdout  # ours, the saver's, DeepSpeed's


def test_a_rank_that_hangs_ends_the_run_and_the_next_one_can_start(start, characters, tmp_path):
    job, log = start(script=planted(tmp_path, SHORT_TIMEOUT), ranks=2)
    os.kill(job.pids[1], signal.SIGSTOP)
    assert wait_until(lambda: not psutil.pid_exists(job.pids[0])), log.read_text()
    os.kill(job.pids[1], signal.SIGKILL)  # as a launcher does, after 30 s
    assert job.wait() == 1
    (line,) = [line for line in log.read_text().splitlines() if "another rank has exited, or has not resp" in line]
    assert line.startswith("rank 0 on ") and "Traceback" not in log.read_text()
    assert not any(map(psutil.pid_exists, job.pids))
    again = ForkedJob([ROOT / "train_deepspeed.py", *SMALL, f"--dataset={characters}", f"--out_dir={tmp_path}/out",
                       "--init_from=auto"], 1, log, log)
    assert again.wait() == 0, log.read_text()


@pytest.mark.long
def test_ranks_that_cannot_stop_end_soon_after_their_launcher(start, tmp_path):
    job, log = start(script=planted(tmp_path, "from runtime.cluster import shutdown; shutdown.LAUNCHER_GRACE_S = 1"),
                     ranks=2, launcher="launch_deepspeed.py")
    ranks = sorted(psutil.Process(job.pid).children(), key=lambda process: process.environ()["RANK"])
    ranks[1].suspend()  # so that rank 0 waits in a collective
    job.kill()
    gone, left = psutil.wait_procs(ranks, patience(200))
    for process in left:
        process.kill()
    assert not left and "rank 0: the launcher ended 1 s ago" in log.read_text()


def test_a_rank_may_write_longer_than_the_timeout(train):
    run = done(train("--max_iters=2", ranks=2, plant=SHORT_TIMEOUT + """
from runtime.checkpoint import tag_writer
digest = tag_writer.file_digest
def slow(*args, **options):
    time.sleep(3 * (os.environ["RANK"] == "1"))
    return digest(*args, **options)
tag_writer.file_digest = slow
"""))
    assert "saved iter_2 in" in run.stdout


def test_a_thread_of_gloo_that_releases_a_tensor_during_the_exit_does_not_abort_it(tmp_path):
    """Rank 1 exits while rank 0 does, which fails a collective of rank 0. Its thread then waits for the GIL, to release
    the tensor, until rank 0 tears down its modules."""
    (tmp_path / "rank.py").write_text(f"""
import atexit, sys, time
sys.path.insert(0, {str(ROOT)!r})
import torch
import torch.distributed as dist
from runtime.cluster.join import join_process_group
from runtime.cluster.ranks import RANK, ranks_from_environment, shut_down
def keep_the_gil():
    sys.setswitchinterval(1000)
    end = time.monotonic() + 3
    while time.monotonic() < end:
        pass
def destroy_later(destroy=dist.destroy_process_group):
    time.sleep(1)
    destroy()
ranks_from_environment()
join_process_group("cpu")
kept = dist.new_group()  # as DeepSpeed keeps its groups
if RANK == 0:
    atexit.register(keep_the_gil)
    dist.all_reduce(torch.zeros(2), group=kept, async_op=True)
else:
    dist.destroy_process_group = destroy_later
shut_down()
""")
    done(launch(tmp_path / "rank.py", ranks=2, launcher="torchrun"))
