"""What is decided before a run starts."""

from dataclasses import dataclass
from typing import Any

from runtime.data.ramp import Ramp, are_split_by
from runtime.plan.memory import MemoryInputs
from runtime.plan.start import Start


@dataclass(frozen=True, kw_only=True)
class RunPlan(MemoryInputs):
    """Everything that is decided before a run starts, the same on all ranks.

    What estimates memory and time takes MemoryInputs: a RunPlan, or what make_plan() has before
    there is one. The advice on settings that fit takes a RunPlan, or one with other values.
    """

    settings: Any  # from configurator.py; batch_size and numbers of iterations are resolved
    datasets: tuple  # Datasets
    # Of all: "tokenizer", "vocab_size", "template", "train_tokens", "val_tokens" and "datasets"
    data: dict[str, Any]
    sequences: dict[str, Any]  # {split: the Sequences of each dataset}
    sequences_per_epoch: int  # of all datasets
    ramp: Ramp  # the sequences of each step, and their length
    start: Start
    lora: dict | None
    eval_windows: int  # sequences per evaluation and dataset, over all ranks
    tag_bytes: int  # of a checkpoint
    tokenizer: tuple | None  # (encode, decode), if sample_interval is set
    has_several_nodes: bool
    notes: tuple[str, ...]

    def splits(self) -> list[MemoryInputs]:
        """Return the plan with each micro-batch that divides its sequences and fits its ramp, in
        falling order."""
        runs = super().splits()
        return [run for run in runs if are_split_by(run.batch.per_micro_step, self.ramp.sizes)]
