"""Shutdown: all ranks stop after the same step, and none is left behind.

A signal, a file STOP in out_dir, or the launcher's end stops a run. When a rank dies, the others on its machine exit at
once: in the next collective they would wait for ten minutes. For other machines there is heartbeat.py. A signal handler
waits for the main thread, which may wait in a collective. So a thread watches, and a pipe brings it the signals.
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

from runtime.cluster.heartbeat import machine_id, start_heartbeat
from runtime.cluster.ranks import ALL_EXITING, EXITING, RANK, exit_together

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)  # the exit code is 128 + the number
EXIT_REASONS = {143: "SIGTERM, or the launcher's end", 138: "SIGUSR1", 130: "Ctrl-C",
                129: "SIGHUP: the terminal was closed", 0: "the file STOP"}
INTERVAL = 1.0  # seconds between two checks
LAUNCHERS = {"torchrun", "torch.distributed.run", "runtime.launch", "launch_deepspeed.py", "deepspeed",
             "deepspeed.launcher.runner", "deepspeed.launcher.launch"}


class Shutdown:
    """Watches from its making until shut_down(), on every rank. Without signals it only watches the other ranks."""

    def __init__(self, signals=True):
        self.exit_code = None  # what this rank was asked to exit with
        self.stop_file = None
        self.group = dist.new_group(backend="gloo")  # its collectives cost the GPU nothing
        machine, ranks = machine_id(), [None] * dist.get_world_size()
        dist.all_gather_object(ranks, (machine, os.getpid()), group=self.group)
        self.neighbors = {rank: psutil.Process(pid) for rank, (other, pid) in enumerate(ranks)
                          if other == machine and pid != os.getpid()}
        self.launchers = launcher_processes()
        self.pipe, write_end = os.pipe()
        os.set_blocking(write_end, False)
        self.first_ctrl_c, self.reported = None, set()
        self.thread = threading.Thread(target=self._run, daemon=True)
        if signals:
            for number in SIGNALS:
                if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # ignored under nohup
                    signal.signal(number, self.handle)
            signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        self.thread.start()
        if any(other != machine for other, _ in ranks):
            start_heartbeat([other for other, _ in ranks], self.group)

    def handle(self, number, _):
        """Python's handler, in the main thread: if the watching thread has died, let the default handler act."""
        if not self.thread.is_alive() and not EXITING.is_set():
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def watch_stop_file(self, stop_file):
        """Stop the run when this file appears. One that exists was meant for an earlier run, and is removed; if that is
        not possible, exit with code 2. All ranks call it."""
        problem = remove(stop_file) if RANK == 0 else None
        exit_together([f"{problem}, and it would stop this run: remove it"] if problem else [])
        self.stop_file = stop_file if RANK == 0 else None

    def _run(self):
        """The thread's target. A check that fails is reported once and tried again: nothing else gets signals."""
        while not ALL_EXITING.is_set():
            for check in (self.check_signals, self.check_stop_file, self.check_launchers, self.check_neighbors):
                try:
                    check()
                except Exception as error:
                    self.report(f"{check.__name__} fails and is tried again: {type(error).__name__}: {error}")
                    time.sleep(INTERVAL / 10)  # a failing check may not have waited

    def report(self, sentence):
        if sentence not in self.reported:
            self.reported.add(sentence)
            print(f"rank {RANK}: {sentence}", file=sys.stderr, flush=True)

    def check_signals(self):
        """Wait INTERVAL at most for signals, and act on them."""
        if not select.select([self.pipe], [], [], INTERVAL)[0]:
            return
        for number in os.read(self.pipe, 64):
            if number == signal.SIGINT:
                self.first_ctrl_c = self.first_ctrl_c or time.monotonic()
                if time.monotonic() > self.first_ctrl_c + 0.3:  # nearer ones are one, sent twice
                    os._exit(130)
            if number in SIGNALS:
                self.request_exit(128 + number)

    def check_stop_file(self):
        """The file is the request, even where it cannot be removed."""
        if self.stop_file and self.exit_code is None and os.path.lexists(self.stop_file):
            self.request_exit(0)
            if problem := remove(self.stop_file):
                self.report(f"{problem}: remove it before the next start")

    def check_launchers(self):
        if not all(map(is_running, self.launchers)):
            self.request_exit(143)

    def check_neighbors(self):
        """Exit if another rank of this machine has died; a rank that has passed the last barrier has not."""
        dead = [rank for rank, process in self.neighbors.items() if not is_running(process)]
        if dead and not (EXITING.is_set() and ALL_EXITING.wait(10)):
            try:
                self.report(f"rank {dead[0]} has died, so this one exits too; see its output above")
            finally:
                os._exit(1)

    def request_exit(self, code):
        if self.exit_code is None:
            self.exit_code = code

    def agree(self, *flags):
        """Return (the exit code with which all ranks are to stop, or None; each flag, True if it is on any rank)."""
        votes = torch.tensor([-1 if self.exit_code is None else self.exit_code, *map(bool, flags)])
        if dist.get_world_size(self.group) > 1:
            dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self.group)
        code, *flags = votes.tolist()
        return (None if code < 0 else code), *map(bool, flags)


def remove(path):
    """Remove a file or an empty folder; return why that is not possible, or None."""
    try:
        (os.rmdir if os.path.isdir(path) and not os.path.islink(path) else os.remove)(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        return f"{path} cannot be removed ({error.strerror})"


def is_running(process):
    """Return whether a psutil.Process runs; a zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def launcher_processes():
    """Return the processes whose end ends the run: torchrun, or deepspeed's two, but not a shell."""
    def is_launcher(process):
        try:
            return LAUNCHERS & {os.path.basename(arg) for arg in process.cmdline()}
        except psutil.Error:  # another user's process on a machine that hides them: no launcher of ours
            return False

    return list(itertools.takewhile(is_launcher, psutil.Process().parents()))
