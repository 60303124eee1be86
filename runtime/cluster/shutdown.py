"""Graceful shutdown: all ranks stop after the same step, and no process is left behind.

A signal, a file STOP in out_dir, or the end of the launcher stops a run. When a rank dies, the other ranks of its node
exit at once, because the next collective would make them wait for ten minutes; heartbeat.py does this between nodes.

Python runs signal handlers in the main thread, which may wait in a collective. So a thread reads them from a pipe.
"""

import contextlib
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

from runtime.cluster.heartbeat import node_id, start_heartbeat
from runtime.cluster.ranks import ALL_EXITING, EXITING, RANK

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)  # the exit code is 128 + the number
EXIT_REASONS = {143: "SIGTERM, or the launcher has exited", 138: "SIGUSR1", 130: "Ctrl-C",
                129: "SIGHUP: the terminal was closed", 0: "the file STOP",
                3: "too many consecutive steps were skipped: lower learning_rate"}
INTERVAL = 1.0  # seconds between two checks
LAUNCHERS = {"torchrun", "torch.distributed.run", "runtime.launch", "launch_deepspeed.py", "deepspeed",
             "deepspeed.launcher.runner", "deepspeed.launcher.launch"}


class Shutdown:
    """Watches for reasons to stop, on every rank, until shut_down(). With signals=False it only watches other ranks."""

    def __init__(self, signals=True):
        self.exit_code = None  # requested on this rank
        self.stop_file = None
        self.group = dist.new_group(backend="gloo")  # its collectives cost no GPU time
        node, ranks = node_id(), [None] * dist.get_world_size()
        dist.all_gather_object(ranks, (node, os.getpid()), group=self.group)
        self.neighbors = {rank: psutil.Process(pid) for rank, (other, pid) in enumerate(ranks)
                          if other == node and pid != os.getpid()}
        # torchrun, or the two processes of deepspeed: their end stops the run, that of a shell doesn't
        self.launchers = list(itertools.takewhile(is_launcher, psutil.Process().parents()))
        self.pipe, write_end = os.pipe()
        os.set_blocking(write_end, False)
        self.first_ctrl_c, self.reported = None, set()
        if signals:
            for number in SIGNALS:
                if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # ignored under nohup
                    signal.signal(number, lambda *_: None)  # the thread acts
            signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        threading.Thread(target=self._run, daemon=True).start()
        if any(other != node for other, _ in ranks):
            start_heartbeat([other for other, _ in ranks], self.group)

    def watch_stop_file(self, stop_file):
        """Stop the run when this file appears. One that exists already was meant for an earlier run."""
        if RANK == 0:
            with contextlib.suppress(OSError):  # not there, or it can't be removed
                os.remove(stop_file)
            self.stop_file = stop_file

    def _run(self):
        """Run the checks. One that fails is reported once and tried again, because nothing else handles signals."""
        while not ALL_EXITING.is_set():
            for check in (self.check_signals, self.check_stop_file, self.check_launchers, self.check_neighbors):
                try:
                    check()
                except Exception as error:
                    self.report(f"{check.__name__} failed ({type(error).__name__}: {error}); trying again")
                    time.sleep(INTERVAL / 10)  # a failing check may not have waited

    def report(self, message):
        if message not in self.reported:
            self.reported.add(message)
            print(f"rank {RANK}: {message}", file=sys.stderr, flush=True)

    def check_signals(self):
        """Wait at most INTERVAL for signals, and act on them."""
        if not select.select([self.pipe], [], [], INTERVAL)[0]:
            return
        for number in os.read(self.pipe, 64):
            if number == signal.SIGINT:
                self.first_ctrl_c = self.first_ctrl_c or time.monotonic()
                if time.monotonic() > self.first_ctrl_c + 0.3:  # one Ctrl-C may arrive twice within that time
                    os._exit(130)
            if number in SIGNALS:
                self.request_exit(128 + number)

    def check_stop_file(self):
        if self.stop_file and self.exit_code is None and os.path.lexists(self.stop_file):
            self.request_exit(0)
            with contextlib.suppress(OSError):  # a folder, or another user's file
                os.remove(self.stop_file)

    def check_launchers(self):
        if not all(map(is_running, self.launchers)):
            self.request_exit(143)

    def check_neighbors(self):
        """Exit if another rank of this node has died. A rank that has passed the last barrier has not."""
        dead = [rank for rank, process in self.neighbors.items() if not is_running(process)]
        if dead and not (EXITING.is_set() and ALL_EXITING.wait(10)):
            self.report(f"rank {dead[0]} has died, so this rank exits too; see the error message above")
            os._exit(1)

    def request_exit(self, code):
        if self.exit_code is None:
            self.exit_code = code

    def agree(self, flag):
        """Return (the exit code with which all ranks should stop, or None; whether `flag` is true on any rank)."""
        votes = torch.tensor([-1 if self.exit_code is None else self.exit_code, bool(flag)])
        dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self.group)
        code, flag = votes.tolist()
        return (None if code < 0 else code), bool(flag)


def is_running(process):
    """Return whether a psutil.Process is running; a zombie is not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def is_launcher(process):
    try:
        return bool(LAUNCHERS & {os.path.basename(arg) for arg in process.cmdline()})
    except psutil.Error:  # another user's process that this system hides: not our launcher
        return False
