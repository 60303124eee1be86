"""Graceful shutdown: all ranks stop after the same step, and no process is left behind.

A signal, a file STOP in out_dir, or the end of the launcher stops a run. If that takes longer than
LAUNCHER_GRACE_S after the launcher's end, the ranks exit without saving. When a rank dies, the
other ranks of its node exit at once. A rank that hangs, or a node that is lost, is noticed by the
next collective, after group_timeout() (join.py).

Before the first step there is nothing to save: a signal ends its process, and STOP ends the run at
the next exit_if_requested(). From then on, the ranks agree: after each step, and about twice a
second in an evaluation or a sample, in a StopCheck.
"""

import itertools
import math
import os
import re
import socket
import sys
import threading
import time

import psutil
import torch
import torch.distributed as dist

from runtime import explain
from runtime.cluster.join import group_timeout
from runtime.cluster.ranks import ALL_EXITING, EXITING, RANK, print0, shut_down
from runtime.cluster.requests import NOTHING_TO_SAVE, STOP_REASONS, SignalWatch, StopFile
from runtime.cluster.store import is_launcher
from runtime.output import Explainer, explain_uncaught

EXIT_REASONS = {
    **STOP_REASONS,
    3: "too many consecutive steps were skipped: lower the learning rate",
    4: "gradient norms rise",
}
LAUNCHER_ENDED = 'the launcher has exited before its ranks: wait for their line "saved iter_..."'
INTERVAL = 1.0  # seconds between two checks
AGREE_EVERY_S = 0.5  # seconds between two questions of a StopCheck
LAUNCHER_GRACE_S = 50  # after the launcher's end, to finish a step and save
LAST_BARRIER_S = 10  # for this rank to pass the last barrier, after another has


class Shutdown:
    """Watches the launcher and the other ranks of this node until shut_down(), and on request
    signals and a file.

    peers: what join_process_group() returned. signals: the SignalWatch of a script that saves when
    it is stopped.
    """

    def __init__(self, peers: list, signals: SignalWatch | None = None) -> None:
        # What stops the run
        self.exit_code: int | None = None  # requested on this rank
        self.announced = False
        self.signals = signals
        self.stop_file: StopFile | None = None
        self.can_save = False

        # Whom it watches
        self.neighbors = neighbors_of(peers)
        # torchrun, or the two processes of deepspeed: their end stops the run, a shell's doesn't
        parents = psutil.Process().parents()
        self.launchers = list(itertools.takewhile(is_launcher, parents))
        self.launcher_end: float | None = None  # when it was first missed
        self.reported: set[str] = set()

        # From here on, gloo's and NCCL's threads run: an error of this rank has to end all of it
        explain_uncaught(Explainer.LOST_RANK, explain_lost_rank)
        explain_uncaught(Explainer.USER_ERROR, explain_and_end)
        threading.Thread(target=self._run, daemon=True).start()

    def begin_training(self) -> None:
        """From now on, a signal stops the run after its step, and the run saves."""
        self.can_save = True
        if self.signals is not None:
            self.signals.act = self.on_signal

    def on_signal(self, number: int) -> None:
        """Ask for a stop, on the thread of the SignalWatch."""
        self.request_exit(128 + number)

    def watch_stop_file(self, stop_file: StopFile) -> None:
        """Stop the run when this file appears, or has appeared since stop_file was created."""
        # Rank 0 alone looks for the file, and the others hear of it in agree()
        if RANK == 0:
            stop_file.remove_earlier()
            self.stop_file = stop_file

    def _run(self) -> None:
        """Run the checks.

        One that fails is reported once and tried again, because nothing else makes it.
        """
        while not ALL_EXITING.wait(INTERVAL):
            for check in (self.check_stop_file, self.check_launchers, self.check_neighbors):
                try:
                    check()
                except Exception as error:
                    reason = f"{type(error).__name__}: {error}"
                    self.report(f"{check.__name__} failed ({reason}); trying again")

    def report(self, message: str) -> None:
        """Print a message of this rank to stderr, once."""
        if message not in self.reported:
            self.reported.add(message)
            print(f"rank {RANK}: {message}", file=sys.stderr, flush=True)

    def check_stop_file(self) -> None:
        """Ask for a stop if the file STOP has appeared."""
        if self.stop_file and self.exit_code is None and self.stop_file.has_appeared():
            self.request_exit(0)
            self.stop_file.remove()

    def check_launchers(self) -> None:
        """Stop the run if the launcher has gone.

        If the run can't stop, exit, so that the next one finds no lock.
        """
        if all(map(is_running, self.launchers)):
            return
        # Before the first step there is nothing to wait for
        if self.signals and not self.can_save:
            self.announce(f"stop requested (the launcher has exited): {NOTHING_TO_SAVE}")
            os._exit(143)

        # Save after this step. A signal may have asked for a stop already: then this does nothing
        self.request_exit(143, LAUNCHER_ENDED)
        if self.launcher_end is None:
            self.launcher_end = time.monotonic()
        if time.monotonic() <= self.launcher_end + LAUNCHER_GRACE_S:
            return

        # The step doesn't end, so nothing can be saved. A stopped process can't end itself
        self.report(
            f"the launcher ended {LAUNCHER_GRACE_S} s ago and this rank can't finish its step, so "
            "it exits"
        )
        for process in self.neighbors.values():
            if is_running(process) and process.status() == psutil.STATUS_STOPPED:
                process.kill()
        os._exit(143)

    def check_neighbors(self) -> None:
        """Exit if another rank of this node has died.

        A rank that has passed the last barrier has not.
        """
        # A rank of another node is noticed when a collective with it fails
        dead = [rank for rank, process in self.neighbors.items() if not is_running(process)]
        if not dead:
            return
        # At the end of a run, it may have left a moment before this rank
        if EXITING.is_set() and ALL_EXITING.wait(LAST_BARRIER_S):
            return
        self.report(f"rank {dead[0]} has died, so this rank exits too; see the error message above")
        os._exit(1)

    def request_exit(self, code: int, reason: str | None = None) -> None:
        """Ask for a stop of all ranks with this exit code. The first request of a rank counts."""
        if self.exit_code is not None or ALL_EXITING.is_set():
            return

        # All ranks hear of it in agree(). The line says that the request has arrived
        self.exit_code = code
        if self.signals:
            self.announce(f"stop requested ({reason or EXIT_REASONS[code]})")

    def announce(self, text: str) -> None:
        """Print once, on rank 0, that the run stops."""
        if not self.announced:
            self.announced = True
            print0(text)

    def agree(self, flag: float = 0) -> tuple[int | None, float]:
        """Return the exit code with which all ranks should stop, or None, and the largest `flag` of
        the ranks. All ranks call this."""
        # The exit code, if one is requested on this rank
        vote = -1  # to go on
        if self.exit_code is not None:
            vote = self.exit_code

        # In one collective: this is done after each step
        votes = torch.tensor([vote, flag], dtype=torch.float64)
        dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        highest, flag = votes.tolist()
        if highest < 0:
            return None, flag

        # Where ranks ask for different codes, the largest counts
        code = int(highest)
        self.announce(f"stop requested ({EXIT_REASONS[code]})")
        return code, flag

    def exit_if_requested(self) -> None:
        """Exit on all ranks if a stop is requested, before the first step. All ranks call this."""
        # The thread looks only once a second
        self.check_stop_file()
        code, _ = self.agree()
        if code is not None:
            print0(f"exiting: {NOTHING_TO_SAVE}")
            shut_down(code)


class StopCheck:
    """Ends a long part of a run when a stop is requested. All ranks make one, and ask it after each
    batch or token.

    It asks the other ranks about once in AGREE_EVERY_S. The batches between are counted, because
    all ranks have to ask at the same one: as many as the slowest rank makes in that time.
    """

    def __init__(self, shutdown: Shutdown) -> None:
        self.shutdown = shutdown
        self.batches = 0  # since the last question
        self.next_question = 1
        self.began = time.monotonic()

    def is_requested(self) -> bool:
        """Return whether all ranks should stop here."""
        # Most calls only count, because a collective can take longer than a batch
        self.batches += 1
        if self.batches < self.next_question:
            return False

        # The ranks agree on a stop, and on the time that the slowest of them takes for a batch
        seconds_per_batch = (time.monotonic() - self.began) / self.batches
        code, slowest = self.shutdown.agree(seconds_per_batch)
        self.next_question = max(1, math.ceil(AGREE_EVERY_S / max(slowest, 1e-6)))
        self.batches = 0
        self.began = time.monotonic()
        return code is not None


def neighbors_of(peers: list) -> dict[int, psutil.Process]:
    """Return {rank: its process} of the other ranks on this node, as far as a container shows them.

    peers: as for Shutdown.
    """
    # A node is a host name and its interfaces: containers of one host may have the same name
    own_node = peers[RANK][0]
    found = {}
    for rank, (node, pid) in enumerate(peers):
        if rank != RANK and node == own_node and psutil.pid_exists(pid):
            found[rank] = psutil.Process(pid)
    return found


def explain_and_end(error: BaseException) -> str | None:
    """Do as explain() does, but end the process without tearing down modules.

    exit_process() says why.
    """
    try:
        return explain(error)
    except SystemExit:
        os._exit(2)


def explain_lost_rank(error: BaseException) -> None:
    """Print one line for an error of a collective and exit: a group can't be used after that.

    Ignore other errors.
    """
    # The libraries raise a RuntimeError for everything, so the text has to tell
    is_of_collective = re.search("gloo|NCCL|[Cc]onnection", str(error))
    if not isinstance(error, RuntimeError) or EXITING.is_set() or not is_of_collective:
        return

    # Without the place in PyTorch's source, [../gloo/transport/tcp/pair.cc:534]
    minutes = group_timeout().total_seconds() / 60
    why = re.sub(r"^\[.*?\] ", "", str(error).splitlines()[0])
    print(
        f"rank {RANK} on {socket.gethostname()}: another rank has exited, or has not responded for "
        f"{minutes:g} min ({why}). See its own messages. Saved checkpoints are intact: start again "
        "with --init_from=auto. If a rank was only slow, set DEEPSPEED_TIMEOUT to more minutes",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)


def is_running(process: psutil.Process) -> bool:
    """Return whether a process is running. A zombie is not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
