"""Texts of your own into a dataset: --dataset=NAME then trains on it. docs/data.md has the details.

    python data/prepare.py my.txt --name=mine
    python data/prepare.py corpus/ more.jsonl.zst --name=mine --tokenizer=char --val_fraction=0.05
    zcat *.gz | python data/prepare.py - --name=mine --format=jsonl --field=content

Takes text, JSON lines (.jsonl, .ndjson, .json) and Parquet, folders of them, and "-", standard input; text and JSON
lines also compressed by gzip or zstd.
"""

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from runtime.data.dataset import DatasetError, exit_on_error  # noqa: E402
from runtime.data.tokenizer import tokenizer_meta  # noqa: E402
from runtime.prepare import inputs, pipeline  # noqa: E402


def arguments():
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     usage="python data/prepare.py PATH... --name=NAME [options]", allow_abbrev=False)
    add = parser.add_argument
    add("paths", metavar="PATH", nargs="+", help="a file, a folder, or - for standard input")
    add("--name", required=True, help="the dataset's: a folder below data/, or a path")
    add("--tokenizer", default="gpt2", help="gpt2 (the default), char, or a folder with a tokenizer.json")
    add("--format", choices=("text", "jsonl", "parquet"), help="what the files hold (default: by their names)")
    add("--field", default="text", help="of JSON lines and Parquet, the one that holds the text (default: text)")
    add("--val_fraction", type=float, help="of the documents, for validation (default: 0.1 below 10 MB, else 0.01)")
    add("--max_document_bytes", type=int, metavar="BYTES", help="size from which on a text is cut into several "
        "documents, at a line's end (default: 4,096 for a single text, else a mebibyte)")
    add("--workers", type=int, default=cores, help="processes that tokenize (default: %(default)s, one per core)")
    add("--skip_unreadable", action="store_true", help="leave out what is not UTF-8, not JSON or has no such field")
    add("--overwrite", action="store_true", help="replace another dataset")
    return parser.parse_args()


def check(args):
    """The folder to write to; DatasetError with what is wrong with the arguments, one line each."""
    folder = Path(args.name) if os.sep in args.name else ROOT / "data" / args.name
    wrong = [f"--{name}={getattr(args, name)} {what}" for name, good, what in (
        ("val_fraction", args.val_fraction is None or 0 < args.val_fraction < 1, "must be above 0 and below 1"),
        ("max_document_bytes", args.max_document_bytes is None or 64 <= args.max_document_bytes <= 2**24,
         "must be from 64 to 16,777,216 bytes"),
        ("workers", args.workers >= 1, "must be at least 1"),
        ("name", args.name and folder.name not in ("", ".", ".."), "is not a name for a folder"),
        ("name", not (folder / "prepare.py").exists(), "has a prepare.py of its own; choose another name")) if not good]
    if wrong:
        raise DatasetError("\n".join(wrong))
    return folder


def main():
    args = arguments()
    folder = check(args)
    sources = inputs.find_sources(args.paths, args.format)
    size = sum(source.bytes for source in sources)
    kind, vocab_size = tokenizer_meta(args.tokenizer)
    absolute = {path: path if path == "-" else os.path.abspath(path)
                for path in (*args.paths, *(source.name for source in sources))}
    files = json.dumps([(absolute[source.name], source.bytes, source.changed) for source in sources])
    one_text = [source.kind for source in sources] == ["text"]
    request = {"paths": [absolute[path] for path in args.paths], "input": hashlib.sha256(files.encode()).hexdigest(),
               "format": args.format, "field": args.field, "tokenizer": kind.get("sha256", args.tokenizer),
               "max_document_bytes": args.max_document_bytes or (4096 if one_text else 2**20),
               "val_fraction": args.val_fraction or (0.1 if 0 < size < 10**7 else 0.01)}
    print(f"{len(sources):,} file{'s' * (len(sources) != 1)}, {size:,} bytes; {100 * request['val_fraction']:g}% of "
          f"the documents for validation; {args.workers} processes tokenize", flush=True)
    meta = pipeline.prepare(folder, sources, kind, vocab_size, request, args.workers, args.overwrite,
                            args.skip_unreadable)
    print(pipeline.summary(meta) if meta else "nothing to do: this has been prepared already, from the same files")
    print(f"written to {os.path.relpath(folder)}: train with --dataset={args.name}")


if __name__ == "__main__":
    with exit_on_error("interrupted; nothing was changed"):
        main()
