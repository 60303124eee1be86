"""Time a rank's own work, in which no rank waits for another: what a straggler is found by."""

import contextlib
import time
from collections.abc import Iterator

import torch

Timestamp = float | torch.cuda.Event


class LocalTimer:
    """Times the forward of a micro-step (not at ZeRO-3, where it waits for the other ranks), or a
    micro-step in a CUDA graph that accumulates gradients locally."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = torch.device(device).type == "cuda"
        self.timed: tuple[Timestamp, Timestamp] | None = None  # start and end

    @contextlib.contextmanager
    def time(self, local: bool = True) -> Iterator[None]:
        """Time the work in this context, if it is local and the first since the last call of
        seconds()."""
        is_capturing = self.cuda and torch.cuda.is_current_stream_capturing()
        if not local or self.timed or is_capturing:
            yield
            return
        start = self.timestamp()
        yield
        self.timed = (start, self.timestamp())

    def seconds(self) -> float:
        """Return the seconds that the timed work took, or 0 if there was none."""
        if self.timed is None:
            return 0.0
        start, end = self.timed
        self.timed = None
        if isinstance(end, float):
            return end - start
        end.synchronize()
        return start.elapsed_time(end) / 1000

    def timestamp(self) -> Timestamp:
        """Return the time in seconds, or on a GPU an event that records it there."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
