"""Two nodes, emulated on one machine with four GPUs: train, lose a node, resume on one, and submit the Slurm script.

    python tests/gpu/two_nodes.py --out=DIR                 four GPUs; under 9 minutes
    python tests/gpu/two_nodes.py --out=DIR --device=cpu    four processes with gloo, at a tiny size

Each node has a launcher of its own, as docs/multi_node.md tells people to start it, with two GPUs, another NCCL_HOSTID
and another host name. NCCL has sockets only, so a "node" is slower inside, too, than a real one. The nodes share the
out_dir. A part that fails is recorded, and the others go on. The table is printed last; DIR/two_nodes.json has all
figures, and DIR/NAME-nodeN.log has what each launcher said."""

import argparse
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np
import psutil

from runtime.data.dataset import write_dataset
from runtime.monitor.history import read_history

NODES = 2
RANKS_PER_NODE = 2
RANKS = NODES * RANKS_PER_NODE
WARM_UP = 5  # steps that don't count in tokens/s
ALPHABET = "\n abcdefghijklmnopqrstuvwxyz"
SOCKETS_ONLY = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo",
                "NCCL_NVLS_ENABLE": "0", "GLOO_SOCKET_IFNAME": "lo"}
COMMON = ("--init_from=scratch", "--max_iters=20", "--eval_interval=10", "--eval_iters=4", "--learning_rate=6e-4",
          "--decay_lr=False", "--dropout=0.0", "--optimizer=adamw", "--log_interval=1", "--keep_last=2")
SIZES = {
    "cuda": ("--n_layer=12", "--n_head=12", "--n_embd=768", "--block_size=1024", "--batch_size=8", "--compile=False"),
    "cpu": ("--n_layer=2", "--n_head=2", "--n_embd=64", "--block_size=64", "--batch_size=2", "--dtype=float32"),
}
ACCUMULATION = "--gradient_accumulation_steps=4"
ENDLESS = ("--max_iters=1000000", "--eval_interval=5")
MOST_APART = 1e-4  # losses in float32, at a rate that doesn't enlarge rounding
GENTLE_RATE = "--learning_rate=3e-5"
PART_S = {"cuda": 75, "cpu": 150}  # of a run
BUDGET_S = {"cuda": 540, "cpu": 1500}  # of all parts together: none begins after that
TIMEOUT_MINUTES = 1  # DEEPSPEED_TIMEOUT, of the nodes that lose another


class Way(NamedTuple):
    """How a run of four ranks trains."""

    nodes: int
    stage: int
    local: bool  # gradients are accumulated on each rank, and reduced once per step
    dtype: str = "bfloat16"


WAYS = {
    "one node, ZeRO-2, local": Way(1, 2, True),
    "two nodes, ZeRO-2, local": Way(2, 2, True),
    "one node, ZeRO-2": Way(1, 2, False),
    "two nodes, ZeRO-2": Way(2, 2, False),
    "one node, ZeRO-3, local": Way(1, 3, True),
    "two nodes, ZeRO-3, local": Way(2, 3, True),
    "one node, ZeRO-2, float32": Way(1, 2, True, "float32"),
    "two nodes, ZeRO-2, float32": Way(2, 2, True, "float32"),
    "one node, ZeRO-3, float32": Way(1, 3, True, "float32"),
    "two nodes, ZeRO-3, float32": Way(2, 3, True, "float32"),
}


class Job:
    """The launchers of a run, one per node."""

    def __init__(self, processes: list[subprocess.Popen], logs: list[Path]):
        self.processes = processes
        self.logs = logs

    def wait(self, seconds: float) -> list[int]:
        """Return the exit codes of the launchers. Raises AssertionError, and ends them, if that takes longer."""
        deadline = time.monotonic() + seconds
        try:
            return [process.wait(max(0.1, deadline - time.monotonic())) for process in self.processes]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not done after {seconds:g} s: {self.last_lines()}") from None
        finally:
            self.kill()

    def kill(self) -> None:
        for process in self.processes:
            kill_tree(process)

    def last_lines(self) -> list[str]:
        """Return the last line that each launcher, or one of its ranks, has printed."""
        texts = [log.read_text(errors="replace").split("\n") for log in self.logs]
        return [next((line for line in reversed(lines) if line.strip()), "") for lines in texts]


def tree(process: subprocess.Popen) -> list[psutil.Process]:
    """Return a launcher and all that it has started."""
    try:
        launcher = psutil.Process(process.pid)
        return [launcher, *launcher.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def kill_tree(process: subprocess.Popen) -> None:
    """SIGKILL a launcher and its ranks, as a node that loses power does."""
    for one in tree(process):
        try:
            one.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until(condition, seconds: float, what: str) -> None:
    """Raises AssertionError if the condition isn't true after so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        time.sleep(0.2)


class Machine:
    """Starts runs on this machine as if it were several."""

    def __init__(self, out: Path, device: str):
        self.out = out
        self.device = device
        self.part_s = PART_S[device]
        self.data = out / "data"
        self.script = out / "on_a_node.py"

    def set_up(self) -> None:
        """Write a dataset, and a script that trains under the host name of its node.

        The nodes of a run differ in their host names, and ranks watch the processes of their own
        node only.
        """
        steps = np.random.default_rng(0).integers(1, 4, 400_000).cumsum()
        ids = (steps % len(ALPHABET)).tolist()
        write_dataset(self.data, ids[:360_000], ids[360_000:], {"kind": "char", "chars": ALPHABET}, len(ALPHABET),
                      {"name": "a walk over letters", "sha256": "0" * 64, "bytes": 0})
        self.script.write_text(f"""import os, runpy, socket, sys
name = os.environ["NODE_NAME"]
socket.gethostname = lambda: name
sys.path.insert(0, {str(ROOT)!r})
sys.argv[0] = {str(ROOT / "train_deepspeed.py")!r}
runpy.run_path(sys.argv[0], run_name="__main__")
""")

    def environment(self, node: int, nodes: int) -> dict:
        """Return the environment of a node's launcher, with its share of the GPUs."""
        ranks = RANKS // nodes
        gpus = ",".join(str(node * ranks + i) for i in range(ranks))
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        own = {"NODE_NAME": f"node{node}", "DEEPSPEED_TIMEOUT": str(TIMEOUT_MINUTES), "PYTHONPATH": path}
        if self.device == "cpu":
            own |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        else:
            own |= {"CUDA_VISIBLE_DEVICES": gpus}
        if nodes > 1:
            own |= {**SOCKETS_ONLY, "NCCL_HOSTID": f"node{node}"}
        return {**os.environ, **own}

    def settings(self, out_dir: Path, *options: str) -> list[str]:
        """Return the settings of a run of this machine; later ones win."""
        return [*COMMON, *SIZES[self.device], ACCUMULATION, f"--device={self.device}", f"--dataset={self.data}",
                f"--out_dir={out_dir}", *options]

    def start(self, name: str, nodes: int, settings: list[str]) -> Job:
        """Start four ranks on so many nodes."""
        port = free_port()
        processes, logs = [], []
        for node in range(nodes):
            command = [sys.executable, ROOT / "launch_deepspeed.py", f"--nnodes={nodes}", f"--node_rank={node}",
                       f"--nproc_per_node={RANKS // nodes}", "--master_addr=127.0.0.1", f"--master_port={port}",
                       self.script, *settings]
            log = self.out / f"{name.replace(', ', '-').replace(' ', '-')}-node{node}.log"
            with open(log, "w") as file:
                processes.append(subprocess.Popen([str(word) for word in command], cwd=ROOT, stdout=file,
                                                  stderr=subprocess.STDOUT, env=self.environment(node, nodes),
                                                  start_new_session=True))
            logs.append(log)
        return Job(processes, logs)


def losses(out_dir: Path) -> dict[int, float]:
    return {record["iter"]: record["loss"] for record in read_history(str(out_dir)) if "loss" in record}


def stage_option(stage: int) -> str:
    return f"--deepspeed_config=ds_config_zero{stage}.json"


# The parts. Each returns its figures, or raises AssertionError


def train(machine: Machine, name: str, way: Way) -> dict:
    """Train 20 steps. Return the losses and the median tokens/s after the first steps."""
    out_dir = machine.out / name.replace(", ", "-").replace(" ", "-")
    options = [stage_option(way.stage), f"--accumulate_locally={way.local}", f"--dtype={way.dtype}"]
    if way.dtype == "float32":
        options.append(GENTLE_RATE)
    settings = machine.settings(out_dir, *options)
    job = machine.start(name, way.nodes, settings)
    codes = job.wait(machine.part_s)
    assert codes == [0] * way.nodes, f"exit codes {codes}: {job.last_lines()}"
    records = [record for record in read_history(str(out_dir)) if "loss" in record and record["iter"] > WARM_UP]
    return {"losses": losses(out_dir), "tokens_per_s": statistics.median(r["tokens_per_s"] for r in records),
            "ms": statistics.median(r["ms"] for r in records)}


def compare(machine: Machine, figures: dict, stage: int) -> dict:
    """Compare the losses in float32 on two nodes with those on one."""
    one = figures[f"one node, ZeRO-{stage}, float32"]["losses"]
    two = figures[f"two nodes, ZeRO-{stage}, float32"]["losses"]
    assert one.keys() == two.keys() and len(one) == 20, "the runs have other steps"
    apart = max(abs(one[i] - two[i]) for i in one)
    assert apart <= MOST_APART, f"losses are up to {apart:.6f} apart"
    return {"most_apart": apart, "last_losses": [one[20], two[20]]}


def start_and_save(machine: Machine, name: str, out_dir: Path) -> Job:
    """Start an endless run on two nodes, and return it when it has saved iteration 5."""
    job = machine.start(name, NODES, machine.settings(out_dir, *ENDLESS, stage_option(2)))
    try:
        wait_until(lambda: (out_dir / "iter_5" / "manifest.json").exists(), machine.part_s, f"{name}: first checkpoint")
    except AssertionError as error:
        job.kill()
        raise AssertionError(f"{error}: {job.last_lines()}") from None
    return job


def lose_node(machine: Machine, how: str) -> dict:
    """Kill one node's processes, or stop them as if its network were lost. The other has to end by itself."""
    out_dir = machine.out / f"node-{how}"
    job = start_and_save(machine, f"node {how}", out_dir)
    lost, left = job.processes[1], job.processes[0]
    began = time.monotonic()
    if how == "killed":
        kill_tree(lost)
    else:
        for process in tree(lost):
            process.suspend()
    most = min(60 * TIMEOUT_MINUTES + 45, machine.part_s + 45)  # the launcher gives its ranks 30 s to end
    try:
        code = left.wait(most)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"the other node still runs after {most} s: {job.last_lines()}") from None
    finally:
        ended_s = time.monotonic() - began
        job.kill()
    assert code == 1, f"exit code {code}: {job.last_lines()}"
    said = [line for line in job.logs[0].read_text(errors="replace").splitlines() if "another rank has exited" in line]
    return {"seconds_until_the_other_ended": ended_s, "exit_code": code, "said": said[:1]}


def resume_on_one_node(machine: Machine) -> dict:
    """Resume what the killed nodes have left, with all four ranks on one."""
    out_dir = machine.out / "node-killed"
    before = sorted(int(path.name[5:]) for path in out_dir.glob("iter_*") if path.name[5:].isdecimal())[-1]
    job = machine.start("resumed on one node", 1, machine.settings(
        out_dir, stage_option(3), "--init_from=resume", f"--max_iters={before + 5}"))
    (code,) = job.wait(machine.part_s)
    assert code == 0, f"exit code {code}: {job.last_lines()}"
    after = losses(out_dir)
    assert list(after)[-5:] == list(range(before + 1, before + 6)), f"steps {list(after)[-5:]}"
    return {"resumed_from": before, "losses": {i: after[i] for i in list(after)[-8:]}}


SRUN = """#!/usr/bin/env bash
# Stands for srun: starts the command once for each node
while [[ $1 != bash ]]; do shift; done
pids=()
for ((node = 0; node < SLURM_NNODES; node++)); do
    first=$((node * 2))
    SLURM_NODEID=$node NCCL_HOSTID=node$node CUDA_VISIBLE_DEVICES=${TEST_GPUS:+$first,$((first + 1))} \\
        "$@" >>"$TEST_OUT/slurm-node$node.log" 2>&1 &
    pids+=($!)
done
code=0
for pid in "${pids[@]}"; do
    wait "$pid" || code=$?
done
exit "$code"
"""
SCONTROL = """#!/usr/bin/env bash
# Stands for scontrol: all nodes are this machine, and what is requeued is written down
if [[ $1 == show ]]; then echo 127.0.0.1; else echo "$*" >>"$TEST_OUT/scontrol.log"; fi
"""


def submit(machine: Machine, out_dir: Path, *options: str, **env: str) -> subprocess.Popen:
    """Start examples/slurm/train_xl.sbatch, with programs that stand for Slurm's."""
    programs = machine.out / "slurm"
    programs.mkdir(exist_ok=True)
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    given = {**machine.environment(0, NODES), "PATH": f"{programs}:{os.environ['PATH']}", "PYTHON": sys.executable,
             "SLURM_JOB_ID": str(free_port()), "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_NNODES": str(NODES),
             "SLURM_GPUS_ON_NODE": str(RANKS_PER_NODE), "SLURM_CPUS_ON_NODE": str(os.cpu_count()),
             "TEST_OUT": str(machine.out), "TEST_GPUS": "1" if machine.device == "cuda" else "", **env}
    command = ["bash", "examples/slurm/train_xl.sbatch", "config/train_gpt2.py",
               *machine.settings(out_dir, stage_option(2), *options)]
    with open(machine.out / "slurm.log", "a") as log:
        return subprocess.Popen(command, cwd=ROOT, env=given, stdout=log, stderr=subprocess.STDOUT,
                                start_new_session=True)


def slurm(machine: Machine) -> dict:
    """Submit a job, send SIGUSR1 as before its time limit, and start it again as Slurm does when it is requeued."""
    out_dir = machine.out / "slurm-run"
    saved = out_dir / "iter_5" / "manifest.json"
    job = submit(machine, out_dir, *ENDLESS)
    try:
        wait_until(saved.exists, machine.part_s, "the job's first checkpoint")
        for process in tree(job):
            command = process.cmdline()
            if any(word.endswith("launch_deepspeed.py") for word in command):
                process.send_signal(signal.SIGUSR1)
        code = job.wait(machine.part_s)
    except subprocess.TimeoutExpired:
        raise AssertionError("the job did not end after SIGUSR1") from None
    finally:
        kill_tree(job)
    assert code == 138, f"exit code {code}"
    requeued = (machine.out / "scontrol.log").read_text().split()
    assert requeued[0] == "requeue", requeued
    at = max(losses(out_dir))
    job = submit(machine, out_dir, f"--max_iters={at + 5}", "--eval_interval=5", SLURM_RESTART_COUNT="1")
    try:
        again = job.wait(machine.part_s)
    except subprocess.TimeoutExpired:
        raise AssertionError("the requeued job did not end") from None
    finally:
        kill_tree(job)
    assert again == 0 and max(losses(out_dir)) == at + 5, f"exit code {again}, step {max(losses(out_dir))}"
    return {"stopped_at": at, "exit_codes": [code, again], "finished_at": at + 5}


def run_part(results: list[dict], name: str, part, *args) -> dict:
    """Run one part and record it, whether it passes or not. Return its figures, {} if it has failed."""
    began = time.monotonic()
    try:
        figures = part(*args)
        error = None
    except Exception as problem:  # the other parts go on
        figures = {}
        error = f"{type(problem).__name__}: {problem}"
    seconds = time.monotonic() - began
    results.append({"part": name, "passed": error is None, "seconds": seconds, "error": error, **figures})
    print(f"{name}: {'passed' if error is None else error} ({seconds:.0f} s)", flush=True)
    return figures


def table(results: list[dict]) -> str:
    """Return the results as a Markdown table."""
    rows = ["| part | passed | seconds | tokens/s | what was found |", "|---|---|---|---|---|"]
    for result in results:
        speed = f"{result['tokens_per_s']:,.0f}" if "tokens_per_s" in result else ""
        found = {key: value for key, value in result.items() if key in (
            "most_apart", "seconds_until_the_other_ended", "exit_code", "resumed_from", "exit_codes", "finished_at")}
        told = result["error"] or ", ".join(f"{key}: {value}" for key, value in found.items())
        passed = "yes" if result["passed"] else "no"
        rows.append(f"| {result['part']} | {passed} | {result['seconds']:.0f} | {speed} | {told} |")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for logs, runs and two_nodes.json")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="the parts with one of these words in their names")
    parser.add_argument("--keep", action="store_true", help="keep the checkpoints of the runs")
    args = parser.parse_args()
    args.out = args.out.absolute()
    args.out.mkdir(parents=True, exist_ok=True)
    machine = Machine(args.out, args.device)
    began = time.monotonic()
    machine.set_up()

    results: list[dict] = []
    figures: dict[str, dict] = {}
    parts = [(name, train, machine, name, way) for name, way in WAYS.items()]
    parts += [(f"losses, ZeRO-{stage}, float32", compare, machine, figures, stage) for stage in (2, 3)]
    parts += [("one node killed", lose_node, machine, "killed"), ("resumed on one node", resume_on_one_node, machine),
              ("Slurm script", slurm, machine), ("one node stopped", lose_node, machine, "stopped")]
    for name, part, *arguments in parts:
        if args.only and not any(word in name for word in args.only):
            continue
        left = BUDGET_S[args.device] - (time.monotonic() - began)
        if left < 20:
            results.append({"part": name, "passed": False, "seconds": 0.0, "error": "not begun: no time was left"})
            continue
        machine.part_s = min(PART_S[args.device], left)
        figures[name] = run_part(results, name, part, *arguments)
        record = {"device": args.device, "nodes": NODES, "ranks": RANKS, "results": results}
        (args.out / "two_nodes.json").write_text(json.dumps(record, indent=1))  # also if a later part doesn't end
    if not args.keep:  # gigabytes; the histories and logs stay
        for tag in args.out.glob("*/*/manifest.json"):
            shutil.rmtree(tag.parent)
    print(table(results))
    return 0 if all(result["passed"] for result in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
