"""What a process prints: nothing that can end a run, and a sentence instead of a traceback where we have one."""

import os
import signal
import sys
import time


class ResilientStream:
    """A text stream that never raises. After the first failed write (the reader of a pipe has ended, the disk under a
    log is full, the terminal is gone) its file descriptor points at the null device: also for what is still buffered,
    and for what C libraries and child processes print later."""

    def __init__(self, stream, null):
        self.stream, self.null = stream, null

    def write(self, text):
        self.attempt(self.stream.write, text)
        return len(text)

    def writelines(self, lines):
        self.write("".join(lines))

    def flush(self):
        self.attempt(self.stream.flush)

    def attempt(self, method, *args):
        try:
            method(*args)
        except BlockingIOError:  # a pipe that does not block is full: its reader is slow, and has not ended
            pass
        except (OSError, ValueError):
            try:
                os.dup2(self.null.fileno(), self.stream.fileno())
            except (OSError, ValueError):  # the stream is closed
                self.stream = self.null

    def __getattr__(self, name):
        return getattr(self.stream, name)


def protect_output():
    """Make every print of this process resilient, those of libraries included: they all go through sys.stdout and
    sys.stderr, which are None if they were closed when Python started."""
    null = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (for as long as the process lives)
    while os.dup(null.fileno()) < 2:  # no file or socket may become descriptor 1 or 2, into which libraries print
        pass
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or null
        if not isinstance(stream, ResilientStream):
            stream.reconfigure(errors="backslashreplace")
            setattr(sys, name, ResilientStream(stream, null))


def explain_uncaught(explain):
    """Print the sentence explain(error) instead of the traceback of an exception that ends this process; for None, ask
    what was given earlier. explain may also end the process."""
    earlier = sys.excepthook

    def hook(kind, error, trace):
        if sentence := explain(error):
            print(sentence, file=sys.stderr, flush=True)
        else:
            earlier(kind, error, trace)

    sys.excepthook = hook


def exit_with_error(problems):
    """End all ranks for a mistake of the user's, with exit code 2. Every rank finds the same mistake, and the first one
    of each machine prints it. The others wait, because a launcher that sees one rank end kills the rest, which may be
    printing."""
    if os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) == "0":
        print(problems, file=sys.stderr, flush=True)
    else:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the launcher's SIGTERM ends the wait; there is nothing to save
        time.sleep(10)
    raise SystemExit(2)
