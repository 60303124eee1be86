"""Steps that go wrong, and slow ranks: non-finite losses, gradient spikes, float16 overflow, stragglers."""

import math
import statistics
from collections import deque

from runtime.cluster.ranks import all_gather_scalars

WINDOW = 50  # recent gradient norms that a new one is compared with, once there are 20
SPIKE_FACTOR = 6  # a spike is this many times their median
HISTORY = 1000  # gradient norms that are kept
RISE_FACTOR = 3  # norms have risen if the median of the last WINDOW is this many times the median of the others
STRAGGLER_WINDOW = 20  # measurements per rank
SLOW_FACTOR = 1.5  # a straggler takes this many times as long as the other ranks


class StepHealth:
    """Checks every optimizer step for non-finite losses, gradient spikes and float16 overflow.

    warn: RunLog.warn. state: of the checkpoint that the run resumes from, else {}."""

    def __init__(self, warn, state):
        self.warn, self.skipped_in_a_row = warn, 0
        self.spikes = SpikeDetector(state.get("grad_norms", ()), state.get("grad_norms_risen", False))
        self.last_failed_scale = None  # float16's loss scale after the last overflow

    def check(self, step, loss, iter_num):
        """Warn if step `iter_num` was skipped, its gradient norm is a spike, or norms have risen. Count consecutive
        skipped steps. step: its StepResult; loss: this rank's, a scalar. All ranks call this."""
        ratio = self.spikes.update(step.grad_norm, step.applied)
        spike = ratio and f"gradient norm {step.grad_norm:.3g} is {ratio:.0f} times the recent median"
        if iter_num % WINDOW == 0 and (rise := self.spikes.rise()):
            self.warn(iter_num, f"gradient norms are {rise:.1f} times those of the {HISTORY - WINDOW} steps before: if "
                                "the loss rises too, resume from an earlier checkpoint with a lower learning_rate")
        if step.applied:
            self.skipped_in_a_row = 0
            self.warn(iter_num, spike)
            return
        bad = [f"rank {rank}" for rank, (rank_loss,) in enumerate(all_gather_scalars(loss))
               if not math.isfinite(rank_loss)]
        why = f"the loss is not finite on {', '.join(bad)}" if bad else spike
        if not why and (scale := step.loss_scale):
            before, self.last_failed_scale = self.last_failed_scale, scale
            if scale > step.min_loss_scale or scale != before:
                self.skipped_in_a_row = 0  # DeepSpeed is still searching for the right scale
                self.warn(iter_num, f"float16 gradient overflow: step skipped, loss scale is now {scale:g}")
                return
            why = (f"float16 gradient overflow at the minimum loss scale {scale:g}: resume from an earlier checkpoint "
                   "with a lower learning_rate or --dtype=float32, or use a GPU with bfloat16")
        self.skipped_in_a_row += 1
        self.warn(iter_num, f"{why or 'the gradient is not finite'}; step skipped")


class SpikeDetector:
    """Finds gradient norms far above the recent median, like llm.c's OutlierDetector, and those that rise slowly.
    history: earlier norms. risen: whether they had risen at the last call of rise()."""

    def __init__(self, history=(), risen=False):
        self.history, self.risen = deque(history, maxlen=HISTORY), risen

    def threshold(self):
        """Return the smallest norm that is a spike; infinite for the first 20 norms, or if most of them are 0."""
        median = statistics.median(list(self.history)[-WINDOW:]) if len(self.history) >= 20 else 0
        return SPIKE_FACTOR * median or math.inf

    def update(self, norm, applied=True):
        """Return the ratio of a spike to the median. Add a finite norm to the history, unless it is a skipped spike."""
        if norm is None or not math.isfinite(norm):
            return None
        threshold = self.threshold()
        if applied or norm < threshold:
            self.history.append(norm)
        return SPIKE_FACTOR * norm / threshold if norm >= threshold else None

    def rise(self):
        """Return the ratio of the last WINDOW norms' median to the median of those before if it has reached RISE_FACTOR
        since the last call, else None. Call this every WINDOW steps. It needs a full history."""
        if len(self.history) < HISTORY:
            return None
        norms = list(self.history)
        before, recent = statistics.median(norms[:-WINDOW]), statistics.median(norms[-WINDOW:])
        was_risen, self.risen = self.risen, recent >= RISE_FACTOR * before > 0
        return recent / before if self.risen and not was_risen else None


class StragglerDetector:
    """Finds a rank that all others wait for, from the seconds of each rank's own work (runtime/engine/launch.py)."""

    def __init__(self, world_size):
        self.reported = None  # the last straggler
        self.history = [deque(maxlen=STRAGGLER_WINDOW) for _ in range(world_size)]

    def check(self, per_rank):
        """Return a message that names a new straggler, else None. per_rank: each rank's seconds of local work."""
        for history, seconds in zip(self.history, per_rank, strict=True):
            history.append(seconds)
        if len(per_rank) < 2 or len(self.history[0]) < STRAGGLER_WINDOW:
            return None
        medians = [statistics.median(history) for history in self.history]
        slowest = max(range(len(medians)), key=medians.__getitem__)
        others = statistics.median(medians[:slowest] + medians[slowest + 1 :])
        # Without the 10 ms, ranks of tiny models on busy CPUs were reported at random
        is_slow = medians[slowest] > max(SLOW_FACTOR * others, others + 0.01)
        before, self.reported = self.reported, slowest if is_slow else None
        if self.reported in (None, before):
            return None
        return (f"rank {slowest} is a straggler: {1e3 * medians[slowest]:.0f} ms for a forward pass or micro-step, the "
                f"others {1e3 * others:.0f} ms; check its clocks and other processes")
