"""Paths as users write them: with ~ and with environment variables."""

import os
import re

from runtime.errors import UserError

# The settings of all scripts that are, or may be, paths
PATH_SETTINGS = {
    "out_dir",
    "init_from",
    "dataset",
    "deepspeed_config",
    "prompts_file",
    "hellaswag",
    "lambada",
    "text",
    "to",
    # examples/animals90
    "train_dir",
    "val_dir",
    "data_dir",
    "checkpoint_dir",
    "log_dir",
    "resume",
    "pretrained",
    "config",
}


def expand_path(path: str) -> str:
    """Return a path with ~ and $VARIABLES replaced. Raises UserError if one of them is unknown.

    The shell replaces neither in --out_dir=~/run, nor in a config file. Without this, a run would
    write into a folder that is named ~.
    """

    def value_of(match: re.Match) -> str:
        name = match[1] or match[2]
        value = os.environ.get(name)
        if not value:
            raise UserError(
                f"{path}: the variable {name} is not set: set it, or write the folder itself"
            )
        return value

    # $NAME and ${NAME}
    expanded = re.sub(r"\$(?:(\w+)|\{(\w+)\})", value_of, path)
    if re.search(r"\$[{(]|`", expanded):  # ${NAME:-other}, $(command)
        raise UserError(
            f"{path}: of what a shell replaces, only ~, $NAME and ${{NAME}} are replaced here: "
            "write the folder itself, or in a config compute it in Python"
        )

    # ~ and ~USER
    if not expanded.startswith("~"):
        return expanded
    home = os.path.expanduser(expanded)
    if home.startswith("~"):
        raise UserError(f"{path}: there is no such user: write ./{path} for a folder of this name")
    return home


def expand_setting(value: object) -> object:
    """Return the value of a setting with its paths expanded: a path, a dict of paths, or None.

    Raises UserError.
    """
    if isinstance(value, dict):  # a mixture of datasets, {path: weight}
        expanded = {}
        for key, item in value.items():
            if isinstance(key, str):
                key = expand_path(key)
            expanded[key] = item
        return expanded
    if isinstance(value, str):
        return expand_path(value)
    return value
