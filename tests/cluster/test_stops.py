"""A stop is asked for in the middle of an evaluation, a sample, the start-up or a preparation."""

import os
import signal
import subprocess
import sys

import pytest
from conftest import (
    EIGHT,
    ROOT,
    SMALL,
    ForkedJob,
    done,
    free_port,
    kill,
    planted,
    read_history,
    stage,
    wait_until,
)

from runtime.checkpoint.tags import TagStore
from runtime.cluster import shutdown
from runtime.cluster.launchers import adopt_ranks, first_host, launchers_apart, tasks_per_node
from runtime.cluster.requests import STOP_REASONS, StopFile
from runtime.cluster.shutdown import StopCheck

# A run of the fixture `whole`, in which the evaluation after step 4 takes minutes
SLOW_EVALUATION = """
import time
from runtime.engine.engine import Engine
evaluate = Engine.evaluate
def slow(self, x, y):
    if self.steps == 4:
        if os.environ.get("RANK", "0") == "0":
            open("{mark}", "w").close()
        time.sleep(10_000 if self.waits else 0.05)
        self.waits = False
    return evaluate(self, x, y)
Engine.evaluate, Engine.waits = slow, {waits}
"""
# Many batches, so that an evaluation can end between two of them
MANY = (*EIGHT, "--eval_iters=400")


@pytest.fixture
def start(characters, tmp_path):
    """start(plant, *args, ranks=, **env) -> (job, its log); none of the jobs outlives the test."""
    jobs = []

    def started(plant, *args, ranks=1, **env):
        log = tmp_path / "log"
        log.touch()
        command = [planted(tmp_path, plant), *SMALL, f"--dataset={characters}", f"--out_dir={tmp_path}/out", *args]
        jobs.append(ForkedJob(command, ranks, log, log, env))
        return jobs[-1], log

    yield started
    for job in jobs:
        kill(job)


def evaluations(out_dir):
    """{iteration: (train_loss, val_loss)}, and no iteration twice."""
    records = [record for record in read_history(out_dir) if "val_loss" in record]
    found = {record["iter"]: (record["train_loss"], record["val_loss"]) for record in records}
    assert len(found) == len(records)
    return found


@pytest.mark.parametrize("n", [2, 3])
def test_a_stop_in_an_evaluation_saves_and_the_resume_makes_it_up(start, train, tmp_path, n):
    """The signal reaches rank 1 alone. The evaluation would take 200 batches x 0.05 s x 2 splits more."""
    uninterrupted = done(train(*MANY, stage(n), ranks=2))
    plant = SLOW_EVALUATION.format(mark=tmp_path / "mark", waits=False)
    job, log = start(plant, *MANY, stage(n), "--always_save_checkpoint=False", ranks=2)
    assert wait_until((tmp_path / "mark").exists), log.read_text()
    os.kill(job.pids[1], signal.SIGTERM)
    assert job.wait() == 143, log.read_text()

    out_dir = tmp_path / "out"
    lines = log.read_text().splitlines()
    assert f"stop requested ({STOP_REASONS[143]})" in lines
    assert "step 4: the evaluation is not finished" in lines
    assert "exiting after step 4" in lines
    manifest = TagStore(out_dir).find("latest").manifest
    assert manifest["iter_num"] == 4 and manifest["state"]["evaluation_is_due"]
    assert list(evaluations(out_dir)) == [0, 2]

    resumed = done(train(*MANY, stage(n), "--init_from=resume", ranks=2, out_dir=out_dir))
    assert evaluations(out_dir) == uninterrupted.evals and list(uninterrupted.evals) == [0, 2, 4, 6, 8]
    assert resumed.losses == uninterrupted.losses
    for name in ("best", "final"):
        expected = TagStore(uninterrupted.out_dir).find(name).manifest["state"]
        got = TagStore(out_dir).find(name).manifest["state"]
        for key in ("iter_num", "best_val_loss", "evals_since_best", "improved"):
            assert got[key] == expected[key], (name, key)


# Rank 1 gets a signal at the end of the evaluation after step 4, and waits until it has seen it
SIGNAL_AFTER_EVALUATION = """
import signal, threading
from runtime.cluster.shutdown import Shutdown
from runtime.monitor.runlog import RunLog
seen = threading.Event()
def on_signal(self, number, on_signal=Shutdown.on_signal):
    on_signal(self, number)
    seen.set()
def evaluation(self, iter_num, *args, evaluation=RunLog.evaluation):
    if iter_num == 4 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGTERM)
        seen.wait()
    return evaluation(self, iter_num, *args)
Shutdown.on_signal = on_signal
RunLog.evaluation = evaluation
"""


def test_a_stop_after_an_evaluation_that_saved_nothing_saves(train):
    """Nothing is learned, so only the evaluation after step 2 is the best one, and saves."""
    args = ("--learning_rate=0", "--decay_lr=False", "--always_save_checkpoint=False", "--max_iters=9")
    run = train(*args, ranks=2, plant=SIGNAL_AFTER_EVALUATION)
    assert run.returncode == 143, run.stdout + run.stderr
    assert list(run.evals) == [0, 2, 4] and list(run.losses) == [1, 2, 3, 4]
    store = TagStore(run.out_dir)
    assert store.list() == ["iter_2", "iter_4", "best"]
    state = store.find("iter_4").manifest["state"]
    assert not state["improved"] and not state["evaluation_is_due"] and state["evals_since_best"] == 1
    assert store.find("best").manifest["iter_num"] == 2


def test_a_stop_in_the_last_evaluation_is_made_up_too(start, train, tmp_path):
    """Without the made-up evaluation, the run would have no final tag."""
    four = ("--max_iters=4", "--eval_iters=400")
    plant = SLOW_EVALUATION.format(mark=tmp_path / "mark", waits=False)
    job, log = start(plant, *four)
    assert wait_until((tmp_path / "mark").exists), log.read_text()
    job.send_signal(signal.SIGINT)
    assert job.wait() == 130, log.read_text()
    assert "final" not in TagStore(tmp_path / "out").list()

    run = done(train(*four, "--init_from=resume", out_dir=tmp_path / "out"))
    assert list(evaluations(tmp_path / "out")) == [0, 2, 4]
    assert "iterations already" not in run.stdout and "best validation loss" in run.stdout
    assert TagStore(tmp_path / "out").find("final").manifest["iter_num"] == 4


def test_a_stop_is_announced_while_the_main_thread_waits(start, tmp_path):
    """The first batch of the evaluation takes hours: the line comes before its end."""
    job, log = start(SLOW_EVALUATION.format(mark=tmp_path / "mark", waits=True))
    assert wait_until((tmp_path / "mark").exists), log.read_text()
    job.send_signal(signal.SIGTERM)
    assert wait_until(lambda: "stop requested (SIGTERM" in log.read_text()), log.read_text()
    assert "not finished" not in log.read_text()


def test_a_stop_in_a_sample_saves(start, tmp_path):
    plant = f"""
import time
from model import GPT
generate = GPT.generate
def slow(self, *args, on_token=None, **options):
    def wait(token):
        open({str(tmp_path / "mark")!r}, "w").close()
        time.sleep(0.2)
        on_token(token)
    return generate(self, *args, on_token=wait, **options)
GPT.generate = slow
"""
    job, log = start(plant, "--sample_interval=1", "--sample_tokens=31", ranks=2)
    assert wait_until((tmp_path / "mark").exists), log.read_text()
    job.send_signal(signal.SIGUSR1)
    assert job.wait() == 138, log.read_text()
    assert "sample at step" not in log.read_text() and "exiting after step 1" in log.read_text()
    assert TagStore(tmp_path / "out").find().manifest["iter_num"] == 1


# A run that waits, in its start-up, for the file GO
WAITS = """
import time
import {module} as module
wrapped = module.{name}
def waits(*args, **options):
    if os.environ.get("RANK", "0") == "0":  # which looks for the file STOP
        open({mark!r}, "w").close()
    while not os.path.exists({go!r}):
        time.sleep(0.01)
    return wrapped(*args, **options)
module.{name} = waits
"""

# In the last, DeepSpeed's own prints are dropped
STARTS = [("runtime.plan.run_plan", "find_start"), ("runtime.engine.setup", "initialize"), ("deepspeed", "initialize")]


@pytest.mark.parametrize("module, name", STARTS)
@pytest.mark.parametrize("signal_name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"])
def test_a_signal_before_the_first_step_ends_the_run_with_one_line(start, tmp_path, module, name, signal_name):
    mark, go = str(tmp_path / "mark"), str(tmp_path / "go")
    job, log = start(WAITS.format(module=module, name=name, mark=mark, go=go))
    assert wait_until(lambda: os.path.exists(mark)), log.read_text()
    number = getattr(signal, signal_name)
    job.send_signal(number)
    assert job.wait() == 128 + number
    line = f"stop requested ({STOP_REASONS[128 + number]}): no step has been made, so nothing is saved"
    assert log.read_text().splitlines()[-1] == line
    assert "Traceback" not in log.read_text() and not TagStore(tmp_path / "out").list()


def test_a_stop_file_made_during_the_start_ends_the_run_on_all_ranks(start, tmp_path):
    mark, go = str(tmp_path / "mark"), str(tmp_path / "go")
    job, log = start(WAITS.format(module="runtime.plan.run_plan", name="find_start", mark=mark, go=go), ranks=2)
    assert wait_until(lambda: os.path.exists(mark)), log.read_text()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "STOP").touch()
    open(go, "w").close()
    assert job.wait() == 0, log.read_text()
    assert "exiting: no step has been made, so nothing is saved\n" in log.read_text()
    assert "iter 1:" not in log.read_text() and not (tmp_path / "out" / "STOP").exists()


def test_a_stop_file_of_an_earlier_run_is_removed(train, tmp_path):
    (tmp_path / "STOP").touch()
    assert list(done(train(out_dir=tmp_path)).losses) == [1, 2, 3, 4]
    assert not (tmp_path / "STOP").exists()


def test_a_stop_file_that_is_touched_again_counts(tmp_path):
    path = tmp_path / "STOP"
    path.touch()
    os.utime(path, ns=(1, 1))
    stop_file = StopFile(str(path))
    assert not stop_file.has_appeared()
    path.touch()
    assert stop_file.has_appeared()
    stop_file.remove_earlier()
    assert path.exists()  # it is no earlier one
    stop_file.remove()
    assert not stop_file.has_appeared()


def test_ranks_ask_at_the_same_batches_twice_a_second(process_group, monkeypatch):
    """Batches of 0.1 s: after the 1st, then after each 5th."""
    clock = [0.0]
    monkeypatch.setattr(shutdown.time, "monotonic", lambda: clock[0])
    asked = []

    class Asked:
        def agree(self, seconds):
            asked.append(round(clock[0] / 0.1))
            return None, max(seconds, 0.1)

    check = StopCheck(Asked())
    for _ in range(31):
        clock[0] += 0.1
        assert not check.is_requested()
    assert asked == [1, 6, 11, 16, 21, 26, 31]


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)])
def test_a_stopped_preparation_leaves_the_dataset_alone(tmp_path, number, code):
    """It waits for text on its standard input."""
    command = [sys.executable, ROOT / "data" / "prepare.py", "-", f"--name={tmp_path}/data", "--tokenizer=char"]
    job = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert job.stdout.readline().startswith("1 file, ")
        job.send_signal(number)
        _, stderr = job.communicate()
    finally:
        job.kill()
    assert (job.returncode, stderr) == (code, "interrupted; no dataset was changed\n")
    assert not list(tmp_path.glob("data/*.bin"))


# Who waits for whom


def test_a_rank_that_waits_says_for_whom_and_why(start, tmp_path):
    """Of the variables of an earlier run, in a shell. Ctrl-C then ends it, although it waits."""
    plant = "from runtime.cluster import late; late.NOTICE_S = 0.5"
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": "3",
           "MASTER_PORT": str(free_port())}
    job, log = start(plant, **env)
    assert wait_until(lambda: "\n" in log.read_text() or job.poll() is not None)
    assert log.read_text() == (
        "rank 0 has waited 0.5 s for ranks 1, 2, of 3 ranks; RANK=0 and WORLD_SIZE=3 are in this shell's environment: "
        "if you want one process, run unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT\n")
    job.send_signal(signal.SIGINT)
    assert job.wait() == 130


def test_a_rank_without_its_rank_0_says_so(start):
    """It connects to a store that nobody has opened."""
    plant = "from runtime.cluster import late; late.NOTICE_S = 0.5"
    port = str(free_port())
    env = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    job, log = start(plant, **env)
    assert wait_until(lambda: "rank 1 has waited" in log.read_text() or job.poll() is not None)
    assert f"rank 1 has waited 0.5 s for rank 0 at 127.0.0.1:{port}, of 2 ranks; " in log.read_text()


# srun, mpirun


OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
HYDRA = {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {"SLURM_STEP_NUM_TASKS": "5", "SLURM_PROCID": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "2",
         "SLURM_STEP_TASKS_PER_NODE": "2(x2),1", "SLURM_STEP_NODELIST": "gpu[08-09,11]"}


@pytest.mark.parametrize("environ, expected", [
    (OPEN_MPI, "3 1 4 2 None"), (HYDRA, "1 1 2 2 127.0.0.1"), (SLURM, "4 0 5 1 gpu08"),
    (SLURM | OPEN_MPI, "3 1 4 2 None"),  # mpirun has started its daemons by srun
    (SLURM | {"PMI_SIZE": "5", "PMI_RANK": "4"}, "4 0 5 1 gpu08"),  # srun --mpi=pmi2
    (SLURM | {"MASTER_ADDR": "own"}, "4 0 5 1 own"),
    (SLURM | {"WORLD_SIZE": "5"}, "4 0 5 1 gpu08"),
    (SLURM | {"RANK": "7", "WORLD_SIZE": "9"}, "7 None 9 None None"),  # of torchrun, started by srun
    (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, "None None None None None"),
    (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "many"}, "None None None None None"),
    ({"PMI_SIZE": "2", "PMI_RANK": "1"}, "None None None None None")])
def test_variables_of_other_launchers_become_torchruns(environ, expected):
    environ = dict(environ)
    adopt_ranks(environ)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    assert " ".join(str(environ.get(name)) for name in names) == expected
    assert ("MASTER_PORT" in environ) == (expected.split()[3] != "None")


TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "1"}
DEEPSPEED = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1", "CROSS_SIZE": "1"}


@pytest.mark.parametrize("environ, size", [
    (TORCHRUN | OPEN_MPI, "OMPI_COMM_WORLD_SIZE=4"), (DEEPSPEED | HYDRA, "PMI_SIZE=2"),
    (TORCHRUN | SLURM, "SLURM_STEP_NUM_TASKS=5"),
    (TORCHRUN | SLURM | {"GROUP_WORLD_SIZE": "4"}, "SLURM_STEP_NUM_TASKS=5"),
    (TORCHRUN | SLURM | {"GROUP_WORLD_SIZE": "5"}, None),  # one for each node
    (TORCHRUN | {"OMPI_COMM_WORLD_SIZE": "1"}, None), (TORCHRUN, None), (DEEPSPEED, None),
    ({"RANK": "3", "WORLD_SIZE": "4"} | OPEN_MPI, None)])  # set by hand
def test_launchers_that_know_nothing_of_each_other(environ, size):
    sentence = launchers_apart(environ)
    assert sentence is None if size is None else sentence.startswith(f"{size} in the environment: ")


def test_a_torchrun_for_each_task_of_mpirun_is_refused(start, tmp_path):
    """`mpirun -np 4 torchrun --nproc_per_node=1 train_deepspeed.py` would train four times, each in the same folder."""
    job, log = start("", **TORCHRUN, **OPEN_MPI, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    assert job.wait() == 2
    sentence = log.read_text()
    assert sentence.startswith("OMPI_COMM_WORLD_SIZE=4 in the environment: Open MPI's mpirun has started 4 of this ")
    assert sentence.endswith("or if you want 4 runs, run unset OMPI_COMM_WORLD_SIZE\n")
    assert sentence.count("\n") == 1 and not (tmp_path / "out").exists()


def test_lists_of_slurm():
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1] and tasks_per_node("4") == [4] and tasks_per_node("a") == []
    assert [first_host(text) for text in ("node[1-4,7]", "a,b", "n[08]-ib,x", "")] == ["node1", "a", "n08-ib", ""]


@pytest.mark.parametrize("variables", [
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")])
def test_two_ranks_of_other_launchers_train_together(characters, tmp_path, train, variables):
    """Their parent here is no mpirun, as in a script that mpirun starts. The losses are those of torchrun's ranks."""
    command = [ROOT / "train_deepspeed.py", *SMALL, f"--dataset={characters}", f"--out_dir={tmp_path}/out"]
    port = str(free_port())
    jobs = []
    for rank in "01":
        env = dict(zip(variables, ("2", rank, rank, "2"), strict=True))
        env |= {"SLURM_NODEID": "0", "MASTER_PORT": port}
        jobs.append(ForkedJob(command, 1, tmp_path / f"log{rank}", tmp_path / f"log{rank}", env))
    try:
        assert [job.wait() for job in jobs] == [0, 0], (tmp_path / "log0").read_text()
    finally:
        for job in jobs:
            kill(job)
    expected = done(train(ranks=2)).losses
    assert {r["iter"]: r["loss"] for r in read_history(tmp_path / "out") if "loss" in r} == expected


def test_processes_that_do_not_know_their_rank_are_refused(start, tmp_path):
    job, log = start("", PMI_SIZE="2", PMI_RANK="1")
    assert job.wait() == 2
    assert log.read_text().startswith("PMI_SIZE=2 in the environment: MPICH's mpiexec has started several processes,")
    assert log.read_text().count("\n") == 1 and not (tmp_path / "out").exists()
