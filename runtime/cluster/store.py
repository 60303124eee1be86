"""The store through which the ranks of a run find each other.

PyTorch's own choice, a TCPStore, listens on all network interfaces and asks nobody who he is. Any
user of the machine could then set its keys, and so read or end the run. On one node, the ranks meet
in a file of a folder that only this user can open. Several nodes need the network: see
docs/trust.md.
"""

import datetime
import os
import socket
from pathlib import Path

import psutil
import torch.distributed as dist

from runtime.cluster.ranks import launcher_variable, local_world_size
from runtime.errors import UserError
from runtime.files import private_temp_dir

LAUNCHERS = {  # their commands, and the modules that python -m starts
    "accelerate",
    "accelerate-launch",
    "accelerate.commands.accelerate_cli",
    "accelerate.commands.launch",
    "torchrun",
    "torch.distributed.run",
    "torch.distributed.launch",
    "launch_deepspeed.py",
    "deepspeed",
    "deepspeed.launcher.runner",
    "deepspeed.launcher.launch",
    # Open MPI, MPICH and Slurm: the process on each node that has started its ranks, and mpirun
    "mpirun",
    "mpirun.openmpi",
    "mpirun.mpich",
    "mpiexec",
    "mpiexec.openmpi",
    "mpiexec.mpich",
    "mpiexec.hydra",
    "orterun",
    "orted",
    "prterun",
    "prted",
    "hydra_pmi_proxy",
    "slurmstepd",
}


def open_store(timeout: datetime.timedelta) -> dist.Store | None:
    """Return the store of this run, or None if torch.distributed should open its own.

    All ranks call this, with the variables of ranks_from_environment(). Raises UserError.
    """
    # Alone: a store in memory. On several nodes: PyTorch's own, over the network
    world_size = launcher_variable("WORLD_SIZE")
    if world_size == 1:
        return dist.HashStore()
    if not is_on_one_node():
        return None

    # Launchers start all ranks of a node themselves, so the launcher's process tells this run from
    # all others
    launcher = psutil.Process().parent()
    if launcher is not None and is_launcher(launcher):
        return dist.FileStore(str(private_file(launcher)), world_size)

    # Without a launcher that we know, a store that other machines can't reach
    if not has_loopback_master():
        return None
    return open_loopback_store(world_size, timeout)


def is_on_one_node() -> bool:
    """Return whether all ranks are on this node, by what the launcher says."""
    # torchrun's name and deepspeed's for the number of ranks on this node
    says_so = "LOCAL_WORLD_SIZE" in os.environ or "LOCAL_SIZE" in os.environ
    alone = os.environ.get("WORLD_SIZE") == "1"
    if not (says_so or alone or has_loopback_master()):
        return False  # mpirun and srun don't say how many ranks are here
    return local_world_size() == launcher_variable("WORLD_SIZE")


def has_loopback_master() -> bool:
    """Return whether rank 0 is to be reached at this machine's loopback address."""
    address = os.environ.get("MASTER_ADDR", "")
    return address in ("localhost", "::1") or address.startswith("127.")


def is_launcher(process: psutil.Process) -> bool:
    """Return whether a process is one of LAUNCHERS."""
    try:
        words = {os.path.basename(word) for word in process.cmdline()}
        return bool(LAUNCHERS & {process.name(), *words})  # slurmstepd has changed its command line
    except psutil.Error:  # another user's process that this system hides: not our launcher
        return False


def private_file(launcher: psutil.Process) -> Path:
    """Return the file in which the ranks that this launcher has started meet. Raises UserError."""
    folder = private_temp_dir()
    remove_stale_files(folder)

    # Another process may get the launcher's number later, and torchrun may start its ranks again
    started = int(launcher.create_time() * 1000)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return folder / f"{pid_namespace()}-{launcher.pid}-{started}-{attempt}"


def pid_namespace() -> str:
    """Return a name of the namespace that process ids are of: containers may share a folder."""
    try:
        return str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:  # not Linux
        return "0"


def remove_stale_files(folder: Path) -> None:
    """Remove the files of launchers that have ended."""
    for file in folder.glob(f"{pid_namespace()}-*-*"):
        pid = int(file.name.split("-")[1])
        if not psutil.pid_exists(pid):
            file.unlink(missing_ok=True)


def open_loopback_store(world_size: int, timeout: datetime.timedelta) -> dist.Store:
    """Return a TCPStore that listens on the loopback interface only, on rank 0.

    For launchers whose processes tell nothing about which ranks belong together. Other users of
    this machine can reach it. Raises UserError if the port is in use.
    """
    # The other ranks connect to rank 0
    port = launcher_variable("MASTER_PORT", end=2**16)
    if launcher_variable("RANK") != 0:
        return dist.TCPStore(
            "127.0.0.1",
            port,
            world_size,
            is_master=False,
            timeout=timeout,
            wait_for_workers=False,  # LateNotice waits
        )

    # Rank 0 opens the socket itself, because a TCPStore would open one on all interfaces
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            raise UserError(
                f"MASTER_PORT={port} can't be used ({error.strerror}): choose another port"
            ) from None
        listener.listen()
        return dist.TCPStore(
            "127.0.0.1",
            listener.getsockname()[1],
            world_size,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
            use_libuv=False,  # PyTorch 2.7's takes no socket that is open
        )
