"""What is wrong with a checkpoint."""

from typing import Self

from runtime.errors import UserError

OTHER_TAG = "choose another checkpoint, or train anew with another --init_from and --overwrite=True"


class CheckpointError(UserError):
    """A checkpoint that is missing, corrupt, unsafe or incompatible."""


class UnreadableError(CheckpointError):
    """A checkpoint that may be intact, but that the system can't read.

    Resuming from an older one would lose work.
    """

    @classmethod
    def of(cls, error: OSError, path: str) -> Self:
        """Return the error for an OSError that reading `path` raised."""
        where = error.filename or path
        why = error.strerror or error
        return cls(
            f"{where} cannot be read ({why}): fix that, or choose another checkpoint (--resume_tag "
            "or --tag)"
        )


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    message = str(error) or type(error).__name__
    return message.splitlines()[0]
