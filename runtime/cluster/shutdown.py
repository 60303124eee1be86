"""Graceful shutdown: all ranks stop after the same step, and no process is left behind.

A signal, a file STOP in out_dir, or the end of the launcher stops a run. If that takes longer than LAUNCHER_GRACE_S
after the launcher's end, the ranks exit without saving. When a rank dies, the other ranks of its node exit at once. A
rank that hangs, or a node that is lost, is noticed by the next collective, after group_timeout() (join.py).

Python runs signal handlers in the main thread, which may wait in a collective. So a thread reads them from a pipe."""

import contextlib
import itertools
import os
import re
import select
import signal
import socket
import sys
import threading
import time

import psutil
import torch
import torch.distributed as dist

from runtime import explain
from runtime.cluster.join import group_timeout
from runtime.cluster.ranks import ALL_EXITING, EXITING, RANK
from runtime.cluster.store import is_launcher
from runtime.output import explain_uncaught

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)  # the exit code is 128 + the number
EXIT_REASONS = {143: "SIGTERM, or the launcher has exited", 138: "SIGUSR1", 130: "Ctrl-C",
                129: "SIGHUP: the terminal was closed", 0: "the file STOP",
                3: "too many consecutive steps were skipped: lower the learning rate", 4: "gradient norms rise"}
INTERVAL = 1.0  # seconds between two checks
LAUNCHER_GRACE_S = 50  # after the launcher's end, to finish a step and save


class Shutdown:
    """Watches the launcher and the other ranks of this node until shut_down(), and on request signals and a file.
    peers: what join_process_group() returned."""

    def __init__(self, peers):
        self.exit_code = None  # requested on this rank
        self.stop_file = None
        self.neighbors = {rank: psutil.Process(pid) for rank, (node, pid) in enumerate(peers)
                          if node == peers[RANK][0] and rank != RANK and psutil.pid_exists(pid)}  # containers hide some
        # torchrun, or the two processes of deepspeed: their end stops the run, that of a shell doesn't
        self.launchers = list(itertools.takewhile(is_launcher, psutil.Process().parents()))
        self.launcher_end = None  # when it was first missed
        self.pipe, self.write_end = os.pipe()
        os.set_blocking(self.write_end, False)
        self.first_ctrl_c, self.reported = None, set()
        explain_uncaught(explain_lost_rank)
        threading.Thread(target=self._run, daemon=True).start()

    def handle_signals(self):
        """From now on, a signal stops the run after a step. Before, it ends this process."""
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # ignored under nohup
                signal.signal(number, lambda *_: None)  # the thread acts
        signal.set_wakeup_fd(self.write_end, warn_on_full_buffer=False)

    def watch_stop_file(self, stop_file):
        """Stop the run when this file appears. One that exists already was meant for an earlier run."""
        if RANK == 0:
            with contextlib.suppress(OSError):  # not there, or it can't be removed
                os.remove(stop_file)
            self.stop_file = None if os.path.lexists(stop_file) else stop_file

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
        """Stop the run if the launcher has gone. If the run can't stop, exit, so that the next one finds no lock."""
        if all(map(is_running, self.launchers)):
            return
        self.request_exit(143)
        self.launcher_end = self.launcher_end or time.monotonic()
        if time.monotonic() > self.launcher_end + LAUNCHER_GRACE_S:
            self.report(f"the launcher ended {LAUNCHER_GRACE_S} s ago and this rank can't finish its step, so it exits")
            for process in self.neighbors.values():
                if is_running(process) and process.status() == psutil.STATUS_STOPPED:  # it can't end itself
                    process.kill()
            os._exit(143)

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
        dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        code, flag = votes.tolist()
        return (None if code < 0 else code), bool(flag)


def explain_lost_rank(error):
    """Print one line for an error of a collective and exit: a group can't be used after that. Ignore other errors."""
    try:
        explain(error)  # the hook of runtime/__init__.py would print into PyTorch's buffer, which is then dropped
    except SystemExit:
        os._exit(2)
    if isinstance(error, RuntimeError) and not EXITING.is_set() and re.search("gloo|NCCL|[Cc]onnection", str(error)):
        minutes, why = group_timeout().total_seconds() / 60, re.sub(r"^\[.*?\] ", "", str(error).splitlines()[0])
        print(f"rank {RANK} on {socket.gethostname()}: another rank has exited, or has not responded for {minutes:g} "
              f"min ({why}). See its own messages. Saved checkpoints are intact: start again with --init_from=auto. If "
              "a rank was only slow, set DEEPSPEED_TIMEOUT to more minutes", file=sys.stderr, flush=True)
        os._exit(1)


def is_running(process):
    """Return whether a psutil.Process is running; a zombie is not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
