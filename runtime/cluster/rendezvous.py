"""How the nodes of launch_deepspeed.py find each other: by the name of node 0, or on one node
without a network."""

import argparse
import socket
import sys
import time
from typing import Any

WAIT_FOR_NODES_S = 900  # as torchrun waits for all nodes
DEFAULT_PORT = 29500  # torchrun's


def wait_for_host(host: str) -> None:
    """Return when this machine can resolve the name of a host. Raise ValueError after 15 minutes.

    The name of another container or job may appear after this one has started.
    """
    deadline = time.monotonic() + WAIT_FOR_NODES_S
    is_reported = False
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except socket.gaierror as error:
            why = error.strerror
        except UnicodeError:  # a part of the name is empty, or too long
            raise ValueError(f"--master_addr={host} is not the name of a host") from None

        # Say once whom it waits for, and look again each second
        if time.monotonic() > deadline:
            raise ValueError(f"--master_addr={host} can't be resolved ({why})")
        if not is_reported:
            print(
                f"waiting for --master_addr={host}, which can't be resolved ({why}): check its "
                "spelling, or give the IP address of node 0",
                file=sys.stderr,
                flush=True,
            )
            is_reported = True
        time.sleep(1)


def start_without_network(args: argparse.Namespace) -> None:
    """Change torchrun's arguments for one node, so that torchrun opens no port. Raises ValueError.

    Its own store listens on all network interfaces and asks nobody who he is. With --standalone, it
    also holds a pickle that torchrun loads, so any user of this machine could run code. The ranks
    meet in a file that only this user can open: see runtime/cluster/store.py.
    """
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    port = master_port(args.master_port)
    # torchrun finds a rendezvous by its name. --standalone would choose another
    rendezvous_handler_registry.register("one-node", one_node_handler(port))
    args.standalone = False
    args.rdzv_backend = "one-node"


def master_port(chosen: int) -> int:
    """Return MASTER_PORT, for scripts that open a store of their own: the user's, or any free one.

    chosen: --master_port. Raises ValueError if it is in use.
    """
    if chosen == DEFAULT_PORT:
        chosen = 0
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", chosen))
        except (OSError, OverflowError) as error:
            raise ValueError(f"--master_port={chosen} can't be used ({error})") from None
        return probe.getsockname()[1]


def one_node_handler(port: int) -> type:
    """Return torchrun's RendezvousHandler of one node: there is nobody to wait for."""
    from torch.distributed import HashStore
    from torch.distributed.elastic.rendezvous import (
        RendezvousHandler,
        RendezvousInfo,
        RendezvousStoreInfo,
    )

    class OneNode(RendezvousHandler):
        """What torchrun asks a rendezvous for."""

        use_agent_store = False  # the ranks have their own

        def __init__(self, parameters: Any) -> None:
            self.run_id = parameters.run_id

        def next_rendezvous(self) -> RendezvousInfo:
            address = RendezvousStoreInfo("127.0.0.1", port)
            return RendezvousInfo(HashStore(), 0, 1, address)  # node 0 of 1

        def get_backend(self) -> str:
            return "one-node"

        def get_run_id(self) -> str:
            return self.run_id

        def is_closed(self) -> bool:
            return False

        def set_closed(self) -> None:
            pass

        def num_nodes_waiting(self) -> int:
            return 0

        def shutdown(self) -> bool:
            return True

    return OneNode
