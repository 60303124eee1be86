"""Prepare texts of your own as a dataset, which --dataset=NAME then trains on. See docs/data.md.

    python data/prepare.py my.txt --name=mine
    python data/prepare.py corpus/ more.jsonl.zst --name=mine --tokenizer=char --val_fraction=0.05
    zcat *.gz | python data/prepare.py - --name=mine --format=jsonl --field=content
    python data/prepare.py chat.jsonl --name=mine --format=chat  # conversations: see docs/chat.md

PATH is a text file, JSON lines (.jsonl, .ndjson, .json), CSV, TSV, Parquet, Arrow, token shards
(.bin, .npy), a folder of them, or "-" for standard input. Text, JSON, CSV and TSV may be compressed
(.gz, .zst, .bz2, .lz4).
"""

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runtime.cores import usable_cores
from runtime.data.dataset import SPLITS, nanogpt_vocabulary
from runtime.data.folder_tokenizer import tokenizer_meta
from runtime.data.folders import new_dataset_dir
from runtime.data.meta import GPT2_VOCAB
from runtime.data.token_files import seeming_type
from runtime.errors import UserError
from runtime.output import counted, exit_on_error, printable
from runtime.paths import expand_path
from runtime.prepare import inputs, pipeline, shards
from runtime.prepare.splits import SplitFiles, choose_splits, shown, skipped_documents
from runtime.version import version_line

RANGES = (("max_document_bytes", 64, 2**24), ("workers", 1, 1024), ("val_fraction", 0, 1))
SMALL_BYTES = 10**7  # of an input; from here on, 1% of the documents is enough for validation
SHARD_OPTIONS = {"--paths", "--name", "--overwrite", "--dtype", "--tokenizer"}
GPT2 = ({"kind": "gpt2"}, GPT2_VOCAB)  # without the tokens themselves, which may be a download


def argument_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="python data/prepare.py PATH... --name=NAME [options]",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--version", action="version", version=version_line())
    # From where to where
    add("paths", metavar="PATH", nargs="+", type=expand_path,
        help="file, folder, or - for standard input")
    add("--name", required=True, type=expand_path,
        help="name of the dataset: a folder below data/, or a path")
    # How texts are read
    add("--tokenizer", default="gpt2", type=expand_path,
        help="gpt2 (the default), char, or the folder of a tokenizer, such as that of weights")
    add("--format", choices=("text", "lines", "jsonl", "csv", "tsv", "parquet", "chat"),
        help="what the files hold (default: by their names); lines: a document per line; chat: "
        "conversations in JSON, Parquet or Arrow")
    add("--field", default="text",
        help="field or column that holds the text (default: text)")
    add("--ignore_fields", metavar="NAMES", default="",
        help="fields of conversations and messages to leave out, separated by commas")
    # How documents are split
    add("--val", metavar="PATH", action="append", default=[], type=expand_path,
        help="file or folder for validation; all others are for training. Can be given several "
        "times")
    add("--val_fraction", type=float,
        help="fraction of documents for validation (default: as the names of the files say, else "
        "0.1 below 10 MB, and 0.01 above)")
    # What few need
    add("--dtype", choices=tuple(shards.RAW_DTYPES),
        help="type of the tokens in .bin files without a header, such as train.bin")
    add("--max_document_bytes", type=int, metavar="BYTES",
        help="size above which a text is cut into several documents (default: 4,096 for a single "
        "text or standard input, otherwise a thousandth of all files, within 4,096 to 1,048,576)")
    add("--workers", type=int, default=usable_cores(),
        help="threads that tokenize (default: %(default)s, one per core)")
    add("--skip_unreadable", action="store_true",
        help="skip documents that aren't UTF-8, aren't JSON or have no text")
    add("--overwrite", action="store_true", help="replace an existing dataset")
    return parser


def main() -> None:
    """Prepare what the command line names. Raises UserError and OSError."""
    parser = argument_parser()
    args = parser.parse_args()

    # Refuse what is wrong before anything is read
    check_ranges(args)
    folder = new_dataset_dir(args.name, args.overwrite)
    files = inputs.find_files(args.paths)
    val_files = []
    if args.val:
        val_files = inputs.find_files(args.val)
    kinds = [args.format or inputs.kind_of(file) for file in files + val_files]
    check_fields(args, parser, files + val_files, set(kinds))

    # Token files are copied, all others are tokenized
    if "shard" in kinds:
        meta = prepare_shards(args, parser, folder, files)
    else:
        if args.dtype:
            raise UserError("--dtype is for token files (.bin): leave it out")
        meta = prepare_texts(args, folder, files, val_files, kinds)

    # What there is now, and the command that uses it
    report(meta)
    print(f"written to {os.path.relpath(folder)}: train with --dataset={shlex.quote(args.name)}")


def report(meta: dict[str, Any]) -> None:
    """Print what a dataset holds, and what was left out of it. meta: its meta.json."""
    documents = meta["documents"]

    # What each split holds
    for split in SPLITS:
        tokens = counted(meta[f"{split}_tokens"], "token")
        print(f"{split}: {tokens} in {counted(documents[split], 'document')}")
    print(f"vocabulary: {meta['vocab_size']:,} ({meta['tokenizer']['kind']}), {meta['dtype']}")

    # What isn't in it, and why
    skipped = skipped_documents(documents)
    if skipped:
        print(f"skipped: {skipped}")
    for line in meta.get("problems", []):
        print(f"  {printable(line)}")
    unused = [f"{name} ({count:,})" for name, count in meta.get("unused_fields", {}).items()]
    if unused:
        print(f"fields that aren't used: {', '.join(unused)}")


def check_ranges(args: argparse.Namespace) -> None:
    """Raise UserError for a number that is out of its range."""
    for name, low, high in RANGES:
        value = getattr(args, name)
        if value is not None and not low <= value <= high:
            raise UserError(f"--{name}={value} must be {low} to {high}")


def check_fields(args: argparse.Namespace, parser: argparse.ArgumentParser, files: list[str],
                 kinds: set[str]) -> None:
    """Raise UserError for an option that would do nothing with what the files hold.

    kinds: of all files, as --format or their names say.
    """
    # Conversations have fields of their own, and a text has none
    is_chat = args.format == "chat"
    has_field = args.field != parser.get_default("field")
    if has_field and is_chat:
        raise UserError(f"--field={args.field} is for texts: drop it, and see docs/chat.md for the "
                        "fields of conversations")
    if has_field and kinds <= {"text", "lines"}:
        raise UserError(f"--field={args.field} is for JSON lines, tables and Parquet, and by their "
                        "names these files are text: say what they hold with --format, such as "
                        "--format=jsonl, or drop it")

    # A table has a column for the text of a row, and none for its messages
    tables = [file for file in files if inputs.kind_of(file) in inputs.DELIMITERS]
    if is_chat and tables:
        raise UserError(f"{tables[0]} is a table, and conversations come from JSON, Parquet or "
                        'Arrow: write a line such as {"prompt": "...", "completion": "..."} for '
                        "each row")
    # What cuts, and what leaves out, needs something to cut or to leave out
    if args.max_document_bytes is not None and not kinds & {"text", "shard"}:
        raise UserError(f"--max_document_bytes={args.max_document_bytes} cuts texts, and these "
                        "files have documents of their own, which are never cut: drop it")
    if args.ignore_fields and not is_chat:
        raise UserError("--ignore_fields is for conversations: add --format=chat, or drop it")


def prepare_shards(args: argparse.Namespace, parser: argparse.ArgumentParser, folder: Path,
                   files: list[str]) -> dict[str, Any]:
    """Copy token files to a dataset, and return its meta.json. Raises UserError."""
    # Nothing is tokenized, split or dropped, so most options would do nothing
    given = set()
    for name, value in vars(args).items():
        if value != parser.get_default(name):
            given.add(f"--{name}")
    unused = given - SHARD_OPTIONS
    if unused:
        raise UserError("shards have their tokens and splits already: leave out "
                        f"{', '.join(sorted(unused))}")
    if args.tokenizer == "char":
        raise UserError("shards have no characters: leave out --tokenizer=char")

    # A folder of the hub has a card, and one of nanoGPT more than that
    files = [file for file in files if not file.endswith(".md")]
    if args.dtype:
        others = [file for file in files if inputs.kind_of(file) != "shard"]
        if others:
            print(f"note: left out, as they are no token files by name: {shown(others)}",
                  flush=True)
        files = [file for file in files if inputs.kind_of(file) == "shard"]

    # Shards have GPT-2's tokens, unless something says otherwise
    tokenizer, vocab_size = GPT2
    if args.tokenizer != "gpt2":
        tokenizer, vocab_size = tokenizer_meta(args.tokenizer)
    elif args.dtype:
        tokenizer, vocab_size = vocabulary_of_folders(files)

    # Say what is read, and what isn't
    size = size_of(files)
    print(f"{counted(len(files), 'shard')}, {counted(size, 'byte')}", flush=True)
    splits = shards.split_shards(files)
    if splits["test"]:
        print(f"note: left out, as their names say test: {shown(splits['test'])}", flush=True)
    for file in files:
        if args.dtype == "uint16" and seeming_type(file) != "uint16":
            print(f"note: {file} seems to hold {seeming_type(file)}, and is read as uint16",
                  flush=True)

    # Where the tokens come from, for meta.json
    source = {"name": " ".join(args.paths), "sha256": None, "bytes": size}
    return shards.prepare(folder, splits, source, tokenizer, vocab_size, args.dtype)


def vocabulary_of_folders(files: list[str]) -> tuple[dict[str, Any], int]:
    """Return the tokenizer and vocab_size of the meta.pkl beside nanoGPT's files, or GPT-2's.

    Raises UserError.
    """
    # nanoGPT's meta.pkl is in the folder of its .bin files
    found = []
    for place in sorted({os.path.dirname(file) for file in files}):
        if os.path.exists(os.path.join(place, "meta.json")):
            raise UserError(f"{place or '.'} has a meta.json, which says the type: train on it as "
                            "it is")
        found.append(nanogpt_vocabulary(place) or GPT2)
    # A dataset has one vocabulary
    if any(vocabulary != found[0] for vocabulary in found):
        raise UserError("the folders of these files have different vocabularies: prepare them "
                        "apart")
    return found[0]


def prepare_texts(args: argparse.Namespace, folder: Path, files: list[str], val_files: list[str],
                  kinds: list[str]) -> dict[str, Any]:
    """Tokenize texts to a dataset, and return its meta.json. Raises UserError.

    val_files: those of --val. kinds: what each of all files holds.
    """
    if args.format == "chat" and len(files) > 1:
        files = [file for file in files if not file.endswith(".md")]  # the dataset's card

    # What the result depends on, before anything is written
    splits = choose_splits(files, val_files, args.val_fraction)
    size = size_of(splits.paths)
    options = options_of(args, splits, size, kinds)
    tokenizer, vocab_size = tokenizer_meta(args.tokenizer)

    # Say what is read before waiting for the first bytes of a pipe
    if splits.how == "fraction":
        how = f"{100 * options['val_fraction']:g}% of the documents for validation"
    else:
        n_val = len(split_paths(splits, "val"))
        how = f"{n_val:,} of them for validation"
    print(f"{counted(len(splits.files), 'file')}, {counted(size, 'byte')}; {how}; "
          f"{counted(args.workers, 'worker')}", flush=True)
    if splits.note:
        print(f"note: {splits.note}", flush=True)
    if args.format is None and "-" in splits.paths:
        inputs.check_pipe_is_text()

    # The texts are tokenized here, by several threads
    return pipeline.prepare(
        folder,
        splits.files,
        tokenizer,
        vocab_size,
        options,
        workers=args.workers,
        skip_unreadable=args.skip_unreadable,
    )


def options_of(args: argparse.Namespace, splits: SplitFiles, size: int,
               kinds: list[str]) -> dict[str, Any]:
    """Return what the bytes of a dataset depend on besides its files. meta.json records it.

    size: of the files in bytes. kinds: what each file holds.
    """
    # A small input needs a larger share for validation
    fraction = None
    if splits.how == "fraction":
        fraction = args.val_fraction
        if fraction is None and 0 < size < SMALL_BYTES:
            fraction = 0.1
        elif fraction is None:
            fraction = 0.01

    # Few texts, such as novels, have to be cut into enough documents for both splits
    max_document_bytes = args.max_document_bytes
    if max_document_bytes is None and kinds == ["text"]:
        max_document_bytes = 4096
    elif max_document_bytes is None:
        max_document_bytes = min(2**20, max(4096, size // 1000))

    return {
        "paths": args.paths,
        "split_by": splits.how,
        "val": args.val or split_paths(splits, "val"),
        "format": args.format,
        "field": args.field,
        "ignore_fields": [name for name in args.ignore_fields.split(",") if name],
        "max_document_bytes": max_document_bytes,
        "val_fraction": fraction,
    }


def split_paths(splits: SplitFiles, split: str) -> list[str]:
    """Return the paths of the files that are for a split as a whole."""
    return [path for path, own in splits.files if own == split]


def size_of(files: list[str]) -> int:
    """Return the bytes of files on the disk, without those of standard input."""
    return sum(os.path.getsize(file) for file in files if file != "-")


if __name__ == "__main__":
    with exit_on_error("interrupted; no dataset was changed"):
        main()
