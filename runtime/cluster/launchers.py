"""Ranks that srun or mpirun has started: their variables, in the words of torchrun."""

import os
import re
import zlib
from collections.abc import MutableMapping
from dataclasses import dataclass

FIRST_PORT = 20_000  # of those that MASTER_PORT is chosen from, where a launcher has none
N_PORTS = 10_000


@dataclass(frozen=True)
class Launcher:
    """The variables of a launcher that starts ranks, but doesn't set RANK and WORLD_SIZE."""

    name: str
    size: str  # ranks in all
    rank: str
    local_rank: str  # on its node
    local_size: str  # ranks on this node. Slurm's has those of all nodes
    jobs: tuple[str, ...]  # what tells this run from others on the same node


# mpirun starts its daemons with srun where it can, so Slurm is the last
LAUNCHERS = (
    Launcher(
        name="Open MPI's mpirun",
        size="OMPI_COMM_WORLD_SIZE",
        rank="OMPI_COMM_WORLD_RANK",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        jobs=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    Launcher(
        name="MVAPICH2's mpirun",
        size="MV2_COMM_WORLD_SIZE",
        rank="MV2_COMM_WORLD_RANK",
        local_rank="MV2_COMM_WORLD_LOCAL_RANK",
        local_size="MV2_COMM_WORLD_LOCAL_SIZE",
        jobs=("MPIRUN_ID",),
    ),
    Launcher(
        name="MPICH's mpiexec",
        size="PMI_SIZE",
        rank="PMI_RANK",
        local_rank="MPI_LOCALRANKID",
        local_size="MPI_LOCALNRANKS",
        jobs=(),
    ),
    Launcher(
        name="Slurm's srun",
        size="SLURM_STEP_NUM_TASKS",
        rank="SLURM_PROCID",
        local_rank="SLURM_LOCALID",
        local_size="SLURM_STEP_TASKS_PER_NODE",
        jobs=("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ),
)


def find_launcher(environ: MutableMapping[str, str]) -> Launcher | None:
    """Return the launcher that has started several ranks, this one among them, without RANK.

    One that says enough of them comes first.
    """
    # torchrun or deepspeed has started this process, or the user has set the variables
    if "RANK" in environ:
        return None

    # Several can have left their variables, such as mpirun within a job of Slurm
    found = [launcher for launcher in LAUNCHERS if number(environ, launcher.size) > 1]
    for launcher in found:
        if ranks_of(environ, launcher):
            return launcher
    if found:
        return found[0]
    return None


def launchers_apart(environ: MutableMapping[str, str]) -> str | None:
    """Return a sentence if srun or mpirun has started torchruns that don't know of each other.

    Or several deepspeeds. Each would be a run of its own, with a part of the batch. torchrun and
    deepspeed tell their ranks how many nodes they know of, and srun and mpirun how many processes
    they have started.
    """
    # torchrun's name and deepspeed's for the number of nodes
    nodes = max(number(environ, "GROUP_WORLD_SIZE"), number(environ, "CROSS_SIZE"))
    if nodes < 1:  # started by neither of them
        return None
    for launcher in LAUNCHERS:
        if number(environ, launcher.size) > nodes:
            return several_launchers(launcher, environ[launcher.size])
    return None


def several_launchers(launcher: Launcher, count: str) -> str:
    """Return what to do where srun or mpirun has started more launchers than there are nodes."""
    return (
        f"{launcher.size}={count} in the environment: {launcher.name} has started {count} of this "
        "launcher, and each would be a run of its own: start one for each node, with --nnodes and "
        f"--node_rank, or let {launcher.name} start python train_deepspeed.py itself "
        f"(docs/multi_node.md). If it has started none, or if you want {count} runs, run unset "
        f"{launcher.size}"
    )


def adopt_ranks(environ: MutableMapping[str, str]) -> None:
    """Set RANK and the like as the launcher means them, if it says enough.

    If it doesn't, ranks_from_environment() refuses to run.
    """
    launcher = find_launcher(environ)
    if launcher is None:
        return

    # Leave all as it is where the numbers don't fit together
    ranks = ranks_of(environ, launcher)
    if not ranks:
        return
    if environ.get("WORLD_SIZE", ranks["WORLD_SIZE"]) != ranks["WORLD_SIZE"]:
        return  # the user has set another number
    environ.update(ranks)

    # Where rank 0 is: on this node, or on the first of Slurm's
    if ranks["LOCAL_WORLD_SIZE"] == ranks["WORLD_SIZE"]:
        environ.setdefault("MASTER_ADDR", "127.0.0.1")
    elif launcher.name == "Slurm's srun":
        host = first_host(environ.get("SLURM_STEP_NODELIST", ""))
        if host:
            environ.setdefault("MASTER_ADDR", host)

    # A port that is the same on all ranks, and another one for another job
    job = " ".join(environ.get(name, "") for name in launcher.jobs)
    port = FIRST_PORT + zlib.crc32(job.encode()) % N_PORTS
    environ.setdefault("MASTER_PORT", str(port))


def ranks_of(environ: MutableMapping[str, str], launcher: Launcher) -> dict[str, str]:
    """Return a launcher's numbers under torchrun's names.

    Return {} if one is missing or implausible.
    """
    # -1 for each that is missing, which the last check refuses
    size = number(environ, launcher.size)
    rank = number(environ, launcher.rank)
    local_rank = number(environ, launcher.local_rank)
    local_size = number(environ, launcher.local_size)

    # Slurm has the tasks of all nodes in one text
    if launcher.local_size == "SLURM_STEP_TASKS_PER_NODE":
        counts = tasks_per_node(environ.get(launcher.local_size, ""))
        node = number(environ, "SLURM_NODEID")
        local_size = -1
        if 0 <= node < len(counts):
            local_size = counts[node]

    # A launcher without one of its variables, or with those of another job
    if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
        return {}
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(local_size),
    }


def number(environ: MutableMapping[str, str], name: str) -> int:
    """Return a variable as an int, or -1 if it is none."""
    value = environ.get(name, "")
    if not re.fullmatch(r"[0-9]{1,9}", value):
        return -1
    return int(value)


def tasks_per_node(text: str) -> list[int]:
    """Return what Slurm writes as 2(x3),1: [2, 2, 2, 1]. Return [] for another text."""
    counts = []
    for part in text.split(","):
        # Tasks of a node, and for how many nodes in turn that holds
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part)
        if match is None:
            return []
        tasks = int(match[1])
        nodes = int(match[2] or 1)
        counts += [tasks] * nodes
    return counts


def first_host(text: str) -> str:
    """Return the first host of a list of Slurm's, such as node[08-11,20],login1: node08."""
    # Its name up to a bracket, the first number in that, and what follows it
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,\[]*))?", text)
    if match is None:
        return ""
    return "".join(match.groups(default=""))


# At import, because RANK has to be there before anything reads it: see RANK in ranks.py
STARTED_BY = find_launcher(os.environ)  # None: torchrun, deepspeed, or nobody
adopt_ranks(os.environ)
