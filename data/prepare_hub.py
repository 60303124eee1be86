"""Prepare a text dataset of the Hugging Face Hub in GPT-2's tokens. See docs/pretrain.md.

    python data/prepare_hub.py                   # OpenWebText
    python data/prepare_hub.py --dataset=HuggingFaceFW/fineweb-edu --config=sample-10BT --streaming
    python data/prepare_hub.py --dataset=FOLDER --name=openwebtext  # downloaded elsewhere
"""

import argparse
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runtime.cores import usable_cores
from runtime.data.dataset import SPLITS, write_dataset
from runtime.data.folder_tokenizer import tokenizer_meta
from runtime.data.folders import new_dataset_dir
from runtime.data.tokenizer import end_of_text, numpy_encoder
from runtime.errors import UserError
from runtime.files import new_files_in
from runtime.output import exit_on_error
from runtime.paths import expand_path
from runtime.prepare.inputs import find_files
from runtime.prepare.pipeline import Row, tokenize
from runtime.untrusted import read_regular
from runtime.version import version_line

MAX_CARD_BYTES = 10_000_000
BATCH = 200  # documents of a row
DTYPE = "<u2"  # of GPT-2's ids


def check_card(dataset: str) -> None:
    """Raise UserError if a folder's README.md has aliases in its YAML.

    Few lines of them can fill the memory.
    """
    card = Path(dataset, "README.md")
    if not card.exists():
        return
    # Its header is between two lines of ---
    text = read_regular(card, MAX_CARD_BYTES).decode(errors="replace")
    header = ""
    if text.startswith("---"):
        header = text.split("\n---", 1)[0]
    if re.search(r"(^|[\s\[,{:-])\*\w", header):
        raise UserError(f"{card} has YAML aliases in its header, which are not read: remove the "
                        "header")


def has_text(text: str | None) -> bool:
    """Return whether a document is more than white space."""
    if not text:
        return False
    return not text.isspace()


def read_rows(args: argparse.Namespace) -> Iterator[Row]:
    """Yield rows of 200 documents, [(split, text), (split, b""), ...].

    The splits are the dataset's or nanoGPT's, or, with --streaming, every 2,000th row is for
    validation. Raises UserError.
    """
    check_card(args.dataset)
    try:
        for split, part in zip(SPLITS, load_parts(args)):
            for number, batch in enumerate(part.iter(BATCH)):
                # A stream has one part, of which some rows are for validation
                chosen = split
                if args.streaming and not args.val and number % 2000 == 0:
                    chosen = "val"
                # An empty text ends a document
                row = []
                for text in batch[args.column]:
                    if has_text(text):
                        row.append((chosen, text.encode()))
                        row.append((chosen, b""))
                yield row
    except ModuleNotFoundError:  # a package, whose name says what to install
        raise
    except Exception as error:  # a wrong --config or --column, the Hub, the network or the disk
        reason = " ".join(str(error.__cause__ or error).split())
        raise UserError(f"{args.dataset} can't be read ({reason}): correct --config, --val or "
                        f"--column, or {how_to_reach(args.dataset)}") from None


def load_parts(args: argparse.Namespace) -> list[Any]:
    """Return the dataset's part for training, and one for validation if it has that apart.

    Raises any exception.
    """
    from datasets import load_dataset

    # Another split for validation only where the user names one
    names = ["train"]
    if args.val:
        names.append(args.val)
    # Only the column with the text is read
    parts = []
    for name in names:
        data = load_dataset(args.dataset, args.config, split=name, streaming=args.streaming)
        parts.append(data.select_columns(args.column))
    # As in nanoGPT
    if not args.val and not args.streaming and len(parts[0]) > 1:
        by_split = parts[0].train_test_split(0.0005, seed=2357, shuffle=True)
        parts = list(by_split.values())
    return parts


def how_to_reach(dataset: str) -> str:
    """Return the advice for a dataset that can't be read."""
    if os.path.exists(dataset):
        return "check the files in it"

    # For a machine that cannot reach the Hub
    folder = Path(dataset).name
    return (f"set HF_ENDPOINT to a mirror of the Hub, or run hf download {dataset} "
            f"--repo-type=dataset --local-dir={folder} on another machine, and add "
            f"--dataset={folder}")


def argument_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="python data/prepare_hub.py [options]",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--version", action="version", version=version_line())
    add("--dataset", default="Skylion007/openwebtext", type=expand_path,
        help="name on the Hub, or a folder (default: %(default)s)")
    add("--config", help="configuration of the dataset, such as sample-10BT")
    add("--val", metavar="SPLIT",
        help="the dataset's split for validation, such as validation (default: 0.05%% of its split "
        "train, or with --streaming each 2,000th piece)")
    add("--column", default="text", help="column that holds the text (default: text)")
    add("--name", type=expand_path,
        help="folder below data/, or a path (default: the last part of --dataset)")
    add("--streaming", action="store_true",
        help="tokenize during the download, without a cache and without shuffling")
    add("--overwrite", action="store_true", help="replace an existing dataset")
    return parser


def main() -> None:
    """Prepare the dataset that the command line names. Raises UserError and OSError."""
    args = argument_parser().parse_args()
    folder = new_dataset_dir(args.name or Path(args.dataset).name, args.overwrite)
    if os.path.isdir(args.dataset):
        find_files([args.dataset])  # refuses pipes, and links that lead out of it

    # GPT-2's tokens, and the one that ends each document
    tokenizer, vocab_size = tokenizer_meta("gpt2")
    to_ids = numpy_encoder(tokenizer)
    end = end_of_text(tokenizer)
    # The tokens are in temporary files until all of them are there
    with new_files_in(folder, "--name"):
        stored = tokenize(folder, read_rows(args), usable_cores(), to_ids, end, DTYPE)
        if len(stored) < len(SPLITS):
            raise UserError(f"{args.dataset} has too few documents for training and validation: "
                            "choose another")

        # The dataset, with the source and the options that it was made with
        train_ids, val_ids = (stored[split, "ids"].view(DTYPE) for split in SPLITS)
        source = {"name": args.dataset, "sha256": None, "bytes": None}
        meta = write_dataset(
            folder, train_ids, val_ids, tokenizer, vocab_size, source, options=vars(args))
    print(f"train: {meta['train_tokens']:,} tokens, val: {meta['val_tokens']:,} tokens\n"
          f"written to {folder}: train with --dataset={shlex.quote(args.name or folder.name)}")


if __name__ == "__main__":
    with exit_on_error("interrupted; no dataset was changed"):
        main()
