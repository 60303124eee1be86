"""Rules that the settings must keep, as data: ranges, and settings that contradict each other."""

import math

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
    values = {**vars(settings), "batch_size": requested_batch_size}
    problems = [f"{name}={value} must be a finite number" for name, value in values.items()
                if isinstance(value, float) and not math.isfinite(value)]
    problems += [f"{name}={values[name]} must be at least {least}" if least else f"{name}={values[name]} must not be "
                 "negative" for least, names in AT_LEAST.items() for name in names
                 if values[name] is not None and values[name] < least]
    problems += [f"{name}={values[name]} must be at least 0 and below 1" for name in BELOW_ONE
                 if not 0 <= values[name] < 1]
    problems += [sentence.format(s=settings) for broken, sentence in RULES if broken(settings)]
    problems += [f"{name}={values[name]} is for LoRA: add --lora_rank=64, or leave it out"
                 for name, default in NEEDS_LORA.items() if values[name] != default and not settings.lora_rank]
    if settings.init_from not in ("resume", "auto"):
        problems += [f"{name}={values[name]} is for resuming a run: add --init_from=resume"
                     for name, default in NEEDS_RESUME.items() if values[name] != default]
    return problems


def check_schedule(settings, max_iters, problems, notes):
    """Check learning rate and profile against the run's length; note a learning rate that does not end with the run."""
    s = settings
    end = max_iters if s.lr_decay_iters is None else s.lr_decay_iters
    decays = s.decay_lr and s.lr_schedule != "constant"
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
    elif decays and end > max_iters > 0:
        notes.append(f"the run ends after {max_iters:,} iterations, before the learning rate is at its lowest "
                     f"(lr_decay_iters={end:,})")
    elif decays and end < max_iters:
        notes.append(f"the learning rate is at its lowest after {end:,} of {max_iters:,} iterations, and stays there "
                     f"(lr_decay_iters={end:,})")
