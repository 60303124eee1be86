"""Two nodes on one machine: network, process and mount namespaces of their own, on a switch with plugs."""

import itertools
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import psutil
import pytest
from conftest import ROOT, SMALL, free_port, planted, read_history, wait_until, write_characters

from runtime.checkpoint.tags import TagStore
from runtime.cluster.nodes import mismatches
from runtime.cluster.ranks import merge_problems

ADDRESSES = ("10.77.0.1", "10.77.0.2")
TIMEOUT = """
import datetime
from runtime.cluster import join
join.group_timeout = lambda: datetime.timedelta(seconds=6)
"""
LONG = ("--max_iters=100000", "--lr_decay_iters=1000", "--eval_interval=5")


# What the kernel says where it allows or knows no namespaces, bridges or veth; any other word is a fault of ours
REFUSALS = ("not permitted", "Permission denied", "not supported", "Unknown device type")


def skip_if_refused(words):
    """The only place where these tests are skipped for what was tried: nothing of the project has run by then."""
    if any(refusal in words for refusal in REFUSALS):
        pytest.skip(f"namespaces are not allowed here: {words.strip()}")


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def net(tmp_path_factory):
    """unplug(number) and plug(number) of hosts 1 and 2, and run(number, command, **how) -> Popen on one of them."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare"))):
        # Only root may make hosts, and only with these tools; without them there is no second host to test with
        pytest.skip("two hosts need root, ip (iproute2) and unshare (util-linux)")
    folder, mark = tmp_path_factory.mktemp("net"), f"{os.getpid()}"
    switch, hosts = f"switch{mark}", [f"host{number}-{mark}" for number in (1, 2)]
    names = [f"{address} host{number}" for number, address in enumerate(ADDRESSES, 1)]
    (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
    (folder / "resolv.conf").touch()
    jobs, numbers = [], itertools.count()

    def run(number, command, before="true", **env):
        set_up = (f"hostname host{number} && mount --bind {folder}/hosts /etc/hosts && "
                  f"mount --bind {folder}/resolv.conf /etc/resolv.conf && {before} && exec \"$@\"")
        space = ["ip", "netns", "exec", hosts[number - 1], "unshare", "--uts", "--mount", "--pid", "--fork",
                 "--mount-proc", "--kill-child", "sh", "-c", set_up, "sh"]
        log = folder / f"log{next(numbers)}"
        with open(log, "w") as words:
            job = subprocess.Popen([*space, *map(str, command)], stdout=words, stderr=subprocess.STDOUT, cwd=ROOT,
                                   env={**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR", **env}, start_new_session=True)
        job.said = log.read_text
        jobs.append(job)
        return job

    try:
        try:
            for name in (switch, *hosts):
                ip("netns", "add", name)
                ip("-n", name, "link", "set", "lo", "up")
            ip("-n", switch, "link", "add", "bridge", "type", "bridge")
            ip("-n", switch, "link", "set", "bridge", "up")
            for number, (name, address) in enumerate(zip(hosts, ADDRESSES), 1):
                ip("-n", switch, "link", "add", f"port{number}", "type", "veth", "peer", "name", "eth0", "netns", name)
                ip("-n", switch, "link", "set", f"port{number}", "master", "bridge", "up")
                ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
                ip("-n", name, "link", "set", "eth0", "up")
            probe = run(1, ["true"])
            if probe.wait():
                skip_if_refused(probe.said())
                pytest.fail(f"host 1 does not run: {probe.said()}")
        except subprocess.CalledProcessError as error:
            skip_if_refused(error.stderr)
            raise
        yield SimpleNamespace(run=run, plug=lambda n: ip("-n", switch, "link", "set", f"port{n}", "master", "bridge"),
                              unplug=lambda n: ip("-n", switch, "link", "set", f"port{n}", "nomaster"))
    finally:
        for job in jobs:
            job.kill()  # and with it all in its process namespace
            job.wait()
        for name in (switch, *hosts):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.fixture
def train(net, characters, tmp_path):
    """train(*args, on={2: [...]}, before={2: "..."}) starts 2 ranks on each host -> the hosts' jobs."""

    def start(*args, on=None, before=None, ranks=2, script="train_deepspeed.py"):
        port, jobs = free_port(), []
        for number in (1, 2):
            own = (on or {}).get(number, [])
            command = [sys.executable, ROOT / "launch_deepspeed.py", "--nnodes=2",
                       f"--nproc_per_node={ranks}", f"--node_rank={number - 1}", f"--master_addr={ADDRESSES[0]}",
                       f"--master_port={port}", script, *SMALL, f"--dataset={characters}",
                       f"--out_dir={tmp_path}/out", *args, *own]
            jobs.append(net.run(number, command, before=(before or {}).get(number, "true")))
        return jobs

    return start


def wait_for(condition, jobs):
    assert wait_until(condition), "\n".join(job.said()[-3000:] for job in jobs)


def ended(jobs):
    """The exit codes."""
    wait_for(lambda: all(job.poll() is not None for job in jobs), jobs)
    return [job.returncode for job in jobs]


def under_way(jobs):
    wait_for(lambda: "saved iter_5 in" in jobs[0].said(), jobs)


def process(job, rank=None):
    """The launcher on this host, or one of its ranks, as this machine sees them."""
    launcher = psutil.Process(job.pid).children()[0]
    return launcher if rank is None else next(p for p in launcher.children() if p.environ().get("RANK") == str(rank))


@pytest.mark.long
def test_a_node_is_disconnected_and_the_other_continues(net, train, characters, tmp_path):
    jobs = train(*LONG, script=planted(tmp_path, TIMEOUT))
    under_way(jobs)
    net.unplug(2)  # nothing arrives any more, and no end either
    try:
        assert ended(jobs) == [1, 1]
    finally:
        net.plug(2)
    for number, job in enumerate(jobs, 1):
        assert f"on host{number}: another rank has exited, or has not responded for 0.1 min (" in job.said()
    last = TagStore(tmp_path / "out").find().manifest["iter_num"]
    alone = net.run(1, [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "train_deepspeed.py",
                        *SMALL, *LONG, f"--dataset={characters}", f"--out_dir={tmp_path}/out", "--init_from=auto",
                        f"--max_iters={last + 5}"])
    assert ended([alone]) == [0], alone.said()
    assert f"resuming from {tmp_path}/out/iter_{last}, " in alone.said() and "4 ranks" in alone.said()
    iters = [r["iter"] for r in read_history(tmp_path / "out") if "loss" in r]
    assert iters == list(range(1, last + 6))


@pytest.mark.long
def test_a_node_that_gets_sigterm_stops_the_other_too(train, tmp_path):
    jobs = train(*LONG)
    under_way(jobs)
    process(jobs[1]).terminate()
    assert ended(jobs) == [143, 143]
    last = [int(line.split(":")[0][5:]) for line in jobs[0].said().splitlines() if line.startswith("iter ")][-1]
    assert TagStore(tmp_path / "out").find().manifest["iter_num"] == last >= 5


@pytest.mark.long
def test_a_rank_that_dies_ends_the_other_node_too(train):
    jobs = train(*LONG)
    under_way(jobs)
    process(jobs[1], rank=3).kill()
    assert ended(jobs)[0] == 1  # the other one's is that of the first rank that its launcher sees exit
    told = [line for line in jobs[0].said().splitlines() if "on host1: another rank has exited" in line]
    assert told and "Traceback" not in jobs[0].said(), jobs[0].said()


@pytest.mark.long
def test_nodes_that_differ_are_refused(train, characters, tmp_path):
    write_characters(tmp_path / "other", seed=1)
    cases = [
        (dict(on={2: ["--learning_rate=2e-3"]}, before={2: f"mount --bind {tmp_path}/other {characters}; "
                                                        "mount --bind ds_config_zero3.json ds_config_zero2.json"}),
         r"the nodes differ in learning_rate \(0\.001 on host1, 0\.002 on host2\): make it the same on all",
         r"""the nodes differ in the DeepSpeed JSON's zero_optimization \('{.*"stage": 2}' on host1, '{"stage": 3}'""",
         r"the nodes differ in the hash of dataset \S+ \('\w{12}' on host1, '\w{12}' on host2\): "),
        (dict(before={2: f"mount -t tmpfs none {tmp_path}"}),
         r"out_dir=\S+/out is not the same folder on host1 and host2: choose one that all nodes share "),
        (dict(before={2: f"mount -t tmpfs none {characters}"}), r"host2: .*/train\.bin does not exist: ")]

    def refused(case):
        how, *sentences = case
        jobs = train("--max_iters=1", ranks=1, **how)
        assert ended(jobs) == [2, 2]
        for job in jobs:
            words = [line for line in job.said().splitlines() if not re.match(r"$|node |[WE]\d{4} ", line)]
            assert len(words) == len(sentences) and all(map(re.match, sentences, words)), job.said()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(refused, cases))
    assert not (tmp_path / "out").exists() and [p.name for p in tmp_path.iterdir()] == ["other"]


@pytest.mark.long
def test_deepspeeds_launcher_with_a_hostfile(net, characters, tmp_path):
    (tmp_path / "hostfile").write_text("host1 slots=2\nhost2 slots=2\n")
    port = free_port()
    jobs = [net.run(number, [sys.executable, "-m", "deepspeed.launcher.runner", f"--hostfile={tmp_path}/hostfile",
                             "--no_ssh", f"--node_rank={number - 1}", "--master_addr=host1", f"--master_port={port}",
                             "train_deepspeed.py", *SMALL, f"--dataset={characters}", f"--out_dir={tmp_path}/out"])
            for number in (1, 2)]
    assert ended(jobs) == [0, 0], jobs[0].said() + jobs[1].said()
    assert "batch      2 x 4 x 2 = 16 sequences" in jobs[0].said()
    assert TagStore(tmp_path / "out").find("final").manifest["world_size"] == 4


def test_the_differences_between_ranks():
    """Needs no namespaces."""
    hosts = ("a", "a", "b", "c")
    assert merge_problems([*zip(hosts, (["x"], ["x"], ["x", "y"], ["x"]))]) == ["x", "b: y"]
    assert merge_problems([("a", []), ("a", ["x"])]) == ["x"]  # a problem of one rank on the only node
    facts = [{"torch": "2"} | ({"seed": seed} if seed else {}) for seed in (0, 0, 0, 2)]
    assert mismatches(hosts, facts) == ["the nodes differ in seed (None on a and b, 2 on c): make it the same on all"]
    assert mismatches(("a", "a"), facts[2:]) == ["the ranks differ in seed (None on rank 0, 2 on rank 1): make it the "
                                                 "same on all"]


# examples/slurm/train_xl.sbatch, with programs that stand for Slurm's


PASSED = 'while [ "$1" != torchrun ]; do shift; done; echo "$@"'  # what srun's command gets
OPTIONS = 'while [ "$1" != bash ]; do echo "$1"; shift; done'  # what srun itself gets


def submit(folder, srun, *args, **env):
    """Run the job's script, with what `srun` and scontrol do."""
    for name, does in (("scontrol", f'echo "$@" >>{folder}/calls; echo node1'), ("srun", srun)):
        (folder / name).write_text(f"#!/bin/sh\n{does}\n")
        (folder / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHON": sys.executable, "SLURM_JOB_ID": "7",
           "SLURM_JOB_NODELIST": "node1", "SLURM_NNODES": "4", "SLURM_GPUS_ON_NODE": "8", "SLURM_CPUS_PER_TASK": "2",
           **env}
    env = {name: value for name, value in env.items() if value is not None}  # None: not set
    return subprocess.run(["bash", "examples/slurm/train_xl.sbatch", *args], cwd=ROOT, env=env, capture_output=True,
                          text=True)


@pytest.mark.parametrize("code, restarts, most, requeued", [
    (138, 29, None, True), (138, 30, None, False), (138, None, 0, False), (1, 0, None, False)])
def test_a_job_queues_again_but_not_for_ever(tmp_path, code, restarts, most, requeued):
    job = submit(tmp_path, f"exit {code}", **{name: str(value) for name, value in (
        ("SLURM_RESTART_COUNT", restarts), ("MAX_RESTARTS", most)) if value is not None})
    assert (job.returncode, job.stderr) == (code, "")
    assert ("requeue 7" in (tmp_path / "calls").read_text().splitlines()) is requeued
    if code != 1:
        (line,) = job.stdout.splitlines()[:1]
        assert line.startswith(f"train_xl.sbatch: exit code {code}" + (
            ": requeuing the job" if requeued else f" after {restarts or 0} restarts: if it made progress"))
        assert requeued or "MAX_RESTARTS=" in line


@pytest.mark.parametrize("given, passed", [
    ([], "config/train_gpt2_xl.py --gradient_accumulation_steps=2"),
    (["--max_iters=5"], "config/train_gpt2_xl.py --gradient_accumulation_steps=2 --max_iters=5"),
    (["--seed=1", "config/train_gpt2.py"], "--seed=1 config/train_gpt2.py"),
    (["config/train_gpt2.py", "--max_iters=5"], "config/train_gpt2.py --max_iters=5")])
def test_a_jobs_own_config_replaces_the_default(tmp_path, given, passed):
    job = submit(tmp_path, PASSED, *given)
    assert job.stdout == f"torchrun {passed} --init_from=auto\n", job.stderr


def test_a_job_has_512_sequences_per_step_on_any_nodes(tmp_path):
    assert "--gradient_accumulation_steps=8 " in submit(tmp_path, PASSED, SLURM_NNODES="1").stdout
    told = submit(tmp_path, "echo started", SLURM_NNODES="3")
    assert (told.returncode, told.stdout, told.stderr) == (
        2, "", "train_xl.sbatch: 24 GPUs can't share 64 micro-steps evenly: use a power of two, or name a config "
        "and --gradient_accumulation_steps\n")


@pytest.mark.parametrize("env, cpus", [
    ({}, ["--cpus-per-task=2"]),
    ({"SLURM_NTASKS_PER_NODE": "1"}, ["--cpus-per-task=2"]),
    ({"SLURM_NTASKS_PER_NODE": "2", "SLURM_NTASKS": "8"}, ["--cpus-per-task=4"]),
    ({"SLURM_CPUS_PER_TASK": None, "SLURM_CPUS_ON_NODE": "96"}, ["--cpus-per-task=96"]),
    ({"SLURM_CPUS_PER_TASK": None}, [])], ids=["two CPUs per task", "one task", "two tasks", "no such line", "unknown"])
def test_a_job_starts_one_launcher_on_each_node_with_all_of_its_cpus(tmp_path, env, cpus):
    job = submit(tmp_path, OPTIONS, **env)
    assert (job.returncode, job.stderr) == (0, "")
    assert job.stdout.splitlines() == ["--nodes=4", "--ntasks=4", "--ntasks-per-node=1", *cpus]


def test_a_job_refuses_a_tag_to_which_each_restart_would_return(tmp_path):
    job = submit(tmp_path, "echo started", "--resume_tag=iter_8")
    assert job.returncode == 2 and job.stdout == "" and job.stderr.endswith("best and final instead\n")


def test_a_job_without_an_environment_says_how_to_make_it():
    env = {**os.environ, "PYTHON": "/nowhere/python", "SLURM_JOB_ID": "7"}
    job = subprocess.run(["bash", "examples/slurm/train_xl.sbatch"], cwd=ROOT, env=env, capture_output=True, text=True)
    assert job.returncode == 2
    assert job.stderr == "train_xl.sbatch: /nowhere/python does not exist: run ./install.sh, or set PYTHON\n"
