"""What asks a run to stop: signals and the file STOP, watched from the first line of a script on.

Python runs signal handlers in the main thread, which may wait in a collective, or in C code. So a
thread reads the signals from a pipe. This module imports nothing that takes long.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
# The exit codes of runs that were asked to stop: 128 + the signal's number, or 0
STOP_REASONS = {
    143: "SIGTERM, or the launcher has exited",
    138: "SIGUSR1",
    130: "Ctrl-C",
    129: "SIGHUP: the terminal was closed",
    0: "the file STOP",
}
NOTHING_TO_SAVE = "no step has been made, so nothing is saved"
ONE_CTRL_C_S = 0.3  # one Ctrl-C may arrive twice within that time


class SignalWatch:
    """Reads the signals of this process, and calls act(number) for each on a thread.

    At first, act ends the process with one line. A second Ctrl-C ends it at once, whatever act is.
    """

    def __init__(self) -> None:
        self.act: Callable[[int], None] = exit_without_saving
        self.first_ctrl_c: float | None = None
        self.pipe, write_end = os.pipe()
        os.set_blocking(write_end, False)

        # A signal needs a handler of Python's to be written to the pipe, but the thread acts
        for number in SIGNALS:
            is_ignored = signal.getsignal(number) is signal.SIG_IGN
            if number != signal.SIGHUP or not is_ignored:  # it is ignored under nohup
                signal.signal(number, lambda *_: None)
        # From here on, Python writes the number of each signal to the pipe
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        """Act on each signal, for ever."""
        while True:
            for number in os.read(self.pipe, 64):  # waits for signals
                if number == signal.SIGINT:
                    self.end_at_second_ctrl_c()
                if number in SIGNALS:
                    self.act(number)

    def end_at_second_ctrl_c(self) -> None:
        """End this process if this Ctrl-C isn't the first."""
        # A terminal sends it to all processes, and a launcher may pass it on once more
        now = time.monotonic()
        if self.first_ctrl_c is None:
            self.first_ctrl_c = now
        if now > self.first_ctrl_c + ONE_CTRL_C_S:
            os._exit(130)


def exit_without_saving(number: int) -> None:
    """End this process at a signal, before it has trained anything. Rank 0 prints why."""
    code = 128 + number
    if os.environ.get("RANK", "0") == "0":
        print(f"stop requested ({STOP_REASONS[code]}): {NOTHING_TO_SAVE}", flush=True)
    os._exit(code)


class StopFile:
    """The file STOP of a run. One that is there at first was meant for an earlier run."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.earlier = self.identity()

    def identity(self) -> tuple[int, int] | None:
        """Return what differs between two files of this name, or one that was touched again."""
        try:
            status = os.lstat(self.path)
        except OSError:  # there is none
            return None
        return status.st_ino, status.st_mtime_ns

    def has_appeared(self) -> bool:
        """Return whether somebody has made or touched it since."""
        return self.identity() not in (None, self.earlier)

    def remove(self) -> None:
        """Remove it, if this user can: it may be a folder, or another user's file."""
        with contextlib.suppress(OSError):
            os.remove(self.path)

    def remove_earlier(self) -> None:
        """Remove the file that was meant for an earlier run."""
        if self.earlier is not None and self.identity() == self.earlier:
            self.remove()
