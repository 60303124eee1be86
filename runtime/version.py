"""The project's version, which pyproject.toml has. CHANGELOG.md says what changed in each."""

import tomllib
from pathlib import Path

PROJECT = "gpt2-deepspeed"
FILE = Path(__file__).resolve().parents[1] / "pyproject.toml"


def project_version() -> str:
    """Return the version, such as "1.0.0", or "unknown" in a copy without pyproject.toml."""
    try:
        text = FILE.read_text(encoding="utf-8")
    except FileNotFoundError:
        return "unknown"
    return tomllib.loads(text)["project"]["version"]


def version_line() -> str:
    """Return what --version prints, such as "gpt2-deepspeed 1.0.0"."""
    return f"{PROJECT} {project_version()}"
