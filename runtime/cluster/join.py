"""Join the process group: the first thing that a training process does after reading its command line.

Then all ranks plan, exchange their problems, and exit together if there are any. Tensors on the CPU and objects are
exchanged by gloo, tensors on GPUs by NCCL, which connects at its first collective, so a GPU need not work for that."""

import contextlib
import datetime
import os
import re
import socket

import psutil
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from runtime.cluster.ranks import RANK, all_gather_objects, launcher_variable, local_world_size
from runtime.output import exit_with_error


def group_timeout():
    """Return how long a rank waits in any collective: DEEPSPEED_TIMEOUT, in minutes, which engine/fixes.py checks."""
    minutes = os.environ.get("DEEPSPEED_TIMEOUT", "10")
    return datetime.timedelta(minutes=int(minutes) if re.fullmatch(r"[1-9]\d{0,4}", minutes) else 10)


def join_process_group(device="auto", backend="auto"):
    """Join the other ranks. Return each rank's (node, process id). Exits with code 2 if they can't be reached."""
    on_gpu, timeout = device != "cpu" and torch.cuda.is_available(), group_timeout()
    # For DeepSpeed's groups too, which it creates without a timeout: gloo's default is 30 minutes
    distributed_c10d.default_pg_timeout = distributed_c10d.default_pg_nccl_timeout = timeout
    set_gloo_interface()
    threads, ranks = os.environ.get("OMP_NUM_THREADS"), local_world_size()
    if ranks > 1 and threads == ("1" if "TORCHELASTIC_RUN_ID" in os.environ else None):
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))  # torchrun's 1 is slow for CPU offload
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu and backend != "gloo" else "gloo", timeout=timeout)
        return all_gather_objects(((socket.gethostname(), str(psutil.net_if_addrs())), os.getpid()))
    except RuntimeError as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        exit_with_error(f"rank {RANK} on {socket.gethostname()} could not join the other ranks within "
                        f"{timeout.total_seconds() / 60:g} minutes ({str(error).splitlines()[0]}): check the output of "
                        f"the other ranks, that all nodes can reach {address}, and that its port is free")


def set_gloo_interface():
    """With several nodes, have gloo use the interface that leads to rank 0's node. Its default is the host name's,
    often the loopback. On rank 0's node, MASTER_ADDR may be the loopback too: then use the default route's."""
    if local_world_size() == launcher_variable("WORLD_SIZE"):
        return
    names = {address.address.partition("%")[0]: name for name, addresses in psutil.net_if_addrs().items()
             for address in addresses}
    for host in (os.environ["MASTER_ADDR"], "192.0.2.1"):  # the second is an address for documentation
        with contextlib.suppress(OSError):  # there is no route
            family, kind, protocol, _, remote = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind, protocol) as s:
                s.connect(remote)  # sends nothing
                address = s.getsockname()[0]
            if address in names and not address.startswith("127.") and address != "::1":
                os.environ.setdefault("GLOO_SOCKET_IFNAME", names[address])
                return
