"""Steps that go wrong, and slow ranks: non-finite losses, gradient spikes, float16 overflow, stragglers."""

import math
import statistics
from collections import deque

from runtime.cluster.ranks import all_gather_scalars

WINDOW = 50  # recent gradient norms that a new one is compared with, once there are 20
SPIKE_FACTOR = 6  # a spike is this many times their median
RISE_WINDOW = 300  # recent gradient norms in which high ones are counted
RISE_COUNT = 8  # norms rise if this many are high
RISE_FACTOR = 1.25  # a high norm is at least this many times the median of the RISE_WINDOW norms before it
HISTORY = 2000  # such ratios that are kept
STRAGGLER_WINDOW = 20  # measurements per rank
SLOW_FACTOR = 1.5  # a straggler takes this many times as long as the other ranks


class StepHealth:
    """Checks every optimizer step for non-finite losses, gradient spikes, norms that rise and float16 overflow.
    warn: RunLog.warn. state: of the checkpoint that the run resumes from, else {}. rise: what the last check found."""

    def __init__(self, warn, state):
        self.warn, self.skipped_in_a_row, self.rise = warn, 0, None
        self.spikes = SpikeDetector(state.get("grad_norms", ()), state.get("grad_norm_ratios", ()))
        self.last_failed_scale = None  # float16's loss scale after the last overflow

    def check(self, step, loss, iter_num):
        """Warn if step `iter_num` was skipped, its gradient norm is a spike, or norms rise. Count consecutive skipped
        steps. step: its StepResult; loss: this rank's, a scalar. All ranks call this."""
        ratio = self.spikes.update(step.grad_norm, step.applied)
        spike = ratio and f"gradient norm {step.grad_norm:.3g} is {ratio:.0f} times the recent median"
        self.rise = self.spikes.find_rise() if iter_num % WINDOW == 0 else None
        if self.rise:
            shares = ", ".join(f"{name} {share:.0%}" for name, share in (step.grad_shares or {}).items())
            self.warn(iter_num, f"{self.rise}{shares and f'; largest shares: {shares}'}. If the validation loss rises "
                                "too, resume from an earlier checkpoint with a lower learning_rate")
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
    norms: earlier ones. ratios: of each earlier norm to the median of the RISE_WINDOW norms before it."""

    def __init__(self, norms=(), ratios=()):
        self.norms, self.ratios = deque(norms, maxlen=RISE_WINDOW), deque(ratios, maxlen=HISTORY)

    def threshold(self):
        """Return the smallest norm that is a spike; infinite for the first 20 norms, or if most of them are 0."""
        median = statistics.median(list(self.norms)[-WINDOW:]) if len(self.norms) >= 20 else 0
        return SPIKE_FACTOR * median or math.inf

    def update(self, norm, applied=True):
        """Return the ratio of a spike to the median. Add a finite norm to the history, unless it is a skipped spike."""
        if norm is None or not math.isfinite(norm):
            return None
        threshold = self.threshold()
        if applied or norm < threshold:
            median = statistics.median(self.norms or [norm])
            self.ratios.append(norm / median if median else 1.0)
            self.norms.append(norm)
        return SPIKE_FACTOR * norm / threshold if norm >= threshold else None

    def find_rise(self):
        """Return a message if RISE_COUNT of the last RISE_WINDOW norms are high and their median rises, else None. In
        the runs of docs/pretrain.md, single norms rose long before the median did much. The ratios of high norms are
        also above all but 4 before the window: there are runs whose norms always vary that much."""
        norms, ratios, third = list(self.norms), list(self.ratios), RISE_WINDOW // 3
        if len(ratios) < HISTORY or statistics.median(norms[-third:]) <= statistics.median(norms[:third]):
            return None
        limit = max(RISE_FACTOR, sorted(ratios[:-RISE_WINDOW])[-5])
        high = [ratio for ratio in ratios[-RISE_WINDOW:] if ratio > limit]
        if len(high) < RISE_COUNT:
            return None
        self.ratios.extend(high * HISTORY)  # the next rise has to be above these
        return (f"gradient norms rise: {len(high)} of the last {RISE_WINDOW} are more than {limit:.2f} times the "
                f"median of the {RISE_WINDOW} before each")


class StragglerDetector:
    """Finds a rank that all others wait for, from the seconds of each rank's own work (runtime/engine/launch.py)."""

    def __init__(self):
        self.reported = None  # the last straggler
        self.history = deque(maxlen=STRAGGLER_WINDOW)  # of per_rank

    def check(self, per_rank):
        """Return a message that names a new straggler, else None. per_rank: each rank's seconds of local work."""
        self.history.append(per_rank)
        if len(per_rank) < 2 or len(self.history) < STRAGGLER_WINDOW:
            return None
        medians = [statistics.median(seconds) for seconds in zip(*self.history)]
        slowest = max(range(len(medians)), key=medians.__getitem__)
        others = statistics.median(medians[:slowest] + medians[slowest + 1 :])
        # Without the 10 ms, ranks of tiny models on busy CPUs were reported at random
        is_slow = medians[slowest] > max(SLOW_FACTOR * others, others + 0.01)
        before, self.reported = self.reported, slowest if is_slow else None
        if self.reported in (None, before):
            return None
        return (f"rank {slowest} is a straggler: {1e3 * medians[slowest]:.0f} ms for a forward pass or micro-step, the "
                f"others {1e3 * others:.0f} ms; check its clocks and other processes")
