"""Prepare a text dataset of the Hugging Face Hub in GPT-2's tokens, by default OpenWebText. See docs/pretrain.md.

    python data/prepare_hub.py
    python data/prepare_hub.py --dataset=HuggingFaceFW/fineweb-edu --config=sample-10BT --streaming
    python data/prepare_hub.py --dataset=FOLDER --name=openwebtext      # files that another machine has downloaded"""

import argparse
import os
import re
import shlex
import sys
from pathlib import Path

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
from runtime.prepare.pipeline import tokenize
from runtime.untrusted import read_regular

MAX_CARD_BYTES = 10_000_000


def check_card(dataset):
    """Raise UserError if a folder's README.md has aliases in its YAML: few lines of them can fill the memory."""
    card = Path(dataset, "README.md")
    if not card.exists():
        return
    text = read_regular(card, MAX_CARD_BYTES).decode(errors="replace")
    header = text.split("\n---", 1)[0] if text.startswith("---") else ""
    if re.search(r"(^|[\s\[,{:-])\*\w", header):
        raise UserError(f"{card} has YAML aliases in its header, which are not read: remove the header")


def has_text(text):
    """Return whether a document is more than white space."""
    return bool(text) and not text.isspace()


def read_rows(args):
    """Yield rows of 200 documents, [(split, text), (split, b""), ...], in the dataset's splits or nanoGPT's, or
    streamed."""
    from datasets import load_dataset

    check_card(args.dataset)
    names = ["train", args.val] if args.val else ["train"]
    try:
        parts = []
        for name in names:
            data = load_dataset(args.dataset, args.config, split=name, streaming=args.streaming)
            parts.append(data.select_columns(args.column))
        if not args.val and not args.streaming and len(parts[0]) > 1:
            parts = parts[0].train_test_split(0.0005, seed=2357, shuffle=True).values()
        for split, part in zip(SPLITS, parts):
            for number, row in enumerate(part.iter(200)):
                every_2000th = args.streaming and not args.val and number % 2000 == 0
                chosen = "val" if every_2000th else split
                yield [(chosen, piece) for text in row[args.column] if has_text(text) for piece in (text.encode(), b"")]
    except Exception as error:  # a wrong --config or --column, the Hub, the network or the disk
        reason, folder = " ".join(str(error.__cause__ or error).split()), Path(args.dataset).name
        fix = ("check the files in it" if os.path.exists(args.dataset) else
               f"set HF_ENDPOINT to a mirror of the Hub, or run hf download {args.dataset} --repo-type=dataset "
               f"--local-dir={folder} on another machine, and add --dataset={folder}")
        raise UserError(
            f"{args.dataset} can't be read ({reason}): correct --config, --val or --column, or {fix}") from None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     usage="python data/prepare_hub.py [options]", allow_abbrev=False)
    add = parser.add_argument
    add("--dataset", default="Skylion007/openwebtext", type=expand_path,
        help="name on the Hub, or a folder (default: %(default)s)")
    add("--config", help="configuration of the dataset, such as sample-10BT")
    add("--val", metavar="SPLIT", help="the dataset's split for validation, such as validation (default: 0.05%% of its "
        "split train, or with --streaming each 2,000th piece)")
    add("--column", default="text", help="column that holds the text (default: text)")
    add("--name", type=expand_path, help="folder below data/, or a path (default: the last part of --dataset)")
    add("--streaming", action="store_true", help="tokenize during the download, without a cache and without shuffling")
    add("--overwrite", action="store_true", help="replace an existing dataset")
    args = parser.parse_args()
    folder = new_dataset_dir(args.name or Path(args.dataset).name, args.overwrite)
    if os.path.isdir(args.dataset):
        find_files([args.dataset])  # refuses pipes, and links that lead out of it
    tokenizer, vocab_size = tokenizer_meta("gpt2")
    workers = usable_cores()
    with new_files_in(folder, "--name"):
        stored = tokenize(folder, read_rows(args), workers, numpy_encoder(tokenizer), end_of_text(tokenizer), "<u2")
        if len(stored) < len(SPLITS):
            raise UserError(f"{args.dataset} has too few documents for training and validation: choose another")
        meta = write_dataset(folder, *(stored[split, "ids"].view("<u2") for split in SPLITS), tokenizer, vocab_size,
                             {"name": args.dataset, "sha256": None, "bytes": None}, options=vars(args))
    print(f"train: {meta['train_tokens']:,} tokens, val: {meta['val_tokens']:,} tokens\nwritten to {folder}: "
          f"train with --dataset={shlex.quote(args.name or folder.name)}")


if __name__ == "__main__":
    with exit_on_error("interrupted; no dataset was changed"):
        main()
