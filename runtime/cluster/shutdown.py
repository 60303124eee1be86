"""Leaving in time: all ranks stop after the same step, and none is left behind.

A run is asked to leave by SIGTERM, SIGUSR1, SIGHUP, Ctrl-C, a file STOP in its out_dir, or the end of its launcher. A
rank whose neighbor has died leaves at once, because it would wait in the next collective for ten minutes. Other
machines are runtime/cluster/machines.py's.

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

from runtime.cluster import machines as hosts
from runtime.cluster.machines import machine
from runtime.cluster.ranks import EXITING, PARTED

# Exit codes; 0 for the file STOP
SIGNAL_EXIT_CODES = {signal.SIGTERM: 143, signal.SIGUSR1: 138, signal.SIGINT: 130, signal.SIGHUP: 129}
EXIT_REASONS = {143: "SIGTERM, or the launcher's end", 138: "SIGUSR1", 130: "Ctrl-C",
                129: "SIGHUP: the terminal was closed", 0: "the file STOP"}
INTERVAL = 1.0  # seconds between two looks


class Shutdown:
    """From its making until part(), on every rank. Without signals it only watches the neighbors."""

    def __init__(self, signals=True):
        self.exit_code = None  # exit code to leave with, once asked to
        self.stop_file = None
        self.group = dist.new_group(backend="gloo")  # asking it costs the GPU nothing
        everyone = [None] * dist.get_world_size()
        here = machine()
        dist.all_gather_object(everyone, (here, os.getpid()), group=self.group)
        self.peers = {rank: psutil.Process(pid) for rank, (host, pid) in enumerate(everyone)
                      if host == here and pid != os.getpid()}
        self.launchers = launcher_processes()
        self.pipe, write_end = os.pipe()
        os.set_blocking(write_end, False)
        self.first_ctrl_c, self.reported = None, set()
        self.thread = threading.Thread(target=self._run, daemon=True)
        if signals:
            for number in SIGNAL_EXIT_CODES:
                if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # ignored under nohup
                    signal.signal(number, self.handle)
            signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        self.thread.start()
        if any(host != here for host, _ in everyone):
            hosts.watch([host for host, _ in everyone], self.group)

    def handle(self, number, _):
        """Python's handler of a signal, in the main thread. The watching thread reads the signal from the pipe; if that
        thread has died, restore the default handler and let it act."""
        if not self.thread.is_alive() and not EXITING.is_set():
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def watch_stop_file(self, stop_file):
        """Look for this file from now on. One that exists was meant for the run before: return why it cannot be
        removed, or None."""
        try:
            remove(stop_file)
        except FileNotFoundError:
            pass
        except OSError as error:
            return f"{stop_file} cannot be removed ({error.strerror}), and it would stop this run: remove it"
        self.stop_file = stop_file

    def _run(self):
        """The thread's whole life, until all ranks have passed the last barrier. What fails is reported once, and tried
        again: this thread is all that hears a signal."""
        while not PARTED.is_set():
            for check in (self.check_signals, self.check_stop_file, self.check_launchers, self.check_neighbors):
                try:
                    check()
                except Exception as error:
                    self.report(f"{check.__name__} fails and is tried again: {type(error).__name__}: {error}")
                    time.sleep(INTERVAL / 10)  # a failing check may not have waited

    def report(self, sentence):
        if sentence not in self.reported:
            self.reported.add(sentence)
            print(f"rank {dist.get_rank()}: {sentence}", file=sys.stderr, flush=True)

    def check_signals(self):
        """Wait INTERVAL at most for signals, and act on them."""
        if not select.select([self.pipe], [], [], INTERVAL)[0]:
            return
        for number in os.read(self.pipe, 64):
            if number == signal.SIGINT:
                self.first_ctrl_c = self.first_ctrl_c or time.monotonic()
                if time.monotonic() > self.first_ctrl_c + 0.3:  # nearer ones are one, sent twice
                    os._exit(130)
            if number in SIGNAL_EXIT_CODES:
                self.request_exit(SIGNAL_EXIT_CODES[number])

    def check_stop_file(self):
        """The file is the request; that it can be removed is not needed for it."""
        if self.stop_file and self.exit_code is None and os.path.lexists(self.stop_file):
            self.request_exit(0)
            try:
                remove(self.stop_file)
            except FileNotFoundError:
                pass
            except OSError as error:
                self.report(f"{self.stop_file} cannot be removed ({error.strerror}): remove it before the next start")

    def check_launchers(self):
        if not all(map(is_running, self.launchers)):
            self.request_exit(143)

    def check_neighbors(self):
        """End this rank if another one of this machine has died; a rank that has passed the last barrier has not."""
        dead = [rank for rank, process in self.peers.items() if not is_running(process)]
        if dead and not (EXITING.is_set() and PARTED.wait(10)):
            try:
                print(f"rank {dist.get_rank()}: rank {dead[0]} has died, so this one leaves too; what it said is above",
                      file=sys.stderr, flush=True)
            finally:
                os._exit(1)

    def request_exit(self, code):
        if self.exit_code is None:
            self.exit_code = code

    def agree(self, *flags):
        """(exit code that all ranks are to leave with, or None; each of the flags, where it is up on any rank)."""
        mine = [-1 if self.exit_code is None else self.exit_code, *map(bool, flags)]
        votes = torch.tensor(mine, dtype=torch.int64)
        if dist.get_world_size(self.group) > 1:
            dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self.group)
        code, *flags = votes.tolist()
        return (None if code < 0 else code), *map(bool, flags)


def remove(path):
    """Remove a file or an empty folder."""
    if os.path.isdir(path) and not os.path.islink(path):
        os.rmdir(path)
    else:
        os.remove(path)


def is_running(process):
    """Whether a psutil.Process still runs; one that has ended and waits for its parent does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def launcher_processes():
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
