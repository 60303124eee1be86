"""Join the process group: the first thing that a training process does after reading its command
line.

Then all ranks plan, exchange their problems, and exit together if there are any. Tensors on the CPU
and objects are exchanged by gloo, tensors on GPUs by NCCL, which connects at its first collective,
so a GPU need not work for that."""

import contextlib
import datetime
import os
import re
import socket

import psutil
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from runtime.cluster.late import LateNotice
from runtime.cluster.ranks import RANK, all_gather_objects, local_world_size
from runtime.cluster.store import is_on_one_node, open_store
from runtime.cores import allowed_cores, usable_cores
from runtime.errors import UserError
from runtime.files import use_private_compile_cache
from runtime.output import exit_with_error


def group_timeout() -> datetime.timedelta:
    """Return how long a rank waits in any collective: DEEPSPEED_TIMEOUT, in minutes.

    engine/fixes.py refuses another value than a number.
    """
    minutes = os.environ.get("DEEPSPEED_TIMEOUT", "10")
    if not re.fullmatch(r"[1-9]\d{0,4}", minutes):
        return datetime.timedelta(minutes=10)
    return datetime.timedelta(minutes=int(minutes))


def join_process_group(device: str = "auto", backend: str = "auto") -> list:
    """Join the other ranks. Return each rank's [node, process id].

    Exits with code 2 if they can't be reached.
    """
    timeout = group_timeout()
    # For DeepSpeed's groups too, which it creates without a timeout: gloo's default is 30 minutes
    distributed_c10d.default_pg_timeout = timeout
    distributed_c10d.default_pg_nccl_timeout = timeout
    set_network_interfaces()
    set_threads(local_world_size())
    backends = "gloo"
    if device != "cpu" and torch.cuda.is_available() and backend != "gloo":
        backends = "cpu:gloo,cuda:nccl"

    # Meet the others, and learn which of them are on this node
    try:
        use_private_compile_cache()
        with LateNotice() as notice:
            store = open_store(timeout)
            if store is None:
                dist.init_process_group(backends, timeout=timeout)
            else:
                world_size = int(os.environ["WORLD_SIZE"])
                notice.wait_for_all(store, world_size, timeout.total_seconds())
                dist.init_process_group(
                    backends, timeout=timeout, store=store, rank=RANK, world_size=world_size
                )
        node = [socket.gethostname(), str(psutil.net_if_addrs())]
        return all_gather_objects([node, os.getpid()])
    except UserError as error:
        exit_with_error(error)
    except RuntimeError as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        exit_with_error(
            f"rank {RANK} on {socket.gethostname()} could not join the other ranks within "
            f"{timeout.total_seconds() / 60:g} minutes ({str(error).splitlines()[0]}): check the "
            f"output of the other ranks, that all nodes can reach {address}, and that its port is "
            "free"
        )


def set_threads(ranks: int) -> None:
    """Share the cores of this node among its ranks, unless the user has set OMP_NUM_THREADS.

    PyTorch takes all cores for each process, whatever the container's quota. torchrun sets one
    thread for each rank, which is slow for CPU offload.
    """
    if user_set_threads():
        return
    # What PyTorch takes by itself is right for one rank without a quota
    cores = usable_cores()
    if ranks > 1 or cores < allowed_cores():
        torch.set_num_threads(max(1, cores // ranks))


def user_set_threads() -> bool:
    """Return whether OMP_NUM_THREADS is the user's choice, not torchrun's."""
    if "OMP_NUM_THREADS" not in os.environ:
        return False
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ["OMP_NUM_THREADS"] != "1":
        return True
    # torchrun sets it to 1 for its ranks only, so its own environment says what the user has set
    try:
        return "OMP_NUM_THREADS" in psutil.Process().parent().environ()
    except (psutil.Error, AttributeError):  # the launcher has ended, or the system hides it
        return False


def set_network_interfaces() -> None:
    """Choose the network interfaces that gloo and NCCL listen on.

    On one node that is the loopback, which other machines can't reach. With several nodes, gloo
    uses the interface that leads to rank 0's node: its own default is the host name's, often the
    loopback. On rank 0's node, MASTER_ADDR may be the loopback too: then it is the default route's.
    """
    name_of_address = {}
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            name_of_address[address.address.partition("%")[0]] = name

    # All ranks are here: the loopback
    if is_on_one_node():
        loopback = name_of_address.get("127.0.0.1")
        if loopback is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
        return

    # The interface of the route to rank 0's node, or else of the default route: 192.0.2.1 is an
    # address for documentation, which nobody has
    for host in (os.environ["MASTER_ADDR"], "192.0.2.1"):
        with contextlib.suppress(OSError):  # there is no route
            own = own_address_towards(host)
            if own in name_of_address and not own.startswith("127.") and own != "::1":
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name_of_address[own])
                return


def own_address_towards(host: str) -> str:
    """Return this machine's address in a connection to a host. Raises OSError without a route."""
    # The system chooses the route when a socket is connected, and with UDP nothing is sent
    family, kind, protocol, _, remote = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(remote)
        return probe.getsockname()[0]
