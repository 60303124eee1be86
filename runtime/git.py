"""Say which commit of the project this is."""

from runtime.files import ROOT
from runtime.gpu_problems import run_command


def git_commit() -> str | None:
    """Return the project's commit, with '+' if there are uncommitted changes. None: outside git."""
    described = run_command(
        "git", "-C", ROOT, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"
    )
    return described or None
