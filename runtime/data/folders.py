"""Find the folders of datasets, and say how to make the dataset that should be in one."""

import os
import shlex
from pathlib import Path

from runtime.errors import UserError
from runtime.files import OWN_DATASETS, ROOT


def dataset_dir(dataset: str) -> str:
    """Return the folder of a dataset, which is a path or the name of a folder below data/."""
    return dataset if os.sep in dataset else str(ROOT / "data" / dataset)


def is_own_dataset(folder: str | os.PathLike) -> bool:
    """Return whether a folder is one of OWN_DATASETS."""
    folder = Path(folder).absolute()
    return folder.parent == ROOT / "data" and folder.name in OWN_DATASETS


def new_dataset_dir(name: str, overwrite: bool) -> Path:
    """Return the folder in which a dataset is to be written.

    Raises UserError if it holds one, unless `overwrite`.
    """
    folder = Path(dataset_dir(name))
    if name.strip("/") in ("", ".", ".."):
        raise UserError(f"--name={name} is no name: choose one, such as --name=mine")
    if is_own_dataset(folder):
        raise UserError(
            f"{folder} is for the dataset that its prepare.py makes: choose another --name"
        )
    if not overwrite and (folder / "train.bin").exists():
        raise UserError(
            f"{folder} holds a dataset: choose another --name, or replace it with --overwrite"
        )
    return folder


def how_to_fix(folder: Path) -> str:
    """Return the command that makes the dataset of a folder. It never runs code of that folder."""
    own = shlex.quote(os.path.relpath(folder / "prepare.py"))
    any_text = shlex.quote(os.path.relpath(ROOT / "data" / "prepare.py"))
    hub = shlex.quote(os.path.relpath(ROOT / "data" / "prepare_hub.py"))
    if is_own_dataset(folder):
        return f"run python {own}"

    # The user has given texts, not a dataset
    files = {path.name for path in folder.glob("[!.]*")}
    is_prepared = files & {"train.bin", "val.bin", "meta.json", "prepare.py"}
    if folder.is_file() or (files and not is_prepared):
        text = shlex.quote(str(folder))
        return f"run python {any_text} {text} --name=mine, and train with --dataset=mine"

    # A dataset that isn't there, or isn't whole
    is_below_data = folder.parent == ROOT / "data"
    name = folder.name if is_below_data else os.path.abspath(folder)
    replace = " --overwrite" if (folder / "train.bin").exists() else ""
    if name == "openwebtext":
        return f"run python {hub}{replace}"
    return f"run python {any_text} PATH --name={shlex.quote(name)}{replace}"
