"""Steps that go wrong, and slow ranks.

Steps: non-finite losses, gradient spikes, norms that rise, float16 overflow. Slow ranks:
stragglers.
"""

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from runtime.cluster.ranks import all_gather_scalars
from runtime.errors import UserError

WINDOW = 50  # recent gradient norms that a new one is compared with, once there are 20
FEWEST_NORMS = 20
SPIKE_FACTOR = 6  # a spike is this many times their median
RISE_WINDOW = 300  # recent gradient norms in which high ones are counted
RISE_COUNT = 8  # norms rise if this many are high
RISE_FACTOR = 1.25  # a high norm is at least so many times the median of the RISE_WINDOW before it
HISTORY = 2000  # such ratios that are kept
STRAGGLER_WINDOW = 20  # measurements per rank
SLOW_FACTOR = 1.5  # a straggler takes this many times as long as the other ranks
SLOW_S = 0.01  # and so much longer: ranks of tiny models on busy CPUs were reported at random


class StepHealth:
    """Checks every optimizer step.

    warn: RunLog.warn. state: of the checkpoint that the run resumes from, else {}. skip_spikes:
    whether skip_above() is the smallest spike. rise: a message if the last check found that norms
    rise, else None.
    """

    def __init__(
        self,
        warn: Callable[[int, str | None], None],
        state: Mapping,
        skip_spikes: bool = False,
    ) -> None:
        self.warn = warn
        self.skip_spikes = skip_spikes
        self.skipped_in_a_row = 0
        self.rise: str | None = None
        self.spikes = SpikeDetector(state.get("grad_norms", ()), state.get("grad_norm_ratios", ()))
        self.last_failed_scale: float | None = None  # float16's, after the last overflow

    def skip_above(self) -> float:
        """Return the gradient norm from which on the next step is to be skipped; infinite: none."""
        return self.spikes.threshold() if self.skip_spikes else math.inf

    def check(self, step: Any, loss: torch.Tensor, iter_num: int) -> None:
        """Warn if step `iter_num` was skipped, its gradient norm is a spike, or norms rise. Count
        consecutive skipped steps.

        step: its StepResult. loss: this rank's, 0-dimensional. All ranks call this. Raises
        UserError if a term was added to the loss that nothing trains.
        """
        if loss.requires_grad:
            raise UserError(
                "the training loop adds a term with a gradient to the loss of engine.micro_step(), "
                "which has made its backward already: add it in GPT.forward, or compute it under "
                "torch.no_grad() if it is for the log"
            )
        spike = None
        ratio = self.spikes.update(step.grad_norm, step.applied)
        if ratio:
            norm = f"gradient norm {step.grad_norm:.3g}"
            spike = f"{norm} is {ratio:.0f} times the recent median"
        self.check_rise(iter_num)
        if step.applied:
            self.skipped_in_a_row = 0
            self.warn(iter_num, spike)
            return

        # Why was it skipped?
        of_ranks = all_gather_scalars(loss)
        bad = [f"rank {rank}" for rank, (own,) in enumerate(of_ranks) if not math.isfinite(own)]
        if bad:
            why = f"the loss is not finite on {', '.join(bad)}"
        elif spike:
            why = spike
        elif step.loss_scale:
            if self.searches_scale(step):
                self.skipped_in_a_row = 0
                self.warn(
                    iter_num,
                    "float16 gradient overflow: step skipped, loss scale is now "
                    f"{step.loss_scale:g}",
                )
                return
            why = (
                f"float16 gradient overflow at the minimum loss scale {step.loss_scale:g}: resume "
                "from an earlier checkpoint with a lower learning_rate or --dtype=float32, or use "
                "a GPU with bfloat16"
            )
        else:
            why = "the gradient is not finite"
        self.skipped_in_a_row += 1
        self.warn(iter_num, f"{why}; step skipped")

    def check_rise(self, iter_num: int) -> None:
        """Warn if norms rise, every WINDOW steps."""
        self.rise = None
        if iter_num % WINDOW == 0:
            self.rise = self.spikes.next_rise()
        if self.rise:
            self.warn(
                iter_num,
                f"{self.rise}. If the validation loss rises too, resume from an earlier checkpoint "
                "with a lower learning_rate",
            )

    def searches_scale(self, step: Any) -> bool:
        """Return whether a float16 overflow is DeepSpeed's search for the right loss scale, which
        still becomes smaller. step: the StepResult of the skipped step."""
        before = self.last_failed_scale
        self.last_failed_scale = step.loss_scale
        return step.loss_scale > step.min_loss_scale or step.loss_scale != before


class SpikeDetector:
    """Finds gradient norms far above the recent median, like llm.c's OutlierDetector, and those
    that rise slowly.

    norms: earlier ones. ratios: of each earlier norm to the median of the RISE_WINDOW norms before
    it.
    """

    def __init__(self, norms: Iterable[float] = (), ratios: Iterable[float] = ()) -> None:
        self.norms = deque(norms, maxlen=RISE_WINDOW)
        self.ratios = deque(ratios, maxlen=HISTORY)

    def threshold(self) -> float:
        """Return the smallest norm that is a spike; infinite for the first 20 norms, or if most of
        them are 0."""
        if len(self.norms) < FEWEST_NORMS:
            return math.inf
        median = statistics.median(list(self.norms)[-WINDOW:])
        return SPIKE_FACTOR * median or math.inf

    def update(self, norm: float | None, applied: bool = True) -> float | None:
        """Return the ratio of a spike to the median, or None. Add a finite norm to the history,
        unless it is a skipped spike."""
        if norm is None or not math.isfinite(norm):
            return None
        threshold = self.threshold()
        if applied or norm < threshold:
            # The ratio to the norms before it, so that a rise doesn't hide in its own median
            median = statistics.median(self.norms or [norm])
            self.ratios.append(norm / median if median else 1.0)
            self.norms.append(norm)
        if norm < threshold:
            return None
        return SPIKE_FACTOR * norm / threshold

    def next_rise(self) -> str | None:
        """Return a message if RISE_COUNT of the last RISE_WINDOW norms are high and their median
        rises, else None. The rise after it has to be steeper.

        In the runs of docs/pretrain.md, single norms rose long before the median did much. The
        ratios of high norms are also above all but 4 before the window: there are runs whose norms
        always vary that much.
        """
        norms = list(self.norms)
        ratios = list(self.ratios)

        # Thirds of the window: its end against its beginning
        third = RISE_WINDOW // 3
        if len(ratios) < HISTORY:
            return None
        # Do they rise at all?
        if statistics.median(norms[-third:]) <= statistics.median(norms[:third]):
            return None

        # Are there enough high ones?
        limit = max(RISE_FACTOR, sorted(ratios[:-RISE_WINDOW])[-5])
        high = [ratio for ratio in ratios[-RISE_WINDOW:] if ratio > limit]
        if len(high) < RISE_COUNT:
            return None
        self.ratios.extend(high * HISTORY)  # they fill the history
        return (
            f"gradient norms rise: {len(high)} of the last {RISE_WINDOW} are more than {limit:.2f} "
            f"times the median of the {RISE_WINDOW} before each"
        )


class StragglerDetector:
    """Finds a rank that all others wait for, from the seconds of each rank's own work: those of
    Engine.own_work_seconds()."""

    def __init__(self) -> None:
        self.reported: int | None = None  # the last straggler
        self.history: deque[Sequence[float]] = deque(maxlen=STRAGGLER_WINDOW)  # of per_rank

    def check(self, per_rank: Sequence[float]) -> str | None:
        """Return a message that names a new straggler, else None. per_rank: seconds of each
        rank."""
        self.history.append(per_rank)
        if len(per_rank) < 2 or len(self.history) < STRAGGLER_WINDOW:
            return None
        # The slowest rank, and the others
        medians = [statistics.median(seconds) for seconds in zip(*self.history, strict=True)]
        slowest = max(range(len(medians)), key=medians.__getitem__)
        own = medians.pop(slowest)
        others = statistics.median(medians)

        # Both limits, because a ratio alone means nothing for steps of a few milliseconds
        if own <= max(SLOW_FACTOR * others, others + SLOW_S):
            self.reported = None
            return None

        # Each straggler is reported once, until it has caught up
        if self.reported == slowest:
            return None
        self.reported = slowest
        return (
            f"rank {slowest} is a straggler: {1e3 * own:.0f} ms for a forward pass or micro-step, "
            f"the others {1e3 * others:.0f} ms; check its clocks and other processes"
        )
