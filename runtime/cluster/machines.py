"""Several machines: compared before the run, and watched over during it. A run on one machine needs none of this.

Before: the ranks have to be given the same settings, data and out_dir, and what one machine refuses, all refuse.

During: a machine that is cut off sends nothing, not even an end. Gloo's ranks waited for 15 minutes and 39 s then, and
torchrun noticed nothing at all. So the first rank of each machine holds a connection to rank 0's, over which nothing is
said: the systems' own keep-alive probes tell whether the other is there. The system answers them, also while Python is
busy, so that a long save or a compilation is never taken for an end. When a line breaks, the ranks at its ends say why
and leave, and their neighbours follow (runtime/cluster/shutdown.py).
"""

import datetime
import hashlib
import importlib.metadata
import json
import os
import secrets
import select
import shlex
import socket
import sys
import threading
import time

import psutil

from runtime.cluster.ranks import EXITING, PARTED, RANK, is_multi_node, local_world_size
from runtime.output import exit_with_error, explain_uncaught

ASKED = os.environ.get("MACHINE_TIMEOUT", "60")  # seconds without an answer after which a machine is lost
TIMEOUT = int(ASKED) if ASKED.isdecimal() else 0
LOST = 4  # exit code where a machine no longer answers; where its ranks have ended it is 1
PATIENCE = 600  # seconds in which all ranks have to come to the comparison, as DeepSpeed has it for its own start
STORE = []  # kept: with the deepspeed launcher rank 0 serves the others from it


def machine():
    """(name, what tells this machine from others): processes that have the same see each other and each other's
    network. Names alone may be shared, as containers' and cloned machines' are."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as f:
            marks = [f.read().strip(), *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net"))]
    except OSError:  # no Linux
        marks = []
    return socket.gethostname(), " ".join(marks)


# Before the run


def compare_machines(plan, settings, problems):
    """End all ranks, exit code 2, if any of them has problems (sentences), or if the machines differ in what has to be
    the same. All ranks call it, before there is a process group."""
    if is_multi_node():
        problems = problems_of_all(plan, settings, problems)
    if problems:
        exit_with_error("\n".join(problems))


def problems_of_all(plan, settings, problems):
    """What the ranks of all machines have found, and in what they differ: sentences, the same on all ranks."""
    if TIMEOUT < 6:
        problems = [*problems, f"MACHINE_TIMEOUT={ASKED} must be a whole number of seconds, 6 or more"]
    mark, out_dir = None, settings["out_dir"]
    if RANK == 0 and not problems and not settings["eval_only"] and settings["keep_last"]:
        try:
            mark = leave_mark(out_dir)
        except OSError as error:
            problems = [f"out_dir={out_dir} cannot be written ({error.strerror}): choose another with --out_dir=DIR"]
    here = {"host": socket.gethostname(), "problems": problems, "address": address_towards(os.environ["MASTER_ADDR"]),
            "facts": {} if problems else facts(plan, settings), "mark": mark and os.path.relpath(mark, out_dir)}
    try:
        everyone = gather(here)
        choose_interface([one["address"] for one in everyone])
        found, mark_seen = told(everyone) or differences(everyone), True
        if everyone[0]["mark"] and not found:
            mark_seen = seen(os.path.join(out_dir, everyone[0]["mark"]))
        hosts = [one["host"] for one, sees in zip(everyone, gather(mark_seen)) if not sees]
    finally:
        if mark:
            os.remove(mark)
    if hosts:
        found = [f"out_dir={out_dir} is not the same folder on {everyone[0]['host']} and "
                 f"{', '.join(dict.fromkeys(hosts))}, and the ranks' files of a tag belong together: name a folder "
                 "that all machines share with --out_dir=DIR"]
    return found


def gather(what):
    """Everyone's `what`, by rank; it has to go through JSON. Through the store that the process group will use."""
    from torch.distributed import PrefixStore, rendezvous

    patience = datetime.timedelta(seconds=PATIENCE)
    try:
        if not STORE:
            STORE.append(next(rendezvous("env://", timeout=patience))[0])
        STORE.append(PrefixStore(f"machines {len(STORE)}", STORE[0]))
        store, keys = STORE[-1], [str(rank) for rank in range(int(os.environ["WORLD_SIZE"]))]
        store.set(keys[RANK], json.dumps(what))
        wait_for(store, keys)
        everyone = [json.loads(one) for one in store.multi_get(keys)]
        store.add("read", 1)
        for _ in range(1000 if RANK == 0 else 0):  # 10 s at most: before it may end, and the store with it
            if store.add("read", 0) == len(keys):
                break
            time.sleep(0.01)
    except RuntimeError as error:
        exit_with_error(
            f"the machines did not come together within {PATIENCE // 60} minutes: look at what the others say; "
            f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} must be reached from all "
            f"({str(error).splitlines()[0]})")
    return everyone


def wait_for(store, keys):
    """Until all keys are there; after a minute, tell whose are not."""
    try:
        store.wait(keys, datetime.timedelta(seconds=60))
    except RuntimeError:
        missing = [key for key in keys if not store.check([key])]
        print(f"rank {RANK}: waiting for rank {', '.join(missing)}", file=sys.stderr, flush=True)
        store.wait(keys, datetime.timedelta(seconds=PATIENCE - 60))


def facts(plan, settings):
    """What has to be the same on all machines: {name: value}."""
    found = {f"--{name}": value for name, value in settings.items()}
    found |= {f"the version of {name}": importlib.metadata.version(name) for name in ("torch", "deepspeed")}
    found |= {f"the model's {name}": value for name, value in vars(plan.model).items()}
    found |= {f"the sha256 of data set {one.name}": fingerprint(one) for one in plan.datasets}
    return found | {"what the run begins with": plan.start.init_from}


def fingerprint(data):
    """Of what meta.json tells of a data set, and of 64 evenly spaced pieces of each of its files."""
    sha256 = hashlib.sha256(json.dumps(data.meta, sort_keys=True).encode())
    for name in sorted(data.meta["files"]):
        with open(os.path.join(data.folder, name), "rb") as f:
            size = os.fstat(f.fileno()).st_size
            for piece in range(64):
                f.seek(size * piece // 64)
                sha256.update(f.read(4096))
    return sha256.hexdigest()[:12]


def told(everyone):
    """All ranks' problems, each once; with its machine where not all have it."""
    found = {}
    for one in everyone:
        for problem in "\n".join(one["problems"]).splitlines():  # some are several sentences
            found.setdefault(problem, []).append(one["host"])
    return [problem if len(hosts) == len(everyone) else f"{', '.join(dict.fromkeys(hosts))}: {problem}"
            for problem, hosts in found.items()]


def differences(everyone):
    """In what the ranks' facts differ, a sentence each."""
    found = []
    for name in everyone[0]["facts"]:
        values = {}
        for one in everyone:
            values.setdefault(repr(one["facts"].get(name)), []).append(one["host"])
        if len(values) > 1:
            each = ", ".join(f"{value} on {' and '.join(dict.fromkeys(hosts))}" for value, hosts in values.items())
            found.append(f"the machines differ in {name.removeprefix('--')} ({each}): make it the same on all")
    return found


def leave_mark(out_dir):
    """The path of a new file that the others see if they share out_dir: in it, or in the folder it will be made in."""
    from runtime.files import nearest_existing_dir

    path = os.path.join(nearest_existing_dir(out_dir), f".shared-{secrets.token_hex(8)}")
    with open(path, "w"):
        return path


def seen(path):
    """Whether a file is there; a network's file system may take seconds to show it."""
    for _ in range(50):
        if os.path.exists(os.path.normpath(path)):  # on paper: out_dir itself need not be there
            return True
        time.sleep(0.2)
    return False


def address_towards(host):
    """This machine's own address on the way to another; '' if there is no way. Nothing is sent."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as s:
            s.connect(address)
            return s.getsockname()[0]
    except OSError:
        return ""


def choose_interface(addresses):
    """Have gloo use the interface that leads to the other machines. By itself it takes the one of the host's name,
    which on many systems is the loopback."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    mine = {address.address.partition("%")[0]: name for name, found in psutil.net_if_addrs().items()
            for address in found}
    for other in addresses:
        name = other not in mine and mine.get(address_towards(other))
        if name:
            os.environ["GLOO_SOCKET_IFNAME"] = name
            return


# During the run


def watch(machines, group):
    """Look after the other machines from now on. machines: of each rank, machine(). All ranks call it; returns at
    once, and a thread on the first rank of each machine does the rest."""
    import torch.distributed as dist

    firsts = {}  # of each machine, its first rank
    for rank, one in enumerate(machines):
        firsts.setdefault(tuple(one), rank)
    offer, server = [None], None
    if RANK == 0:
        server = socket.create_server(("", 0), backlog=len(firsts))
        own = [address.address for found in psutil.net_if_addrs().values() for address in found
               if address.family == socket.AF_INET and not address.address.startswith("127.")]
        offer = [([os.environ["MASTER_ADDR"], *own], server.getsockname()[1], secrets.token_hex(16))]
    dist.broadcast_object_list(offer, src=0, group=group)
    explain_uncaught(wait_for_reason)
    names = {rank: one[0] for one, rank in firsts.items()}
    if RANK == 0:
        threading.Thread(target=serve, args=(server, offer[0][2], names), daemon=True).start()
    elif RANK in names:
        threading.Thread(target=join, args=(*offer[0], names), daemon=True).start()


def serve(server, token, names):
    """Rank 0's thread: let the other machines' first ranks join, and look after all."""
    lines = {}
    while True:
        joining = [server] if len(lines) < len(names) - 1 else []
        for ready in select.select([*joining, *lines], [], [])[0]:
            if ready is not server:
                look(ready, lines[ready], lines)
                continue
            line, address = server.accept()
            line.settimeout(10)
            try:
                said = line.recv(64, socket.MSG_WAITALL).decode()
                if said[:32] != token:
                    raise ValueError
                line.sendall(token.encode())
                lines[keep_alive(line)] = f"{names[int(said[32:])]} ({address[0]})"
            except (OSError, ValueError):  # a stranger
                line.close()


def join(addresses, port, token, names):
    """The thread of another machine's first rank: find rank 0, and look after it."""
    for address in addresses:
        try:
            line = socket.create_connection((address, port), timeout=10)
            line.sendall(f"{token}{RANK:32d}".encode())
            if line.recv(32, socket.MSG_WAITALL).decode() == token:
                break
        except OSError:
            continue
    else:
        print(f"rank {RANK}: there is no way to port {port} of {' or '.join(addresses)}, so that nobody sees when a "
              "machine is lost: the run would wait for many minutes then", file=sys.stderr, flush=True)
        return
    keep_alive(line)
    address = line.getpeername()[0]
    while True:
        select.select([line], [], [])
        look(line, f"{names[0]} ({address})", {})


def keep_alive(line):
    """Have the system ask every so often whether the other end is there, and break the line if six times it is not."""
    every = TIMEOUT // 6
    line.settimeout(None)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", every), ("TCP_KEEPINTVL", every), ("TCP_KEEPCNT", 5)):
        if hasattr(socket, name):
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return line


def look(line, name, lines):
    """Something has come over a line: rank 0's last words, or its end. Ends this rank, unless all part anyway."""
    try:
        code, _, why = (line.recv(4096).decode() or f"1 the ranks of {name} have ended").partition(" ")
    except ConnectionResetError:
        code, why = 1, f"the ranks of {name} have ended"
    except OSError as error:
        code, why = LOST, f"{name} has not answered for {TIMEOUT} s ({error.strerror}): it is down, or cut off"
    if int(code) == 1 and EXITING.is_set() and PARTED.wait(60):
        time.sleep(60)  # part() has its own limit
        return
    for other in lines:
        try:
            other.send(f"{code} {why}".encode(), socket.MSG_DONTWAIT)
        except OSError:
            continue
    alone = [arg for arg in sys.argv if not arg.startswith("--local_rank")]
    try:
        print(f"rank {RANK} on {socket.gethostname()}: {why}. This machine's ranks leave too; the tags stand. "
              f"To go on without it: torchrun --nproc_per_node={local_world_size()} {shlex.join(alone)} "
              "--init_from=auto, with --nnodes for more than one machine", file=sys.stderr, flush=True)
    finally:
        os._exit(int(code))


def wait_for_reason(error):
    """A collective fails mostly because another rank has ended. The thread hears of that a second later, and reports
    more than a traceback does."""
    if isinstance(error, RuntimeError) and not EXITING.is_set():
        time.sleep(5)
