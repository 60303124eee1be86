"""Another user of this machine connects to every port of a run, reads and sets what it can there."""

import contextlib
import datetime
import encodings.idna  # noqa: F401  # nobody may not be able to import it later
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
import traceback

import psutil
import pytest
import torch.distributed as dist
from conftest import ROOT, SMALL, Payload, free_port, kill, read_history, wait_until

NOBODY = 65534
# The attacker has to be another user, and only root can become one. CI runs as root
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
LAUNCH = [sys.executable, ROOT / "launch_deepspeed.py", "--nproc_per_node=2"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
DEEPSPEED = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus=2"]
TRAIN = ROOT / "train_deepspeed.py"
ENDLESS = [*SMALL, "--max_iters=1000000", "--eval_interval=1000000", "--compile=False"]


def long(name, command):
    return pytest.param(command, marks=pytest.mark.long, id=name)


def of_user(command):
    """A launcher that the user has typed, on a port of its own."""
    return [*command, f"--master_port={free_port()}", TRAIN]


@pytest.fixture
def endless(characters, tmp_path):
    """endless(command) starts a run that doesn't end by itself, and waits for its 2nd iteration."""
    jobs = []

    def start(command):
        words = [*command, *ENDLESS, f"--dataset={characters}", f"--out_dir={tmp_path}/out"]
        with open(tmp_path / "log", "w") as log:
            job = subprocess.Popen(
                [*map(str, words)], cwd=tmp_path, stdout=log, stderr=log, start_new_session=True
            )
        jobs.append(job)
        wait_until(lambda: job.poll() is not None or iteration(tmp_path) >= 2)
        assert job.poll() is None, (tmp_path / "log").read_text()
        return job

    yield start
    for job in jobs:
        processes = psutil.Process(job.pid).children(recursive=True)
        kill(job)
        for process in processes:  # ranks lead process groups of their own
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def iteration(folder):
    return max([record["iter"] for record in read_history(folder / "out")], default=0)


def listening(pid):
    """The addresses at which a process and its descendants listen, {(host, port)}."""
    parent = psutil.Process(pid)
    addresses = set()
    for process in [parent, *parent.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    addresses.add(tuple(connection.laddr))
    return addresses


def attack(ports, payload):
    """Send bytes to all ports. Where a store answers, set its keys; the rendezvous state to a pickle."""
    for port in ports:
        for garbage in (b"\0" * 8, os.urandom(4096)):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 2) as s:
                s.sendall(garbage)

    # A client of a port that isn't a store's waits for ever
    threads = [threading.Thread(target=set_keys, args=(port, payload), daemon=True) for port in ports]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 5
    for thread in threads:
        thread.join(max(0, deadline - time.monotonic()))


def set_keys(port, payload):
    with contextlib.suppress(RuntimeError):
        timeout = datetime.timedelta(seconds=2)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
        for key in store.list_keys():
            is_pickle = key.startswith("torch.rendezvous.")
            store.set(key, payload if is_pickle else b"garbage")


def as_nobody(function, *args):
    """Call a function in a process of another user."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            function(*args)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@needs_root
@pytest.mark.parametrize(
    "command",
    [
        pytest.param([*LAUNCH, "--standalone", TRAIN], id="launch_deepspeed.py"),
        long("launch_deepspeed.py of one rank", [*LAUNCH[:2], "--nproc_per_node=1", TRAIN]),
        long("without a launcher", [sys.executable, TRAIN]),
        long("run_deepspeed_xl.sh", [ROOT / "run_deepspeed_xl.sh"]),
        long("deepspeed", of_user(DEEPSPEED)),
    ],
)
def test_no_other_user_reaches_a_run(endless, tmp_path, monkeypatch, command):
    monkeypatch.setenv("PYTHON", sys.executable)
    job = endless(command)
    addresses = listening(job.pid)
    assert addresses, "gloo listens, at least"
    assert {host for host, _ in addresses} <= {"127.0.0.1", "::1"}

    # The mark could be left by nobody's process, too
    os.chmod(tmp_path, 0o700)
    payload = pickle.dumps(Payload(tmp_path / "mark"))
    as_nobody(attack, [port for _, port in addresses], payload)
    before = iteration(tmp_path)
    wait_until(lambda: job.poll() is not None or iteration(tmp_path) >= before + 100)
    assert iteration(tmp_path) >= before + 100, (tmp_path / "log").read_text()
    assert not (tmp_path / "mark").exists()


@needs_root
@pytest.mark.long
def test_bench_listens_on_the_loopback_only(characters, tmp_path):
    command = [sys.executable, ROOT / "bench.py", "--gpus=2", f"--json={tmp_path}/bench.json"]
    command += ["--warmup=100000", *SMALL, "--compile=False", f"--dataset={characters}"]
    job = subprocess.Popen([*map(str, command)], cwd=tmp_path, start_new_session=True)
    try:
        wait_until(lambda: job.poll() is not None or len(listening(job.pid)) >= 2)
        addresses = listening(job.pid)
        assert len(addresses) >= 2
        assert {host for host, _ in addresses} <= {"127.0.0.1", "::1"}
    finally:
        job.terminate()
        job.wait()


@needs_root
@pytest.mark.long
def test_a_torchrun_that_the_user_has_typed_has_ranks_that_nobody_reaches(endless, tmp_path):
    """torchrun itself listens everywhere. Its ranks don't, and what is in its store is no pickle."""
    job = endless(of_user(TORCHRUN))
    ranks = psutil.Process(job.pid).children()
    for rank in ranks:
        assert {host for host, _ in listening(rank.pid)} <= {"127.0.0.1", "::1"}
    os.chmod(tmp_path, 0o700)
    payload = pickle.dumps(Payload(tmp_path / "mark"))
    as_nobody(attack, [port for _, port in listening(job.pid)], payload)
    before = iteration(tmp_path)
    wait_until(lambda: job.poll() is not None or iteration(tmp_path) >= before + 100)
    assert iteration(tmp_path) >= before + 100, (tmp_path / "log").read_text()
    assert not (tmp_path / "mark").exists()
