"""Heartbeat: notice during the run that another node is gone.

A node that loses power or its network doesn't close its connections: without this, gloo's ranks waited for 15 minutes
and 39 s. So the first rank of each node keeps an idle connection to rank 0. The kernel answers TCP's keep-alive probes,
even while Python is busy with a long save. When a connection breaks, the ranks at both ends print why and exit, and the
other ranks of their nodes follow (shutdown.py). Before that, rank 0 tells the other nodes which one is lost.
"""

import contextlib
import os
import secrets
import shlex
import socket
import sys
import threading
import time

from runtime.cluster.ranks import ALL_EXITING, EXITING, RANK, broadcast_from_rank0, local_world_size
from runtime.output import explain_uncaught

NODE_TIMEOUT_S = int(os.environ.get("NODE_TIMEOUT_S", "60"))  # seconds without a response until a node counts as lost
EXIT_NODE_LOST = 4  # exit code if a node stops responding; if its ranks have exited, it is 1


def node_id():
    """Return (host name, id). Processes with the same id can see each other. Cloned hosts may share a name."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            ids = [file.read().strip(), *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net"))]
    except OSError:  # not Linux
        ids = []
    return socket.gethostname(), " ".join(ids)


def start_heartbeat(nodes, group):
    """Connect the first rank of each node to rank 0, in a thread. nodes: each rank's node_id(). All ranks call this."""
    names = {nodes.index(node): node[0] for node in nodes}  # {first rank of a node: host name}
    server = socket.create_server(("", 0), backlog=len(names)) if RANK == 0 else None
    port, token = broadcast_from_rank0(server and (server.getsockname()[1], secrets.token_hex(16)), group)
    # Give the thread time to report why a collective failed: usually because another rank has exited
    explain_uncaught(lambda error: time.sleep(5) if isinstance(error, RuntimeError) and not EXITING.is_set() else None)
    if RANK == 0:
        threading.Thread(target=heartbeat_server, args=(server, token, names), daemon=True).start()
    elif RANK in names:
        threading.Thread(target=heartbeat_client, args=(port, token, names[0]), daemon=True).start()


def heartbeat_server(server, token, names):
    """Rank 0's thread: accept the first ranks of the other nodes, and watch each connection in a thread."""
    connections = []
    while len(connections) < len(names) - 1:
        conn, address = server.accept()
        conn.settimeout(10)
        try:
            greeting = conn.recv(64, socket.MSG_WAITALL).decode()
            if greeting[:32] != token:
                raise ValueError
            name = names[int(greeting[32:])]
        except (OSError, ValueError):  # not one of our ranks
            conn.close()
            continue
        connections.append(conn)
        threading.Thread(target=wait_for_end, args=(conn, f"{name} ({address[0]})", connections), daemon=True).start()


def heartbeat_client(port, token, name):
    """Another first rank's thread: connect to rank 0's node, which holds MASTER_ADDR, and watch the connection."""
    address = os.environ["MASTER_ADDR"]
    try:
        conn = socket.create_connection((address, port), timeout=10)
        conn.sendall(f"{token}{RANK:32d}".encode())
    except OSError as error:
        print(f"rank {RANK}: cannot connect to {address}:{port} ({error}), so a lost node will not be noticed and the "
              "run may hang: open all ports between the nodes", file=sys.stderr, flush=True)
        return
    wait_for_end(conn, f"{name} ({conn.getpeername()[0]})")


def wait_for_end(conn, name, connections=()):
    """Wait until the connection ends, and exit, unless all ranks are exiting. A node that answers no probe for
    NODE_TIMEOUT_S is lost. connections: the nodes that rank 0 then tells about it."""
    conn.settimeout(None)
    conn.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    interval = max(1, NODE_TIMEOUT_S // 6)
    for option, value in ((socket.TCP_KEEPIDLE, interval), (socket.TCP_KEEPINTVL, interval), (socket.TCP_KEEPCNT, 5)):
        conn.setsockopt(socket.IPPROTO_TCP, option, value)
    code, why = 1, f"the ranks on {name} have exited: see their error message"
    try:
        if lost := conn.recv(1024).decode():
            code, why = EXIT_NODE_LOST, lost
    except ConnectionResetError:
        pass
    except OSError as error:
        code = EXIT_NODE_LOST
        why = f"{name} has not responded for {NODE_TIMEOUT_S} s ({error.strerror}): check its power and its network"
        for other in connections:
            with contextlib.suppress(OSError):
                other.send(why.encode())
    if code == 1 and EXITING.is_set() and ALL_EXITING.wait(60):
        return
    command = shlex.join(arg for arg in sys.argv if not arg.startswith("--local_rank"))
    print(f"rank {RANK} on {socket.gethostname()}: {why}. Stopping this node's ranks; saved checkpoints are intact. To "
          f"continue without that node: torchrun --nproc_per_node={local_world_size()} {command} --init_from=auto, "
          "plus --nnodes if more than one node is left", file=sys.stderr, flush=True)
    os._exit(code)
