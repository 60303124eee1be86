"""Which rank lags: how long each one takes for what it does alone, and for its data."""

import contextlib
import statistics
import time
from collections import deque

import torch

LATE = 20  # looks that a rank is judged by, at least and at most
SLOW = 1.5  # times as long as the others: that is no noise


class Pace:
    """The seconds of one piece of this rank's own work between two looks, and the last looks at all ranks'.

    The piece is a micro-step's forward, in which no rank waits for another (at ZeRO-3 all of it waits), or all of a
    recorded micro-step whose sums are local. A rank that waits for others is as slow as they are in all the rest.
    """

    def __init__(self, device, world_size):
        self.cuda = torch.device(device).type == "cuda"
        self.marks, self.named = [], None
        self.looks = [deque(maxlen=LATE) for _ in range(world_size)]

    @contextlib.contextmanager
    def own_work(self, alone=True):
        """Around such a piece; only the first between two looks is measured."""
        measured = alone and not self.marks and not (self.cuda and torch.cuda.is_current_stream_capturing())
        self.mark(measured)
        yield
        self.mark(measured)

    def mark(self, measured):
        if measured and self.cuda:
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        elif measured:
            self.marks.append(time.perf_counter())

    def seconds(self):
        """What the piece took since the last look; 0 where there was none."""
        marks, self.marks = self.marks, []
        if not marks:
            return 0.0
        if not self.cuda:
            return marks[1] - marks[0]
        marks[1].synchronize()
        return marks[0].elapsed_time(marks[1]) / 1000

    def look(self, each, step_seconds):
        """Take in [(seconds of own work, seconds that a step waited for data)] of all ranks; returns a sentence where
        one has come to lag, once, until it does no more."""
        for rank, seconds in enumerate(each):
            self.looks[rank].append(seconds)
        if len(each) < 2 or len(self.looks[0]) < LATE:
            return None
        # Below 10 ms apart, ranks of tiny models on busy CPUs took turns at being named
        kinds = [(0.01, "for a forward or a micro-step of its own", "its GPU's clocks, and what else runs there"),
                 (0.1 * step_seconds, "a step for its data", "its disk and CPU")]
        for column, (least, what, look_at) in enumerate(kinds):
            of_late = [statistics.median(seconds[column] for seconds in looks) for looks in self.looks]
            slowest = max(range(len(of_late)), key=of_late.__getitem__)
            others = statistics.median(of_late[:slowest] + of_late[slowest + 1 :])
            if of_late[slowest] > max(SLOW * others, others + least):
                known, self.named = self.named, (slowest, column)
                return None if known == self.named else (
                    f"rank {slowest} lags: it takes {1e3 * of_late[slowest]:.0f} ms {what}, the others "
                    f"{1e3 * others:.0f}: look at {look_at}")
        self.named = None
        return None
