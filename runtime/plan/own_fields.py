"""Fields of GPTConfig that users have added, when a run starts from a tag: its values or those of
the settings.

A field that a tensor depends on is the tag's. Any other, such as the weight of an auxiliary loss or
the base of rotary positions, may be set anew, which a note reports.
"""

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from runtime.checkpoint.model_config import default_of, gpt_config
from runtime.chosen_model import GPT, GPTConfig
from runtime.model_parts import tensors_of, without_memory

OURS = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "dropout", "bias", "gelu")


def take_own_fields(
    where: str, config: GPTConfig, state: Mapping, settings: Any, notes: list[str]
) -> GPTConfig:
    """Return a tag's GPTConfig with the settings of fields that no tensor depends on.

    Notes each field whose value is not what a reader may expect. where: the tag. state: of its
    manifest.
    """
    taken = {}
    for field in fields(config):
        if field.name in OURS:
            continue
        name = field.name
        before = asdict(config)[name]
        wanted = getattr(settings, name, None)

        # A given setting. If a tensor depends on it, check_shape() refuses it
        if wanted is not None:
            if wanted != before and has_same_tensors(config, name, wanted):
                taken[name] = wanted
                notes.append(f"this run has {name}={wanted!r}, and {where} had {name}={before!r}")
            continue

        # Without one, a new default doesn't count. A given value is what its user expects
        default = default_of(field)
        was_given = state["settings"].get(name) == before
        if before != default and not was_given:
            how = how_to_change(config, name, default, settings)
            notes.append(
                f"this run has {name}={before!r} of {where}: the default of GPTConfig, "
                f"{default!r}, is for runs from scratch{how}"
            )
    return gpt_config(**{**asdict(config), **taken})


def how_to_change(config: GPTConfig, name: str, value: Any, settings: Any) -> str:
    """Return the end of a sentence that says how to give a field a value, or nothing if a tensor
    depends on it."""
    if not has_same_tensors(config, name, value):
        return ""
    if hasattr(settings, name):
        return f"; --{name}={value} changes it"
    return f"; add a setting {name} to the training script to change it"


def has_same_tensors(config: GPTConfig, name: str, value: Any) -> bool:
    """Return whether the model has the same tensors with another value of a field.

    A buffer that a checkpoint has may depend on the field, too, so then they count as others.
    """
    try:
        changed = gpt_config(**{**asdict(config), name: value})
        own = tensors_of(without_memory(lambda: GPT(config)))
        other = tensors_of(without_memory(lambda: GPT(changed)))
    except Exception:  # whatever a model raises that can't have this value
        return False
    return not own.differences(other) and not own.buffers
