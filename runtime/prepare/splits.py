"""Which split each input file is for: as --val says, as the names of the files say, or by document.

The names decide if at least half of them say a split, as in a folder with train.jsonl, valid.jsonl
and test.jsonl. A single "test-drive.txt" among other texts isn't clear, so it is refused with both
ways.
"""

import os
import re
import shlex
from dataclasses import dataclass

from runtime.errors import UserError
from runtime.output import counted

# Words in file names: "train-00.txt" says training, "constrained.txt" doesn't
TRAIN_WORD = re.compile(r"(?<![a-z])train(ing)?(?![a-z])", re.IGNORECASE)
VAL_WORD = re.compile(
    r"(?<![a-z])(val|valid|validation|dev|eval|evaluation)(?![a-z])", re.IGNORECASE)
TEST_WORD = re.compile(r"(?<![a-z])test(ing)?(?![a-z])", re.IGNORECASE)
WORDS = {"train": TRAIN_WORD, "val": VAL_WORD, "test": TEST_WORD}
MOST_SHOWN = 3  # names in a message


@dataclass(frozen=True)
class SplitFiles:
    """The input files in the order in which they are read, and how they are split."""

    # Each with "train", "val", or None if the hash of each of its documents decides
    files: list[tuple[str, str | None]]
    how: str  # "val", "names" or "fraction"
    note: str | None = None  # what to tell the user

    @property
    def paths(self) -> list[str]:
        """The paths of the files."""
        return [path for path, _ in self.files]


def choose_splits(files: list[str], val_files: list[str], fraction: float | None) -> SplitFiles:
    """Return the files with their splits.

    Files for validation come first: of equal documents the first is kept, so none that is
    validated on is trained on. val_files: those of --val. fraction: --val_fraction, or None if it
    isn't given. Raises UserError.
    """
    if val_files:
        return split_as_asked(files, val_files, fraction)
    # What the names say
    by_split = split_by_names(files)
    held_out = by_split["val"] + by_split["test"]
    others = by_split["train"] + by_split["none"]
    if not held_out or not others:  # the names say nothing, or the same of all
        return SplitFiles([(file, None) for file in files], "fraction")

    # It isn't taken if the user says otherwise, or if only few names say it
    says = says_held_out(held_out)
    if fraction is not None:
        note = f"{says}, but --val_fraction={fraction:g} splits all documents"
        return SplitFiles([(file, None) for file in files], "fraction", note)
    if not by_split["train"] or 2 * len(by_split["none"]) > len(files):
        ways = " ".join(f"--val={shlex.quote(file)}" for file in held_out[:MOST_SHOWN])
        raise UserError(f"{says}: add {ways}, or split all documents with --val_fraction=0.1")

    # Files for testing are for validation only if there are no others
    chosen = by_split["val"] or by_split["test"]
    note = f"split by the names of the files: {shown(chosen)} for validation"
    if by_split["val"] and by_split["test"]:
        note += f"; {shown(by_split['test'])} left out"
    if by_split["none"]:
        note += f"; {shown(by_split['none'])} for training"
    kept = set(others)
    ordered: list[tuple[str, str | None]] = [(file, "val") for file in chosen]
    ordered += [(file, "train") for file in files if file in kept]
    return SplitFiles(ordered, "names", f"{note} (--val_fraction=0.1 splits all documents instead)")


def split_as_asked(files: list[str], val_files: list[str], fraction: float | None) -> SplitFiles:
    """Return the files for training, without those for validation, and these. Raises UserError."""
    if fraction is not None:
        raise UserError("--val and --val_fraction can't be combined: drop one")
    if "-" in files and "-" in val_files:
        raise UserError("standard input is named twice, for training and for validation: drop one")
    # A file may be named by a link, and be in a folder that is named, too
    held_out = {os.path.realpath(file) for file in val_files if file != "-"}
    train_files = [file for file in files if file == "-" or os.path.realpath(file) not in held_out]
    if not train_files:
        raise UserError("--val names all files, so none is left to train on: name others")
    # One that says validation by name, and isn't named by --val, was perhaps forgotten
    note = None
    by_split = split_by_names(train_files)
    if by_split["val"] or by_split["test"]:
        says = says_held_out(by_split["val"] + by_split["test"])
        note = (
            f"{says}, and --val doesn't name it, so it is trained on: name the files to train on "
            "instead of their folder to leave it out"
        )

    # Files for validation come first, as above
    ordered: list[tuple[str, str | None]] = [(file, "val") for file in val_files]
    ordered += [(file, "train") for file in train_files]
    return SplitFiles(ordered, "val", note)


def split_by_names(files: list[str]) -> dict[str, list[str]]:
    """Return the files whose names say "train", "val", "test" or, as "none", nothing.

    Only the part of a path counts in which the files differ: its name first, then the folders.
    """
    # The folder that all files share says nothing about any of them
    folders = [os.path.dirname(os.path.abspath(file)) for file in files if file != "-"]
    common = ""
    if folders:
        common = os.path.commonpath(folders)

    # Each file is in one of these lists
    by_split: dict[str, list[str]] = {"train": [], "val": [], "test": [], "none": []}
    for file in files:
        by_split[split_of(file, common)].append(file)
    return by_split


def split_of(file: str, common: str) -> str:
    """Return what the path of a file below the folder `common` says: a key of WORDS, or "none"."""
    if file == "-":
        return "none"

    # The file's own name first, then its folder's
    parts = os.path.relpath(os.path.abspath(file), common).split(os.sep)
    for part in reversed(parts):
        split = split_said(part)
        if split:
            return split
    return "none"


def split_said(name: str) -> str | None:
    """Return the first split that the name of a file or a folder says, a key of WORDS, or None."""
    for split, word in WORDS.items():
        if word.search(name):
            return split
    return None


def check_both_splits(
    counts: dict[str, int], n_bytes: int, fraction: float | None, is_cut: bool
) -> None:
    """Raise UserError unless both splits have a document.

    counts: of a pipeline.Reader. n_bytes: of the input. fraction: --val_fraction, or None if the
    files are split. is_cut: whether long texts are cut, as those of .txt are.
    """
    # Both are needed: without validation, overfitting goes unnoticed
    train = counts["train"]
    val = counts["val"]
    if train and val:
        return
    # What there is
    skipped = skipped_documents(counts)
    found = f"training has {counted(train, 'document')} and validation {val:,}"
    if skipped:
        found += f" (skipped: {skipped})"
    # What helps: the first of these that can
    if counts["unreadable"] and not train and not val:
        fix = "leave out --skip_unreadable to see why the first one can't be read"
    elif fraction is None and train:
        fix = "add a file with other texts for validation with --val=PATH"
    elif fraction is None:
        fix = "add a file with other texts for training"
    elif is_cut:
        size = max(64, int(n_bytes * fraction / 5))
        fix = (
            f"add to these {counted(n_bytes, 'byte')}, change --val_fraction={fraction:g}, cut a "
            f"long text into more documents with --max_document_bytes={size}, or give a file with "
            "--val=PATH"
        )
    else:
        fix = (f"add documents, change --val_fraction={fraction:g}, or give a file with "
               "--val=PATH")
    raise UserError(f"{found}, and each needs one: {fix}")


def skipped_documents(counts: dict[str, int]) -> str:
    """Return what was skipped: "4 duplicates, 2 empty"; "" if nothing was."""
    # Of Reader.counts, what isn't in a split
    parts = []
    for name, count in counts.items():
        if count and name == "duplicates":
            parts.append(counted(count, "duplicate"))
        elif count and name not in ("train", "val"):
            parts.append(f"{count:,} {name}")
    return ", ".join(parts)


def says_held_out(files: list[str]) -> str:
    """Return a clause that says which names say validation or test."""
    verb = "say"
    if len(files) == 1:
        verb = "says"
    return f"{shown(files)} {verb} validation or test by name"


def shown(files: list[str]) -> str:
    """Return the names of a few files, and the number of the others."""
    names = ", ".join(files[:MOST_SHOWN])
    if len(files) > MOST_SHOWN:
        names += f" and {counted(len(files) - MOST_SHOWN, 'other')}"
    return names
