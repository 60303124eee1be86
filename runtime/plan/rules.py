"""Rules that the settings must keep, as data: ranges, and settings that contradict each other."""

import math

from runtime.data.loader import windows_per_epoch
from runtime.lora import TARGET_MODULES

AT_LEAST = {
    1: ("batch_size", "gradient_accumulation_steps", "block_size", "eval_interval", "eval_iters", "log_interval",
        "patience", "profile_start", "profile_iters", "sample_tokens"),
    0: ("keep_last", "max_iters", "max_skipped_steps", "sample_interval", "warmup_iters", "learning_rate", "grad_clip",
        "weight_decay", "lr_decay_iters", "cooldown_iters"),
}  # fmt: skip
BELOW_ONE = ("dropout", "beta1", "beta2")
NEEDS_LORA = {"lora_alpha": None, "lora_dropout": 0.0, "lora_target_modules": ", ".join(TARGET_MODULES)}  # and defaults
NEEDS_RESUME = {"resume_tag": "latest", "resume_weights_only": False}
RULES = [  # (whether the settings break it, what to say)
    (lambda s: s.decay_lr and s.min_lr is not None and not 0 <= s.min_lr <= s.learning_rate,
     "min_lr={s.min_lr} must be between 0 and learning_rate={s.learning_rate}"),
    (lambda s: s.max_epochs is not None and s.max_epochs <= 0, "max_epochs={s.max_epochs:g} must be above 0"),
    (lambda s: not 0 <= s.seed < 2**63, "seed={s.seed} must be at least 0 and below 2**63"),
    (lambda s: s.target_gpu is not None and not s.dry_run,
     "target_gpu={s.target_gpu} plans for another machine: add --dry_run=True"),
    (lambda s: s.target_gpu is not None and s.device == "cpu",
     "target_gpu={s.target_gpu} is a GPU, and device=cpu: leave one out"),
    (lambda s: s.lora_rank and s.init_from == "scratch",
     "lora_rank={s.lora_rank} with init_from=scratch would leave random weights as they are: name weights, or leave it "
     "out"),
    (lambda s: s.profile and s.eval_only, "profile=True traces training: leave out eval_only"),
    (lambda s: s.cooldown_iters is not None and not (s.decay_lr and s.lr_schedule == "wsd"),
     "cooldown_iters={s.cooldown_iters} is of --lr_schedule=wsd: add that, or leave it out"),
    (lambda s: s.skip_grad_spikes and s.any_deepspeed,
     "skip_grad_spikes=True needs our own gradient path, which any_deepspeed=True turns off: leave one of them out"),
]


def broken_rules(settings, requested_batch_size):
    """Return a sentence for each rule that the settings break. requested_batch_size: batch_size before "auto"."""
    s = {**vars(settings), "batch_size": requested_batch_size}
    problems = [f"{name}={value} must be a finite number" for name, value in s.items()
                if isinstance(value, float) and not math.isfinite(value)]
    for least, names in AT_LEAST.items():
        problems += [f"{name}={s[name]} must {f'be at least {least}' if least else 'not be negative'}"
                     for name in names if s[name] is not None and s[name] < least]
    problems += [f"{name}={s[name]} must be at least 0 and below 1" for name in BELOW_ONE if not 0 <= s[name] < 1]
    problems += [sentence.format(s=settings) for broken, sentence in RULES if broken(settings)]
    for is_used, defaults, purpose in (
            (settings.lora_rank, NEEDS_LORA, "LoRA: add --lora_rank=64"),
            (settings.init_from in ("resume", "auto"), NEEDS_RESUME, "resuming a run: add --init_from=resume")):
        problems += [f"{name}={s[name]} is for {purpose}, or leave it out"
                     for name, default in defaults.items() if s[name] != default and not is_used]
    return problems


def plan_iterations(s, datasets, batch, problems, notes):
    """Return max_iters, or what max_epochs makes of it. Checks learning rate and profile against the run's length, and
    notes a learning rate that does not end with the run."""
    max_iters = s.max_iters
    if s.max_epochs is not None and datasets and not problems:
        windows = sum(windows_per_epoch(d.meta["train_tokens"], s.block_size)[0] for d in datasets)
        max_iters = math.ceil(s.max_epochs * windows / batch.sequences)
        notes.append(f"max_epochs={s.max_epochs:g} is {max_iters:,} iterations; max_iters does not count")
    end = max_iters if s.lr_decay_iters is None else s.lr_decay_iters
    if s.cooldown_iters is not None and s.warmup_iters + s.cooldown_iters > end and s.warmup_iters < max_iters:
        problems.add(f"cooldown_iters={s.cooldown_iters} and warmup_iters={s.warmup_iters} are more than the {end} "
                     "iterations until the learning rate is at its lowest: at most "
                     f"--cooldown_iters={max(0, end - s.warmup_iters)}")
    if s.profile and not s.eval_only and max_iters < s.profile_start + s.profile_iters:
        problems.add(f"profile=True traces {s.profile_iters} iterations after {s.profile_start}, and there are fewer: "
                     "more --max_iters, or a smaller --profile_start")
    if s.decay_lr and s.warmup_iters >= max_iters > 0:
        notes.append(f"the run ends after {max_iters:,} iterations, within its warmup: learning_rate is not reached "
                     f"(warmup_iters={s.warmup_iters:,})")
    elif s.decay_lr and s.lr_schedule != "constant" and end != max_iters > 0:
        when = (f"run ends after {max_iters:,} iterations, before the learning rate is at its lowest" if end > max_iters
                else f"learning rate is at its lowest after {end:,} of {max_iters:,} iterations, and stays there")
        notes.append(f"the {when} (lr_decay_iters={end:,})")
    return max_iters
