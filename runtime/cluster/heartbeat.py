"""Heartbeat: notice during the run that another machine is lost.

A lost machine sends nothing, not even the end of a connection: gloo's ranks waited for 15 minutes and 39 s. So the
first rank of each machine holds a silent connection to rank 0. The kernel answers TCP's keep-alive probes, also while
Python is busy with a long save. When a connection breaks, the ranks at its ends report why and exit, and their
neighbors follow (shutdown.py).
"""

import contextlib
import os
import secrets
import shlex
import socket
import sys
import threading
import time

import psutil
import torch.distributed as dist

from runtime.cluster.ranks import ALL_EXITING, EXITING, RANK, local_world_size
from runtime.output import explain_uncaught

MACHINE_TIMEOUT = os.environ.get("MACHINE_TIMEOUT", "60")  # seconds without an answer after which a machine is lost
EXIT_MACHINE_LOST = 4  # exit code where a machine does not answer any more; where its ranks have ended it is 1


def machine_id():
    """Return (host name, id): processes with the same id see each other and each other's network. Containers and cloned
    machines may share a name."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            ids = [file.read().strip(), *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net"))]
    except OSError:  # no Linux
        ids = []
    return socket.gethostname(), " ".join(ids)


def start_heartbeat(machines, group):
    """Connect the first rank of each machine with rank 0, in a thread. machines: each rank's machine_id(). All ranks
    call it."""
    names = {machines.index(machine): machine[0] for machine in machines}  # of the first ranks
    offer = [None]
    if RANK == 0:
        server = socket.create_server(("", 0), backlog=len(names))
        own = [address.address for found in psutil.net_if_addrs().values() for address in found
               if address.family == socket.AF_INET and not address.address.startswith("127.")]
        offer = [([os.environ["MASTER_ADDR"], *own], server.getsockname()[1], secrets.token_hex(16))]
    dist.broadcast_object_list(offer, src=0, group=group)
    addresses, port, token = offer[0]
    explain_uncaught(wait_for_reason)
    if RANK == 0:
        threading.Thread(target=heartbeat_server, args=(server, token, names), daemon=True).start()
    elif RANK in names:
        threading.Thread(target=heartbeat_client, args=(addresses, port, token, names[0]), daemon=True).start()


def heartbeat_server(server, token, names):
    """Rank 0's thread: accept the other machines' first ranks, and wait in a thread for the end of each connection."""
    conns = []
    while len(conns) < len(names) - 1:
        conn, address = server.accept()
        conn.settimeout(10)
        try:
            greeting = conn.recv(64, socket.MSG_WAITALL).decode()
            if greeting[:32] != token:
                raise ValueError
            conn.sendall(token.encode())
            name = names[int(greeting[32:])]
        except (OSError, ValueError):  # not one of our ranks
            conn.close()
            continue
        conns.append(conn)
        threading.Thread(target=wait_for_end, args=(conn, f"{name} ({address[0]})", conns), daemon=True).start()


def heartbeat_client(addresses, port, token, name):
    """Another first rank's thread: connect to rank 0 at one of its addresses, and wait for the end."""
    for address in addresses:
        try:
            conn = socket.create_connection((address, port), timeout=10)
            conn.sendall(f"{token}{RANK:32d}".encode())
            if conn.recv(32, socket.MSG_WAITALL).decode() == token:
                return wait_for_end(conn, f"{name} ({conn.getpeername()[0]})")
        except OSError:
            continue
    print(f"rank {RANK}: port {port} of {' or '.join(addresses)} cannot be reached, so that nobody notices when a "
          "machine is lost: the run would wait for many minutes then", file=sys.stderr, flush=True)


def wait_for_end(conn, name, conns=()):
    """Wait until the connection brings rank 0's last message or its end, and exit, unless all ranks exit anyway. Rank 0
    passes the reason on to all `conns`. An end that does not answer probes for MACHINE_TIMEOUT s is lost."""
    conn.settimeout(None)
    conn.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    interval = int(MACHINE_TIMEOUT) // 6
    for option, value in (("TCP_KEEPIDLE", interval), ("TCP_KEEPINTVL", interval), ("TCP_KEEPCNT", 5)):
        if hasattr(socket, option):
            conn.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    try:
        code, _, why = (conn.recv(4096).decode() or f"1 the ranks of {name} have ended").partition(" ")
    except ConnectionResetError:
        code, why = 1, f"the ranks of {name} have ended"
    except OSError as error:
        code = EXIT_MACHINE_LOST
        why = f"{name} has not answered for {MACHINE_TIMEOUT} s ({error.strerror}): it is down, or its network is"
    if int(code) == 1 and EXITING.is_set() and ALL_EXITING.wait(60):
        return
    for other in conns:
        with contextlib.suppress(OSError):
            other.send(f"{code} {why}".encode(), socket.MSG_DONTWAIT)
    command = shlex.join(arg for arg in sys.argv if not arg.startswith("--local_rank"))
    try:
        print(f"rank {RANK} on {socket.gethostname()}: {why}. This machine's ranks exit too; the tags stay valid. "
              f"To continue without it: torchrun --nproc_per_node={local_world_size()} {command} "
              "--init_from=auto, with --nnodes for more than one machine", file=sys.stderr, flush=True)
    finally:
        os._exit(int(code))


def wait_for_reason(error):
    """Give the thread time to report why a collective failed: mostly because another rank has ended."""
    if isinstance(error, RuntimeError) and not EXITING.is_set():
        time.sleep(5)
