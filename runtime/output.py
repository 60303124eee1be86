"""Keep failing prints from ending a run, and print one line instead of a traceback for a known
error."""

import contextlib
import enum
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, NoReturn, TextIO

from runtime.errors import UserError

MAX_LINE = 4000  # characters of a line of an error


class ResilientStream:
    """A text stream that never raises.

    A write fails if a pipe's reader has exited, a log's disk is full, or the terminal is gone. Then
    its file descriptor becomes the null device, also for C libraries and child processes.
    """

    def __init__(self, stream: TextIO, null: TextIO) -> None:
        self.stream = stream
        self.null = null

    def write(self, text: str) -> int:
        self.attempt(self.stream.write, text)
        return len(text)

    def flush(self) -> None:
        self.attempt(self.stream.flush)

    def attempt(self, method: Callable, *args: str) -> None:
        """Call a method of the stream, and replace the stream if it can't be written."""
        try:
            method(*args)
        except BlockingIOError:  # a non-blocking pipe is full: its reader is slow, but reads on
            pass
        except (OSError, ValueError):
            # Whatever is printed from here on goes nowhere
            try:
                os.dup2(self.null.fileno(), self.stream.fileno())
            except (OSError, ValueError):  # the stream is closed
                self.stream = self.null

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def protect_output() -> None:
    """Make sys.stdout and sys.stderr resilient.

    They are None if they were closed when Python started.
    """
    # Where output goes that nobody can read
    null = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (until the process exits)

    # Libraries print to descriptors 1 and 2, so no file or socket may get these
    while os.dup(null.fileno()) < 2:
        pass
    # Not every text fits the terminal's encoding
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or null
        stream.reconfigure(errors="backslashreplace")
        setattr(sys, name, ResilientStream(stream, null))


def printable(text: str) -> str:
    """Return a text without control characters, which a terminal may obey.

    All but newline and tab become escapes.
    """
    return re.sub(r"[\0-\x08\x0b-\x1f\x7f-\x9f]", lambda match: repr(match[0])[1:-1], text)


def counted(n: int, noun: str) -> str:
    """Return a number of things: "1 rank", "2,000 ranks"."""
    if n == 1:
        return f"1 {noun}"
    return f"{n:,} {noun}s"


def error_text(problems: object) -> str:
    """Return what is wrong as it is printed: without control characters, and without endless lines.

    It may quote a file of others.
    """
    lines = []
    for line in printable(str(problems)).split("\n"):
        if len(line) > MAX_LINE:
            line = f"{line[:MAX_LINE]}..."
        lines.append(line)
    return "\n".join(lines)


# -----------------------------------------------------------------------------
# Uncaught errors


class Explainer(enum.IntEnum):
    """Who explains uncaught errors, in the order in which they are asked."""

    OUT_OF_MEMORY = 1  # runtime/plan/report.py
    LOST_RANK = 2  # runtime/cluster/shutdown.py
    USER_ERROR = 3  # runtime/__init__.py


EXPLAINERS: dict[Explainer, Callable[[BaseException], str | None]] = {}


class ExplainingHook:
    """A sys.excepthook that asks the EXPLAINERS. If none knows the error, the earlier hook prints
    a traceback."""

    def __init__(self, earlier: Callable) -> None:
        self.earlier = earlier

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        # The first one that knows the error
        for explainer in sorted(EXPLAINERS):
            message = EXPLAINERS[explainer](error)
            if message is not None:
                print(message, file=sys.stderr, flush=True)
                return
        self.earlier(kind, error, trace)


def explain_uncaught(explainer: Explainer, explain: Callable[[BaseException], str | None]) -> None:
    """Print explain(error) instead of an uncaught exception's traceback.

    explain: returns None for an error that it doesn't know, or prints and ends the process itself.
    It takes the place of what the same explainer had before.
    """
    EXPLAINERS[explainer] = explain
    # PyTorch puts a hook of its own above ours when it joins a group, and that may drop what ours
    # prints. Then ours goes on top again
    if not isinstance(sys.excepthook, ExplainingHook):
        sys.excepthook = ExplainingHook(sys.excepthook)


def exit_with_error(problems: object) -> NoReturn:
    """Print problems and exit with code 2.

    With several ranks, see exit_together() in runtime/cluster/ranks.py.
    """
    print(error_text(problems), file=sys.stderr, flush=True)
    raise SystemExit(2)


class SignalError(BaseException):
    """SIGTERM or SIGHUP in exit_on_error(). No handler of other errors catches it."""


def raise_signal_error(number: int, _: object) -> NoReturn:
    """Handle a signal in exit_on_error()."""
    raise SignalError(number)


def end_at_signals() -> None:
    """Let SIGTERM and SIGHUP end the process at once, where exit_on_error() handles them.

    Call this before Python exits: a SignalError in one of its last functions would be printed with
    a traceback.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is raise_signal_error:
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def exit_on_error(interrupted: str) -> Iterator[None]:
    """Return a context in which errors end the script with one line.

    The exit code is 2 for a UserError or OSError, 130 for Ctrl-C, and 143 or 129 for SIGTERM or
    SIGHUP. interrupted: the line at a signal. A failing print doesn't end the script.
    """
    protect_output()

    # Python's own way to end at these signals leaves temporary files behind
    watched = []
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores SIGHUP
            watched.append(number)
            signal.signal(number, raise_signal_error)
    try:
        yield
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        sys.exit(130)
    except SignalError as error:
        print(interrupted, file=sys.stderr)
        sys.exit(128 + error.args[0])
    except UserError as error:
        exit_with_error(error)
    except OSError as error:
        # One of the system says no fix. That of a failed connection has no strerror
        if error.strerror:
            exit_with_error(f"{error}: check permissions and free space")
        exit_with_error(error)
    finally:
        for number in watched:  # one that comes while Python exits would end in a traceback
            signal.signal(number, signal.SIG_DFL)
