"""Leaving in time: all ranks stop after the same step, and none is left behind.

A run is asked to leave by SIGTERM, SIGUSR1, Ctrl-C, a file STOP in its out_dir, or the end of its launcher. A rank
whose neighbour has died leaves at once, because it would wait in the next collective for ten minutes. Other machines
are runtime/hosts.py's.

Python runs signal handlers in the main thread, between two steps of its own, and the main thread may sit in a
collective for long. So a thread does the watching, and signals reach it through a pipe.
"""

import itertools
import os
import select
import signal
import sys
import threading
import time

import psutil
import torch
import torch.distributed as dist

from runtime import hosts
from runtime.dist import PARTING
from runtime.hosts import machine

CODES = {signal.SIGTERM: 143, signal.SIGUSR1: 138, signal.SIGINT: 130}  # exit codes; 0 for the file STOP
WHY = {143: "SIGTERM, or the launcher's end", 138: "SIGUSR1", 130: "Ctrl-C", 0: "the file STOP"}
INTERVAL = 1.0  # seconds between two looks


class Watch:
    """From its making until part(), on every rank. Without signals it only looks after the neighbours."""

    def __init__(self, signals=True):
        self.asked = None  # exit code to leave with, once asked to
        self.stop_file = None
        self.group = dist.new_group(backend="gloo")  # asking it costs the GPU nothing
        everyone = [None] * dist.get_world_size()
        here = machine()
        dist.all_gather_object(everyone, (here, os.getpid()), group=self.group)
        self.peers = {rank: psutil.Process(pid) for rank, (host, pid) in enumerate(everyone)
                      if host == here and pid != os.getpid()}
        self.launchers = launchers()
        self.pipe, write_end = os.pipe()
        os.set_blocking(write_end, False)
        if signals:
            for number in CODES:
                signal.signal(number, lambda *_: None)  # the pipe has it
            signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        threading.Thread(target=self.look, daemon=True).start()
        if any(host != here for host, _ in everyone):
            hosts.watch([host for host, _ in everyone], self.group)

    def heed(self, stop_file):
        """Look for this file from now on; one that is there already was meant for the run before."""
        if os.path.exists(stop_file):
            os.remove(stop_file)
        self.stop_file = stop_file

    def look(self):
        """The thread's whole life."""
        first_ctrl_c = None
        while not PARTING.is_set():
            if select.select([self.pipe], [], [], INTERVAL)[0]:
                for number in os.read(self.pipe, 64):
                    if number == signal.SIGINT:
                        first_ctrl_c = first_ctrl_c or time.monotonic()
                        if time.monotonic() > first_ctrl_c + 0.3:  # nearer ones are one, sent twice
                            os._exit(130)
                    self.ask(CODES.get(number))
            if self.stop_file and os.path.exists(self.stop_file):
                os.remove(self.stop_file)
                self.ask(0)
            if not all(map(alive, self.launchers)):
                self.ask(143)
            dead = [rank for rank, process in self.peers.items() if not alive(process)]
            if dead and not PARTING.is_set():
                print(f"rank {dist.get_rank()}: rank {dead[0]} has died, so this one leaves too; what it said is above",
                      file=sys.stderr, flush=True)
                os._exit(1)

    def ask(self, code):
        if self.asked is None:
            self.asked = code

    def together(self, *flags):
        """(exit code that all ranks are to leave with, or None; each of the flags, where it is up on any rank)."""
        mine = [-1 if self.asked is None else self.asked, *map(bool, flags)]
        votes = torch.tensor(mine, dtype=torch.int64)
        if dist.get_world_size(self.group) > 1:
            dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self.group)
        code, *flags = votes.tolist()
        return (None if code < 0 else code), *map(bool, flags)


def alive(process):
    """Whether a psutil.Process still runs; one that has ended and waits for its parent does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def launchers():
    """The processes whose end ends the run: torchrun, or deepspeed's two. A run without a launcher outlives its
    shell."""
    names = {"torchrun", "torch.distributed.run", "runtime.launch", "launch_deepspeed.py", "deepspeed",
             "deepspeed.launcher.runner", "deepspeed.launcher.launch"}

    def is_launcher(process):
        try:
            return names & {os.path.basename(arg) for arg in process.cmdline()}
        except psutil.Error:  # another user's process on a machine that hides them: no launcher of ours
            return False

    return list(itertools.takewhile(is_launcher, psutil.Process().parents()))
