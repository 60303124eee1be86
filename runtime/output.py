"""Keep failing prints from ending a run, and print one line instead of a traceback for a known error."""

import contextlib
import os
import re
import signal
import sys

from runtime.errors import UserError

MAX_LINE = 4000  # characters of a line of an error


class ResilientStream:
    """A text stream that never raises. A write fails if a pipe's reader has exited, a log's disk is full, or the
    terminal is gone. Then its file descriptor becomes the null device, also for C libraries and child processes."""

    def __init__(self, stream, null):
        self.stream, self.null = stream, null

    def write(self, text):
        self.attempt(self.stream.write, text)
        return len(text)

    def flush(self):
        self.attempt(self.stream.flush)

    def attempt(self, method, *args):
        try:
            method(*args)
        except BlockingIOError:  # a non-blocking pipe is full: its reader is slow, but hasn't exited
            pass
        except (OSError, ValueError):
            try:
                os.dup2(self.null.fileno(), self.stream.fileno())
            except (OSError, ValueError):  # the stream is closed
                self.stream = self.null

    def __getattr__(self, name):
        return getattr(self.stream, name)


def protect_output():
    """Make sys.stdout and sys.stderr resilient. They are None if they were closed when Python started."""
    null = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (until the process exits)
    while os.dup(null.fileno()) < 2:  # libraries print to descriptors 1 and 2, so no file or socket may get these
        pass
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or null
        stream.reconfigure(errors="backslashreplace")
        setattr(sys, name, ResilientStream(stream, null))


def printable(text):
    """Return a text without control characters, which a terminal may obey: all but newline and tab become escapes."""
    return re.sub(r"[\0-\x08\x0b-\x1f\x7f-\x9f]", lambda match: repr(match[0])[1:-1], text)


def counted(n: int, noun: str) -> str:
    """Return a number of things: "1 rank", "2,000 ranks"."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def error_text(problems):
    """Return what is wrong as it is printed: without control characters, and without endless lines.

    It may quote a file of others.
    """
    lines = []
    for line in printable(str(problems)).split("\n"):
        lines.append(line if len(line) <= MAX_LINE else f"{line[:MAX_LINE]}...")
    return "\n".join(lines)


def explain_uncaught(explain):
    """Print explain(error) instead of an uncaught exception's traceback. If it returns None, call the earlier hook."""
    earlier = sys.excepthook

    def hook(kind, error, trace):
        if message := explain(error):
            print(message, file=sys.stderr, flush=True)
        else:
            earlier(kind, error, trace)

    sys.excepthook = hook


def exit_with_error(problems):
    """Print problems and exit with code 2. With several ranks, see exit_together() in runtime/cluster/ranks.py."""
    print(error_text(problems), file=sys.stderr, flush=True)
    raise SystemExit(2)


class SignalError(BaseException):
    """SIGTERM or SIGHUP in exit_on_error(). No handler of other errors catches it."""


@contextlib.contextmanager
def exit_on_error(interrupted):
    """Exit with one line: code 2 for a UserError or OSError, 130 for Ctrl-C, 143 or 129 for SIGTERM
    or SIGHUP. A failing print doesn't end the script."""
    protect_output()

    def stop(number, _):
        raise SignalError(number)

    watched = [signal.SIGTERM, signal.SIGHUP]
    watched = [number for number in watched if signal.getsignal(number) is signal.SIG_DFL]  # nohup ignores SIGHUP
    for number in watched:
        signal.signal(number, stop)
    try:
        yield
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        sys.exit(130)
    except SignalError as error:
        print(interrupted, file=sys.stderr)
        sys.exit(128 + error.args[0])
    except (UserError, OSError) as error:  # one of the system has no fix. A failed connection's has no strerror
        exit_with_error(str(error) + ": check permissions and free space" * bool(getattr(error, "strerror", None)))
    finally:
        for number in watched:  # one that comes while Python exits would end in a traceback
            signal.signal(number, signal.SIG_DFL)
