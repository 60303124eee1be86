"""Refuse a setting that nothing reads: one that was added to the training script, and then
forgotten."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from runtime.chosen_model import GPTConfig

RUNTIME = Path(__file__).resolve().parent.parent
# As an attribute, or in a table of names. So runtime/ has to call the settings `settings` or `s`
READS = r"\b(?:settings|s)\.{name}\b|\"{name}\""


def unread_settings(settings: Any) -> list[str]:
    """Return a message for each setting that was set, and that nothing reads.

    A setting is read by the training script, below its settings; by a field of GPTConfig of its
    name; or in runtime/. settings: from configurator.py.
    """
    if settings.script is None:
        return []
    known = {field.name for field in fields(GPTConfig)}
    # In the script, below its settings
    text = Path(settings.script).read_text(encoding="utf-8")
    body = re.split(r"^.*\bconfigurator\.\w+\(", text, maxsplit=1, flags=re.MULTILINE)[-1]
    names = [name for name in settings.changed if name not in known]
    names = [name for name in names if not re.search(rf"\b{name}\b", body)]
    if not names:
        return []

    # In runtime/
    code = "\n".join(path.read_text(encoding="utf-8") for path in RUNTIME.rglob("*.py"))
    unread = [name for name in names if not re.search(READS.format(name=name), code)]
    return [
        f"{name}={getattr(settings, name)!r} is read by nothing: use {name} in the training "
        f"script, add a field {name} to GPTConfig, or read settings.{name} in runtime/"
        for name in unread
    ]
