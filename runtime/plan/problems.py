"""Collect what is wrong with settings, or with files of this machine."""

from collections.abc import Callable
from typing import Any

from runtime.errors import UserError


class Problems(list):
    """All problems of the settings, each once, so that the user sees them together."""

    def add(self, *messages: str) -> None:
        """Add messages that are new."""
        self.extend(message for message in messages if message not in self)

    def attempt(self, function: Callable, *args: Any) -> Any:
        """Return function(*args). If it raises UserError or OSError, add the message and return
        None."""
        try:
            return function(*args)
        except (UserError, OSError) as error:
            self.add(str(error))
            return None


def notes_of_files(file_problems: Problems) -> list[str]:
    """Return a note for each problem with this machine's files."""
    return [f"on this machine, {line}" for line in "\n".join(file_problems).splitlines()]
