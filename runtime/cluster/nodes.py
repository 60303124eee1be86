"""Compare the nodes before the run: all need the same settings, data and out_dir, and all exit if one has a problem."""

import datetime
import functools
import hashlib
import importlib.metadata
import json
import os
import socket
import sys
import tempfile
import time
from contextlib import ExitStack

import psutil
from torch.distributed import PrefixStore, rendezvous
from torch.distributed.elastic.utils.store import get_all

from runtime.cluster.ranks import RANK, local_world_size
from runtime.files import nearest_existing_dir
from runtime.output import exit_with_error

RENDEZVOUS_TIMEOUT_S = 600  # until all ranks must have joined; DeepSpeed's own start waits as long


def compare_nodes(plan, settings, problems):
    """Exit with code 2 if any rank has problems (messages), or if the nodes differ in something that must be the same.
    All ranks call this, before there is a process group."""
    if "RANK" in os.environ and local_world_size() < int(os.environ["WORLD_SIZE"]):
        problems = gather_problems(plan, settings, problems)
    if problems:
        exit_with_error("\n".join(problems))


def gather_problems(plan, settings, problems):
    """Return the problems of all ranks and the differences between the nodes: messages, the same on all ranks."""
    mine = {"host": socket.gethostname(), "problems": problems, "address": local_address_for(os.environ["MASTER_ADDR"]),
            "fingerprint": {} if problems else run_fingerprint(plan, settings)}
    out_dir = settings["out_dir"]
    with ExitStack() as stack:
        if RANK == 0 and not problems and not settings["eval_only"] and settings["keep_last"]:
            # A temporary file that the other nodes see if they share out_dir
            probe = stack.enter_context(tempfile.NamedTemporaryFile(prefix=".shared-",
                                                                    dir=nearest_existing_dir(out_dir)))
            mine["probe"] = os.path.relpath(probe.name, out_dir)
        ranks = gather("problems", mine)
        set_gloo_interface([rank["address"] for rank in ranks])
        found, sees_probe = merge_problems(ranks) or mismatches(ranks), True
        if "probe" in ranks[0] and not found:
            sees_probe = wait_for_file(os.path.join(out_dir, ranks[0]["probe"]))
        hosts = [rank["host"] for rank, sees in zip(ranks, gather("probe", sees_probe)) if not sees]
    if hosts:
        found = [f"out_dir={out_dir} is not the same folder on {ranks[0]['host']} and "
                 f"{', '.join(dict.fromkeys(hosts))}: choose one that all nodes share with --out_dir=DIR"]
    return found


@functools.cache  # keeps it alive: with the deepspeed launcher, rank 0 hosts it for the others
def rendezvous_store():
    """Return the store that the process group will use."""
    return next(rendezvous("env://", timeout=datetime.timedelta(seconds=RENDEZVOUS_TIMEOUT_S)))[0]


def gather(name, value):
    """Return the values of all ranks, which must be JSON. All ranks call this, once per name."""
    try:
        store = PrefixStore(name, rendezvous_store())
        keys = [str(rank) for rank in range(int(os.environ["WORLD_SIZE"]))]
        store.set(keys[RANK], json.dumps(value))
        try:
            store.wait(keys, datetime.timedelta(seconds=60))
        except RuntimeError:
            missing = [key for key in keys if not store.check([key])]
            print(f"rank {RANK}: waiting for rank {', '.join(missing)}", file=sys.stderr, flush=True)
        return [json.loads(one) for one in get_all(store, RANK, "", len(keys))]
    except RuntimeError as error:
        exit_with_error(f"the nodes did not connect within {RENDEZVOUS_TIMEOUT_S // 60} minutes "
                        f"({str(error).splitlines()[0]}): check the output of the other nodes, and that all nodes can "
                        f"reach {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}")


def run_fingerprint(plan, settings):
    """Return what must be the same on all nodes: {name: value}."""
    found = {f"--{name}": value for name, value in settings.items()}
    found |= {f"the version of {name}": importlib.metadata.version(name) for name in ("torch", "deepspeed")}
    found |= {f"the model's {name}": value for name, value in vars(plan.model).items()}
    for data in plan.datasets:  # meta.json has the size and hash of each file
        meta = json.dumps(data.meta, sort_keys=True).encode()
        found[f"the hash of dataset {data.name}"] = hashlib.sha256(meta).hexdigest()[:12]
    return found | {"the source of the weights": plan.start.init_from}


def merge_problems(ranks):
    """Return the problems of all ranks, each once, with the host name if not all ranks have it."""
    found = {}
    for rank in ranks:
        for problem in "\n".join(rank["problems"]).splitlines():  # one may hold several lines
            found.setdefault(problem, []).append(rank["host"])
    return [problem if len(hosts) == len(ranks) else f"{', '.join(dict.fromkeys(hosts))}: {problem}"
            for problem, hosts in found.items()]


def mismatches(ranks):
    """Return a message for each difference between the fingerprints of the ranks."""
    found = []
    for name in ranks[0]["fingerprint"]:
        values = {}
        for rank in ranks:
            values.setdefault(repr(rank["fingerprint"].get(name)), []).append(rank["host"])
        if len(values) > 1:
            each = ", ".join(f"{value} on {' and '.join(dict.fromkeys(hosts))}" for value, hosts in values.items())
            found.append(f"the nodes differ in {name.removeprefix('--')} ({each}): make it the same on all")
    return found


def wait_for_file(path):
    """Return whether a file exists. A network file system may take seconds to show it."""
    for _ in range(50):
        if os.path.exists(os.path.normpath(path)):  # normalized, because out_dir itself may not exist yet
            return True
        time.sleep(0.2)
    return False


def local_address_for(host):
    """Return this node's own address on the route to another host, or '' if there is no route. Sends nothing."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as s:
            s.connect(address)
            return s.getsockname()[0]
    except OSError:
        return ""


def set_gloo_interface(addresses):
    """Have gloo use the interface that leads to the other nodes. Its default is the host name's, often the loopback."""
    mine = {address.address.partition("%")[0]: name for name, found in psutil.net_if_addrs().items()
            for address in found}
    routes = (mine.get(local_address_for(other)) for other in addresses if other not in mine)
    if name := next(filter(None, routes), None):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
