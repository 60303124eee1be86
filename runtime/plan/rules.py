"""The rules that settings must keep, as data: ranges, and settings that contradict each other."""

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from runtime.data.loader import BatchSizes
from runtime.output import counted

# Settings by their smallest value. None is allowed where a setting may be unset
AT_LEAST = {
    1: (
        "batch_size",
        "gradient_accumulation_steps",
        "block_size",
        "eval_interval",
        "eval_iters",
        "log_interval",
        "patience",
        "sample_tokens",
    ),
    0: (
        "keep_last",
        "max_iters",
        "max_skipped_steps",
        "sample_interval",
        "warmup_iters",
        "learning_rate",
        "grad_clip",
        "weight_decay",
        "lr_decay_iters",
        "seed",
        "lora_rank",
    ),
}

# Settings that zero would make useless
ABOVE_ZERO = ("max_epochs", "eval_epochs", "lora_alpha", "muon_learning_rate")

# Limits far above the sizes of GPT-2, and that of a 64-bit integer
BELOW = {
    2**20: (
        "batch_size",
        "gradient_accumulation_steps",
        "block_size",
        "n_head",
        "n_embd",
        "lora_rank",
    ),
    2**12: ("n_layer",),
    2**63: ("seed", "max_epochs"),
}
BELOW_ONE = ("dropout", "lora_dropout", "beta1", "beta2")


class Rule(NamedTuple):
    """Settings that contradict each other. Both fields see the settings as s."""

    is_broken: Callable[[Any], object]
    message: str


def decays(s: Any) -> bool:
    """Return whether the learning rate falls after its warmup."""
    return s.decay_lr and s.lr_schedule != "constant"


RULES = (
    Rule(
        # A schedule that rises isn't a decay
        lambda s: s.decay_lr and s.min_lr is not None and not 0 <= s.min_lr <= s.learning_rate,
        "min_lr={s.min_lr} must be between 0 and learning_rate={s.learning_rate}",
    ),
    Rule(
        # A run takes the GPU that is there
        lambda s: s.target_gpu is not None and not s.dry_run,
        "target_gpu={s.target_gpu} only estimates: add --dry_run=True",
    ),
    Rule(
        lambda s: s.lora_rank and s.init_from == "scratch",
        "lora_rank={s.lora_rank} needs pretrained weights, but init_from=scratch: name some with "
        "--init_from",
    ),
    Rule(
        lambda s: not s.lora_rank and (s.lora_alpha is not None or s.lora_dropout),
        "lora_alpha={s.lora_alpha} and lora_dropout={s.lora_dropout} need LoRA: add "
        "--lora_rank=64, or drop them",
    ),
    Rule(
        lambda s: not s.lora_rank and "lora_target_modules" in s.changed,
        "lora_target_modules={s.lora_target_modules} needs LoRA: add --lora_rank=64, or drop it",
    ),
    Rule(
        lambda s: s.optimizer == "muon" and not s.learning_rate,
        "optimizer=muon needs a learning_rate above 0: muon_learning_rate follows its schedule",
    ),
    Rule(
        lambda s: s.optimizer == "muon" and s.lora_rank,
        "optimizer=muon trains whole matrices, but lora_rank={s.lora_rank}: drop one of the two",
    ),
    Rule(
        lambda s: s.profile and not s.eval_only and s.max_iters < 7 and not s.max_epochs,
        "profile=True traces the 6th and 7th step, but max_iters={s.max_iters}: use --max_iters=7",
    ),
    Rule(
        lambda s: s.init_from not in ("resume", "auto") and s.resume_tag != "latest",
        "resume_tag={s.resume_tag} is for resuming: add --init_from=resume, or drop it",
    ),
    Rule(
        lambda s: s.overwrite and s.init_from in ("resume", "auto") and s.resume_tag == "latest",
        "overwrite=True deletes nothing if init_from={s.init_from} resumes the newest checkpoint: "
        "drop one of them",
    ),
    Rule(
        lambda s: (
            decays(s) and s.lr_decay_iters is not None and 0 <= s.lr_decay_iters < s.warmup_iters
        ),
        "warmup_iters={s.warmup_iters} is above lr_decay_iters={s.lr_decay_iters}: lower the first "
        "or raise the second",
    ),
    Rule(
        lambda s: s.batch_ramp is not None and (s.max_epochs or s.eval_epochs),
        "batch_ramp goes by iterations: use --max_iters and --eval_interval, with "
        "--max_epochs=None --eval_epochs=None",
    ),
    Rule(
        lambda s: s.batch_ramp is not None and s.batch_size == "auto",
        "batch_ramp={s.batch_ramp} needs a number for batch_size, not auto: choose one, so that "
        "batch_size x GPUs x gradient_accumulation_steps is the last number of the ramp",
    ),
    Rule(
        lambda s: set(s.out_dir) & set("*?["),
        "out_dir={s.out_dir} has *, ? or [ in it, which DeepSpeed expands: choose another with "
        "--out_dir=DIR",
    ),
)


def broken_rules(settings: Any, requested_batch_size: int) -> list[str]:
    """Return a message for each rule that the settings break. requested_batch_size: batch_size
    before "auto"."""
    # The number that "auto" has replaced is checked: what "auto" becomes isn't known yet
    s = {**asdict(settings), "batch_size": requested_batch_size}
    problems = []
    for name, value in s.items():
        if isinstance(value, float) and not math.isfinite(value):
            problems.append(f"{name}={value} must be a finite number")
    for least, names in AT_LEAST.items():
        for name in names:
            if s[name] is not None and s[name] < least:
                problems.append(f"{name}={s[name]} must be at least {least}")
    for limit, names in BELOW.items():
        for name in names:
            if s[name] is not None and limit <= s[name] < math.inf:
                problems.append(f"{name}={s[name]} must be below {limit:,}")
    for name in ABOVE_ZERO:
        if s[name] is not None and s[name] <= 0:
            problems.append(f"{name}={s[name]:g} must be above 0")
    for name in BELOW_ONE:
        if not 0 <= s[name] < 1:
            problems.append(f"{name}={s[name]} must be at least 0 and below 1")

    # Contradictions
    for rule in RULES:
        if rule.is_broken(settings):
            problems.append(rule.message.format(s=settings))
    return problems


def plan_iterations(s: Any, per_epoch: int | None, batch: BatchSizes, notes: list[str]) -> Any:
    """Return the settings with max_iters and eval_interval from max_epochs and eval_epochs, if
    these are set. Note a learning rate schedule of another length.

    per_epoch: the sequences of an epoch; None if there are problems.
    """
    max_iters = s.max_iters
    eval_interval = s.eval_interval

    # A step takes batch.sequences of them
    if s.eval_epochs is not None and per_epoch:
        eval_interval = s.eval_epochs * per_epoch / batch.sequences
        notes.append(
            f"eval_epochs={s.eval_epochs:g} is {eval_interval:,.2f} iterations; eval_interval is "
            "ignored"
        )
    if s.max_epochs is not None and per_epoch:
        max_iters = math.ceil(s.max_epochs * per_epoch / batch.sequences)
        notes.append(
            f"max_epochs={s.max_epochs:g} is {counted(max_iters, 'iteration')}; max_iters is "
            "ignored"
        )
    elif s.max_epochs is not None:
        notes.append(f"without its dataset, the plan has max_iters={max_iters:,}")

    # Does the schedule have the length of the run?
    if s.decay_lr and s.warmup_iters >= max_iters > 0:
        notes.append(
            f"the run ends after {counted(max_iters, 'iteration')}, during warmup: it never "
            f"reaches learning_rate (warmup_iters={s.warmup_iters:,})"
        )
    elif decays(s) and s.lr_decay_iters not in (None, max_iters) and max_iters:
        notes.append(
            f"the learning rate reaches min_lr after {counted(s.lr_decay_iters, 'iteration')} "
            f"(lr_decay_iters), but the run has {max_iters:,}"
        )
    return replace(s, max_iters=max_iters, eval_interval=eval_interval)


def evaluations_through(steps: float, settings: Any) -> int:
    """Return the number of evaluations up to a step. With eval_epochs, each follows the end of
    those epochs."""
    return math.floor(steps / settings.eval_interval + 1e-9)  # 35 / (7 / 3) is 14.999999999999998
