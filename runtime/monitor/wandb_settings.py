"""Check the settings file that wandb reads in the working directory."""

import configparser
import os

from runtime.errors import UserError
from runtime.untrusted import read_regular

MAX_BYTES = 100_000
HARMLESS = {"disabled", "entity", "mode", "project"}  # what wandb's own commands write


def check_wandb_settings() -> None:
    """Raise UserError if the file sets more than HARMLESS. Raises UnsafeFileError and OSError, too.

    Somebody else may have written it. With base_url, wandb would send the user's key to any server.
    """
    root = os.environ.get("WANDB_DIR", ".")
    for folder in ("wandb", ".wandb"):
        path = os.path.join(root, folder, "settings")
        if not os.path.lexists(path):
            continue
        # The names of all sections
        parser = configparser.RawConfigParser(strict=False)
        try:
            parser.read_string(read_regular(path, MAX_BYTES).decode())
        except (configparser.Error, UnicodeDecodeError):
            raise UserError(f"{path} is not a file of settings: remove it") from None
        names = set(parser.defaults())
        for section in parser.sections():
            names.update(parser.options(section))
        others = sorted(names - HARMLESS)
        if others:
            raise UserError(
                f"{path} sets {', '.join(others)}, and may send your key to somebody else: remove "
                "it, and set environment variables such as WANDB_BASE_URL instead"
            )
