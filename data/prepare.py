"""Texts of your own into a data set: --dataset=NAME then trains on it. docs/data.md tells the whole story.

    python data/prepare.py my.txt --name=mine
    python data/prepare.py corpus/ more.jsonl.zst --name=mine --tokenizer=char --val_share=0.05
    zcat *.gz | python data/prepare.py - --name=mine --format=jsonl --field=content

Takes text, JSON lines (.jsonl, .ndjson, .json) and Parquet, folders of them, and "-", standard input; text and JSON
lines also packed by gzip or zstd. Stopped, it goes on when it is asked for the same again.
"""

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from runtime import documents, prepare  # noqa: E402
from runtime.data import tokenizer  # noqa: E402
from runtime.data.dataset import DatasetError, told  # noqa: E402


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     usage="python data/prepare.py PATH... --name=NAME [options]", allow_abbrev=False)
    add = parser.add_argument
    add("paths", metavar="PATH", nargs="+", help="a file, a folder, or - for standard input")
    add("--name", required=True, help="the data set's: a folder below data/, or a path")
    add("--tokenizer", default="gpt2", help="gpt2 (the default), char, or a folder with a tokenizer.json")
    add("--format", choices=("text", "jsonl", "parquet"), help="what the files hold; without it, by their names")
    add("--field", default="text", help="of JSON lines and Parquet, the one that holds the text (default: text)")
    add("--val_share", type=float, help="of the documents, for validation (default: 0.1 below 10 MB, else 0.01)")
    add("--cut", type=int, metavar="BYTES", help="size from which on a text is cut into several documents, at a line's "
        "end (default: 4,096 for a single text, else a mebibyte)")
    add("--shard_tokens", type=int, default=10**10, help="the most in one file (default: 10,000,000,000)")
    add("--workers", type=int, default=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else
        os.cpu_count(), help="processes that tokenize (default: %(default)s, one a core)")
    add("--skip_unreadable", action="store_true", help="leave out what is no UTF-8, no JSON or has no such field")
    add("--overwrite", action="store_true", help="give up another data set, or half-done work on one")
    return parser.parse_args()


def look_at(args):
    """The folder to write to; DatasetError with what is wrong with the arguments, one line each."""
    folder = Path(args.name) if os.sep in args.name else ROOT / "data" / args.name
    wrong = [f"--{name}={getattr(args, name)} must be {what}" for name, good, what in (
        ("val_share", args.val_share is None or 0 < args.val_share < 1, "above 0 and below 1"),
        ("cut", args.cut is None or 64 <= args.cut <= 2**24, "from 64 to 16,777,216 bytes"),
        ("shard_tokens", args.shard_tokens >= 1000, "at least 1000"),
        ("workers", args.workers >= 1, "at least 1")) if not good]
    if not args.name or folder.name in ("", ".", ".."):
        wrong.append(f"--name={args.name} is no name for a folder")
    if (folder / "prepare.py").exists():
        wrong.append(f"--name={args.name}: that data set has a prepare.py of its own; choose another name")
    if wrong:
        raise DatasetError("\n".join(wrong))
    return folder


def absolute(path):
    return path if path == "-" else os.path.abspath(path)


def main():
    args = arguments()
    folder = look_at(args)
    sources = documents.sources(args.paths, args.format, args.field, args.cut)
    size = sum(source.bytes for source in sources)
    val_share = args.val_share or (0.1 if 0 < size < 10**7 else 0.01)
    kind, vocab_size = tokenizer.meta_of(args.tokenizer)
    files = json.dumps([(absolute(source.name), source.bytes, source.changed) for source in sources])
    asked = {"paths": [absolute(path) for path in args.paths], "input": hashlib.sha256(files.encode()).hexdigest(),
             "format": args.format, "field": args.field, "cut": args.cut, "val_share": val_share,
             "tokenizer": kind.get("sha256", args.tokenizer), "shard_tokens": args.shard_tokens}
    print(f"{len(sources):,} file{'s' * (len(sources) != 1)}, {size:,} bytes; {100 * val_share:g}% of the documents "
          f"for validation; {args.workers} processes tokenize", flush=True)
    meta = prepare.prepare(folder, sources, kind, vocab_size, asked, args.workers, args.overwrite, args.skip_unreadable)
    print(prepare.summary(meta) if meta else "nothing is to do: this has been prepared already, from the same files")
    print(f"written to {os.path.relpath(folder)}: train with --dataset={args.name}")


if __name__ == "__main__":
    with told("interrupted; the same command goes on"):
        main()
