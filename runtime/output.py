"""Printing that cannot end a run: what cannot be written is lost, and nothing else is."""

import os
import sys


class ResilientStream:
    """A text stream that never raises. After the first failed write (the reader of a pipe has ended, the disk under a
    log is full, the terminal is gone) its file descriptor points at the null device."""

    def __init__(self, stream):
        self.stream = stream

    def write(self, text):
        try:
            return self.stream.write(text)
        except UnicodeEncodeError:  # a ValueError too, but only this text cannot be written
            encoding = self.stream.encoding
            return self.write(text.encode(encoding, "backslashreplace").decode(encoding))
        except (OSError, ValueError):
            self.discard()
            return len(text)

    def flush(self):
        try:
            self.stream.flush()
        except (OSError, ValueError):
            self.discard()

    def discard(self):
        """Send to the null device what is still buffered, and what C libraries and child processes print later."""
        try:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.stream.fileno())
            os.close(null)
        except (OSError, ValueError):  # the stream is closed
            self.stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115

    def __getattr__(self, name):
        return getattr(self.stream, name)


def protect_output():
    """Make every print of this process resilient, those of libraries included: they all go through sys.stdout and
    sys.stderr, which are None if they were closed when Python started."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, ResilientStream):
            setattr(sys, name, ResilientStream(stream or open(os.devnull, "w", encoding="utf-8")))
