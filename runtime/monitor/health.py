"""Steps that go wrong, and ranks that are slow: non-finite losses, gradient spikes, float16 overflow, stragglers."""

import contextlib
import math
import statistics
import time
from collections import deque

import torch

from runtime.cluster.ranks import all_gather_scalars
from runtime.data.loader import locate_sequences, sequence_ids
from runtime.data.tokenizer import tokenizer_of
from runtime.files import UserError

WINDOW = 50  # gradient norms that a new one is compared with, once there are 20
SPIKE_FACTOR = 6  # times their median
STRAGGLER_WINDOW = 20  # measurements that decide on each rank
SLOW_FACTOR = 1.5  # times as slow as the other ranks, which is more than noise
MAX_SHOWN = 4  # sequences named per rank; MAX_SHOWN * 4 tokens of each are shown


class StepHealth:
    """Checks every optimizer step for non-finite losses, gradient spikes and float16 overflow.

    fast: the engine's FastPath. warn: RunLog's. datasets and tokens (of training): to name the batch that a non-finite
    loss came from. grad_norms: the recent ones of a run that resumes.
    """

    def __init__(self, engine, fast, warn, datasets, tokens, seed, grad_norms=()):
        self.engine, self.fast, self.warn = engine, fast, warn
        self.datasets, self.tokens, self.seed = datasets, tokens, seed
        self.world_size = torch.distributed.get_world_size()
        self.spikes, self.stragglers = SpikeDetector(grad_norms), StragglerDetector(engine.device, self.world_size)
        fast.time_local_work = self.stragglers.time_local_work
        self.skipped_in_a_row = 0
        self.grad_norm = None  # of the last step: before clipping, without the loss scale; None: DeepSpeed has none
        self.last_failed_scale = None  # float16's loss scale after the last overflow

    def check(self, loss, iter_num):
        """Warn if step `iter_num` was skipped or its gradient norm is a spike, and count the skipped steps in a row.
        All ranks call it, and skip the same steps: the norm is the reduced gradient's. loss: of this rank, a scalar."""
        norm = self.engine.get_global_grad_norm() if self.fast.grad_norm is None else self.fast.grad_norm
        self.grad_norm = None if norm is None else float(norm)
        ratio = self.spikes.update(self.grad_norm)
        spike = ratio and f"the gradient norm {self.grad_norm:.3g} is {ratio:.0f} times the median before it"
        if self.engine.was_step_applied():
            self.skipped_in_a_row = 0
            self.warn(iter_num, spike)
            return
        bad = [f"rank {rank}, at tokens {self.describe_batch(iter_num, rank)}" for rank, (rank_loss,)
               in enumerate(all_gather_scalars(loss, device=loss.device)) if not math.isfinite(rank_loss)]
        why = f"the loss is not finite on {'; on '.join(bad)}" if bad else spike
        if not why and (scale := self.loss_scale()):
            before, self.last_failed_scale = self.last_failed_scale, scale
            if scale > getattr(self.engine.optimizer.loss_scaler, "min_scale", math.inf) or scale != before:
                self.skipped_in_a_row = 0  # DeepSpeed still searches for the right scale
                self.warn(iter_num, f"the gradient overflows float16; skipped, the loss scale is {scale:g} now")
                return
            why = (f"the gradient overflows float16 at a loss scale of {scale:g}, which gets no smaller: weights or "
                   "activations have grown too large; resume from an earlier tag with a lower learning_rate or "
                   "--dtype=float32, or on a card with bfloat16")
        self.skipped_in_a_row += 1
        self.warn(iter_num, f"{why or 'the gradient is not finite'}; skipped")

    def loss_scale(self):
        """The current loss scale in float16, else None."""
        return self.engine.optimizer.loss_scaler.cur_scale if self.engine.fp16_enabled() else None

    def describe_batch(self, iter_num, rank):
        """Where in the data the first sequences of a rank's step begin, with their first words."""
        engine = self.engine
        ids = sequence_ids(iter_num - 1, rank, self.world_size, engine.train_micro_batch_size_per_gpu(),
                           engine.gradient_accumulation_steps())
        sources = [(tokens, one.share) for tokens, one in zip(self.tokens, self.datasets, strict=True)]
        which, offsets = locate_sequences(ids.flatten(), sources, engine.module.config.block_size, self.seed)
        first = list(zip(which, offsets, strict=True))[:MAX_SHOWN]
        names = [f"{offset}" + f" of {self.datasets[j].name}" * (len(self.datasets) > 1) for j, offset in first]
        with contextlib.suppress(UserError, OSError, ImportError):  # GPT-2's BPE may have to be downloaded
            _, decode = tokenizer_of(self.datasets[0].meta["tokenizer"])
            names = [f"{name} ({decode(self.tokens[j][offset : offset + 4 * MAX_SHOWN].tolist())!r})"
                     for name, (j, offset) in zip(names, first, strict=True)]
        return ", ".join(names) + (f" and {len(offsets) - MAX_SHOWN} more" if len(offsets) > MAX_SHOWN else "")


class SpikeDetector:
    """Finds gradient norms far above the recent median, like llm.c's OutlierDetector. history: earlier norms."""

    def __init__(self, history=()):
        self.history = deque(history, maxlen=WINDOW)

    def threshold(self):
        """The norm at which a spike begins; infinite for the first 20 norms."""
        return SPIKE_FACTOR * statistics.median(self.history) if len(self.history) >= 20 else math.inf

    def update(self, norm):
        """Return the ratio of a spike to the median; add any other finite norm to the history."""
        if norm is None or not math.isfinite(norm):
            return None
        if norm >= self.threshold():
            return SPIKE_FACTOR * norm / self.threshold()
        self.history.append(norm)


class StragglerDetector:
    """Finds the rank that all others wait for. Between two checks it times one piece of work in which no rank waits for
    another: a micro-step's forward (none at ZeRO-3), or a micro-step that is captured in a CUDA graph and accumulates
    gradients locally."""

    def __init__(self, device, world_size):
        self.cuda = torch.device(device).type == "cuda"
        self.timed, self.reported = None, None  # the start and end of the work; the last straggler
        self.history = [deque(maxlen=STRAGGLER_WINDOW) for _ in range(world_size)]

    @contextlib.contextmanager
    def time_local_work(self, local=True):
        """A context around such work, of which it times the first after each call of seconds()."""
        if not local or self.timed or (self.cuda and torch.cuda.is_current_stream_capturing()):
            yield
            return
        start = timestamp(self.cuda)
        yield
        self.timed = start, timestamp(self.cuda)

    def seconds(self):
        """The seconds that the timed work took; 0 where there was none."""
        (start, end), self.timed = self.timed or (0.0, 0.0), None
        if isinstance(end, float):
            return end - start
        end.synchronize()
        return start.elapsed_time(end) / 1000

    def check(self, per_rank, step_seconds):
        """Return a sentence that names a straggler, once until it keeps up again, or None. per_rank: [(seconds of local
        work, seconds per step spent waiting for data)]."""
        for history, seconds in zip(self.history, per_rank, strict=True):
            history.append(seconds)
        if len(per_rank) < 2 or len(self.history[0]) < STRAGGLER_WINDOW:
            return None
        # With less than 10 ms between them, ranks of tiny models on busy CPUs were named in turns
        kinds = [(0.01, "for a forward or a micro-step of its own", "its GPU's clocks, and what else runs there"),
                 (0.1 * step_seconds, "per step for its data", "its disk and CPU")]
        for column, (margin, what, cause) in enumerate(kinds):
            medians = [statistics.median(seconds[column] for seconds in history) for history in self.history]
            slowest = max(range(len(medians)), key=medians.__getitem__)
            others = statistics.median(medians[:slowest] + medians[slowest + 1 :])
            if medians[slowest] > max(SLOW_FACTOR * others, others + margin):
                before, self.reported = self.reported, (slowest, column)
                return None if before == self.reported else (
                    f"rank {slowest} lags: it takes {1e3 * medians[slowest]:.0f} ms {what}, the others "
                    f"{1e3 * others:.0f}: look at {cause}")
        self.reported = None


def timestamp(cuda):
    """Return the time, or with `cuda` an event that the GPU stamps with it."""
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
