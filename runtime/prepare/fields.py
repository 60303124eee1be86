"""The fields of an object that somebody else wrote: each is taken, ignored or refused by name."""

import math
import shlex
from collections.abc import Collection
from typing import Any

from runtime.output import printable

# They say where a conversation or a message comes from, and not its words
METADATA = frozenset((
    "id", "_id", "idx", "index", "uuid", "prompt_id", "message_id", "conversation_id",
    "conversation_hash", "source", "dataset", "dataset_name", "data_source", "url", "license",
    "category", "tags", "language", "lang", "model", "timestamp", "created", "created_at",
    "num_turns"))
MOST_SHOWN = 60  # characters of a name
TOOLS = "the chat template has no place for tools: write them into a system message"
CALLS = "the chat template has no place for tool calls: write them into the text of the answer"
RESULTS = "the chat template has no place for tool calls: write their results into a user message"
NAMES = "the chat template has no place for names: write them into the text of the message"
MEDIA = "the model reads text alone: remove such conversations"
# Why fields that many datasets have are refused, and what to do
REASONS = {
    "tools": TOOLS, "functions": TOOLS, "tool_calls": CALLS, "function_call": CALLS,
    "tool_call_id": RESULTS, "name": NAMES, "image": MEDIA, "images": MEDIA, "video": MEDIA,
    "videos": MEDIA, "audio": MEDIA, "audios": MEDIA}


def is_missing(value: Any) -> bool:
    """Return whether a value is none: null, or the NaN that pandas writes for it."""
    return value is None or isinstance(value, float) and math.isnan(value)


def says_nothing(value: Any) -> bool:
    """Return whether a value is empty, as Parquet and Arrow fill fields that other rows have."""
    if isinstance(value, dict):
        return all(says_nothing(item) for item in value.values())
    if isinstance(value, str):
        return value.strip() in ("", "[]")
    return is_missing(value) or value == []


class Fields:
    """The fields of an object, without those that are missing or ignored.

    left: those that weren't taken. unused: names of the ignored ones.
    """

    def __init__(self, values: dict[str, Any], ignored: Collection[str]) -> None:
        self.left: dict[str, Any] = {}
        self.unused: set[str] = set()
        # A field that is null or NaN isn't there
        for name, value in values.items():
            if is_missing(value):
                continue
            if name in ignored:
                self.unused.add(name)
            else:
                self.left[name] = value

    def __contains__(self, name: str) -> bool:
        return name in self.left

    def take(self, name: str) -> Any:
        """Return the value of a field, or None."""
        return self.left.pop(name, None)

    def drop(self, name: str) -> None:
        """Leave out a field that says nothing new."""
        del self.left[name]
        self.unused.add(name)

    def refusals(self, metadata: Collection[str]) -> list[str]:
        """Return a sentence for each field that is left, unless it says nothing.

        metadata: names of fields that may be left.
        """
        sentences = []
        for name, value in self.left.items():
            if name in metadata:
                self.unused.add(name)
            elif not says_nothing(value):  # Parquet has such a field in each row
                # Half a character can't be printed
                whole = name[:MOST_SHOWN].encode(errors="backslashreplace").decode()
                short = printable(whole)
                reason = f"the field '{short}' isn't known, and may change the meaning:"
                if name in REASONS:
                    reason = f"the field '{short}': {REASONS[name]}, or"
                sentences.append(f"{reason} leave it out with --ignore_fields={shlex.quote(short)}")
        return sentences
