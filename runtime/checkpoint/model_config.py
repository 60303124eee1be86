"""The GPTConfig of a tag, whose model.py may have had other fields than the present one."""

import json
import typing
from collections.abc import Callable
from dataclasses import MISSING, asdict, fields
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from runtime.checkpoint.errors import CheckpointError
from runtime.chosen_model import GPTConfig
from runtime.errors import UserError

# Fields of GPTConfig that are no part of the model's shape: a run chooses them
OF_THE_RUN = ("block_size", "vocab_size", "dropout")
SHAPE = tuple(field.name for field in fields(GPTConfig) if field.name not in OF_THE_RUN)


def gpt_config(**values: Any) -> GPTConfig:
    """Return a GPTConfig.

    Raises UserError if it refuses these values, or if a tag can't record them.
    """
    try:
        config = GPTConfig(**values)
    except (TypeError, ValueError) as error:
        raise UserError(str(error)) from None
    # A manifest is JSON
    for name, value in asdict(config).items():
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            raise UserError(
                f"GPTConfig has {name}={value!r}, which a checkpoint can't record: use a number, a "
                "text, True, False, None, or a list of them"
            ) from None
    return config


def config_of_tag(where: str, saved: dict, note: Callable[[str], Any]) -> GPTConfig:
    """Return the GPTConfig that a tag records.

    A field that it doesn't record has its default, which note() says. where: the tag. saved:
    "model" of its manifest's state. Raises UserError.
    """
    # Fields that only the tag has can't be used
    known = {field.name: field for field in fields(GPTConfig)}
    unknown = [name for name in saved if name not in known]
    if unknown:
        names = ", ".join(unknown)
        raise CheckpointError(
            f"{where} was trained with a GPTConfig that has {names}, and the present one has no "
            f"such field: restore {file_of_config()}"
        )

    # Fields that only the present GPTConfig has take their defaults
    missing = [name for name in known if name not in saved]
    without_default = [name for name in missing if default_of(known[name]) is MISSING]
    if without_default:
        names = ", ".join(without_default)
        raise CheckpointError(
            f"{where} doesn't record {names} of GPTConfig, which has no default: give it the value "
            "that the model had"
        )
    if missing:
        defaults = ", ".join(f"{name}={default_of(known[name])!r}" for name in missing)
        note(f"{where} doesn't record all fields of GPTConfig: taking the default {defaults}")

    # A manifest of somebody else may have other types
    kinds = typing.get_type_hints(GPTConfig)
    values = {name: checked(where, name, value, kinds[name]) for name, value in saved.items()}
    return gpt_config(**values)


def checked(where: str, name: str, value: Any, kind: Any) -> Any:
    """Return a value of a manifest as its field of GPTConfig has it.

    Raises CheckpointError if it has another type.
    """
    try:
        return TypeAdapter(kind).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]["msg"]
        raise CheckpointError(f"{where} has {name}={value!r}: {problem}") from None
    except PydanticUserError:  # a class of the user's own
        return value


def default_of(field: Any) -> Any:
    """Return the default of a dataclass's field, or MISSING."""
    if field.default_factory is not MISSING:
        return field.default_factory()
    return field.default


def file_of_config() -> str:
    """Return the name of the file that has GPTConfig."""
    return f"{GPTConfig.__module__}.py"
