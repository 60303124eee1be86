"""Documents into a prepared dataset, on the datasets library: rows of records are stored, tokenized by its workers, and
written in the order in which they were read, so the bytes are the same for any number of workers. Exact duplicates are
dropped. A document is for validation if its hash is small, and so in each run.
"""

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import shutil
import signal
import sys
import threading
import time

import numpy as np

from runtime.data.dataset import SPLITS, DatasetError, write_dataset
from runtime.data.tokenizer import CODE_POINTS, end_of_text, numpy_encoder
from runtime.files import write_atomic
from runtime.prepare import inputs

FEW_VAL_TOKENS = 20_000  # their mean loss says little
ROWS_IN_MEMORY = 16  # of about a megabyte, that each process collects before it writes them
# Of a record: the hash of its text, its number of tokens (-1 if it can't be read), whether a document ends with it
RECORD = np.dtype([("hash", "<u8"), ("size", "<i8"), ("ends", "?")])


def prepare(folder, sources, tokenizer, vocab_size, request, workers, overwrite=False, skip_unreadable=False):
    """Make a dataset of `sources` in `folder` and return its meta.json; None if it is there already.

    tokenizer, vocab_size: from tokenizer_meta(). request: all that the bytes depend on. Raises DatasetError.
    """
    if not overwrite and is_done(folder, request):
        return None
    dtype = "<u2" if vocab_size <= 2**16 else "<u4"
    with work_folder(folder) as work:
        encode = Encode(tokenizer, request["field"], dtype, skip_unreadable, work / "error")
        tokens = tokenize(work, sources, encode, request["max_document_bytes"], workers)
        layout = Layout(tokens, request["val_fraction"])
        layout.check(folder)
        if tokenizer["kind"] == "char":  # so far they are code points; now they get their ids, in order
            chars = sorted(set("\n").union(*tokens["chars"]))
            ids = np.zeros(CODE_POINTS, np.uint32)
            ids[list(map(ord, chars))] = np.arange(len(chars))
            tokenizer, vocab_size, separator = {"kind": "char", "chars": "".join(chars)}, len(chars), ord("\n")
        else:
            ids, separator = None, end_of_text(tokenizer)
        train, val = (layout.split(tokens, name, dtype, separator, ids) for name in SPLITS)
        sha256 = functools.reduce(lambda before, file: hashlib.sha256((before + file).encode()).hexdigest(),
                                  filter(None, tokens["sha256"]))  # of one file, or of several chained
        source = {"name": " ".join(request["paths"]), "sha256": sha256, "bytes": sum(tokens["bytes"])}
        return write_dataset(folder, train, val, tokenizer, vocab_size, source, documents=layout.counts,
                             request=request)


def is_done(folder, request):
    """Whether `folder` holds what is asked for; DatasetError where it holds another dataset."""
    try:
        before = json.loads((folder / "meta.json").read_text(encoding="utf-8")).get("request", {})
    except (OSError, ValueError):
        before = {}
    if before == request and "-" not in request["paths"]:
        return True
    if not (folder / "meta.json").exists() and not (folder / "train.bin").exists():
        return False
    changed = [key for key in request if before.get(key) != request[key]]
    if not before:
        difference = "that was not prepared from this"
    elif not changed:
        difference = "from standard input, which may hold something else now"
    elif changed == ["input"]:
        difference = "from the same files, which have changed since"
    else:
        difference = "with " + ", ".join(f"{key}={before.get(key)}" for key in changed if key != "input")
    raise DatasetError(f"{folder} holds a dataset {difference}: choose another --name, or replace it with --overwrite")


@contextlib.contextmanager
def work_folder(folder):
    """`folder`/.partial, empty and for this process alone, removed at the end; after a kill, by the next run."""
    work = folder / ".partial"
    work.mkdir(parents=True, exist_ok=True)
    with open(work / ".lock", "w") as lock:
        try:  # not flock: workers, which live a second longer than a process that is killed, would hold that too
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise DatasetError(f"another process is preparing {folder}: wait, or choose another --name") from None
        try:
            for path in work.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.name == ".lock" or path.unlink()
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)
            with contextlib.suppress(OSError):  # where it holds a dataset
                folder.rmdir()


def tokenize(work, sources, encode, max_document_bytes, workers):
    """The rows of read_records(), each encoded, as a datasets.Dataset in the folder `work`."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read as the library is imported: nothing here needs the network
    if not sys.stderr.isatty():  # then it shows its progress once a minute
        for name in ("TQDM_DELAY", "TQDM_MININTERVAL", "TQDM_MAXINTERVAL"):
            os.environ.setdefault(name, "60")
    import datasets
    import multiprocess

    datasets.logging.set_verbosity_error()
    os.register_at_fork(after_in_child=functools.partial(follow_parent, os.getpid()))
    string, number, binary = (datasets.Value(name) for name in ("string", "int64", "large_binary"))
    end_of_file = {"sha256": string, "bytes": number}
    row = {"file": string, "kind": string, "first": number, "records": datasets.List(binary)}
    try:
        rows = datasets.Dataset.from_generator(
            inputs.read_records, datasets.Features(row | end_of_file), work, fingerprint="records",
            gen_kwargs={"sources": tuple(sources), "field": encode.field, "max_document_bytes": max_document_bytes},
            writer_batch_size=ROWS_IN_MEMORY)
        encoded = datasets.Features({"ids": binary, "encoded": binary, "chars": string} | end_of_file)
        return rows.map(encode, num_proc=workers, remove_columns=list(row), features=encoded,
                        writer_batch_size=ROWS_IN_MEMORY, cache_file_name=str(work / "tokens.arrow"),
                        new_fingerprint="tokens", desc="tokenizing")
    except (datasets.exceptions.DatasetGenerationError, multiprocess.TimeoutError) as error:
        raise error.__context__ from None  # read_records()'s error, or Ctrl-C
    except RuntimeError as error:
        if "abruptly died" not in str(error):
            raise
        raise DatasetError("a worker process was killed, perhaps because the memory was full: --workers=N starts "
                           "fewer") from None


def follow_parent(parent):
    """Called in each process that the library forks: Ctrl-C is its parent's to answer, and it ends with its parent,
    also where that is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch():
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class Encode:
    """A worker's function: a row of records into their token ids and RECORDs, both as bytes, and into the characters,
    where they are the tokens."""

    def __init__(self, tokenizer, field, dtype, skip_unreadable, error_file):
        self.tokenizer, self.field, self.dtype, self.skip_unreadable = tokenizer, field, dtype, skip_unreadable
        self.error_file = error_file  # by which the others stop when one of them fails

    @functools.cached_property
    def encoder(self):
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        return numpy_encoder(self.tokenizer)

    def __call__(self, row):
        if self.error_file.exists():
            raise DatasetError(self.error_file.read_text())
        encoded, ids, place = [], [np.zeros(0, self.dtype)], row["first"]
        for record in row["records"]:
            try:
                text, ends = inputs.text_of(record, row["kind"], self.field)
                digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
                ids.append(self.encoder(text))
                encoded.append((int.from_bytes(digest, "little"), len(ids[-1]), ends))
            except ValueError as error:
                if not self.skip_unreadable:
                    reason = "has half of a surrogate pair in its text" if isinstance(error, UnicodeError) else error
                    message = (f"{row['file']}, {inputs.UNIT[row['kind']]} {place:,} {reason}; "
                               "--skip_unreadable leaves such documents out")
                    write_atomic(self.error_file, message)  # ends the run in all workers
                    raise DatasetError(message) from None
                encoded.append((0, -1, True))
            place += len(record) if row["kind"] == "text" else 1
        tokens = np.concatenate(ids).astype(self.dtype)
        chars = "".join(map(chr, np.flatnonzero(np.bincount(tokens)))) if self.tokenizer["kind"] == "char" else ""
        return {"ids": tokens.tobytes(), "encoded": np.array(encoded, RECORD).tobytes(), "chars": chars}


class Layout:
    """Which split each record goes to, and where the separators are."""

    def __init__(self, tokens, val_fraction):
        records = np.frombuffer(b"".join(tokens["encoded"]), RECORD)
        self.hashes, sizes = records["hash"], records["size"]
        self.rows = np.cumsum([0, *map(len, tokens["encoded"])]) // RECORD.itemsize  # where each row's records begin
        last = [end - 1 for end, sha256 in zip(self.rows[1:], tokens["sha256"]) if sha256 and end]  # of their files
        filled = np.flatnonzero(sizes > 0)
        self.keep = np.zeros(len(sizes), bool)
        self.keep[filled[np.unique(self.hashes[filled], return_index=True)[1]]] = True  # the first of its kind
        is_val = self.hashes < np.uint64(int(val_fraction * 2**64))
        # Between pieces of a text that was cut there is none, unless the next one is in the other split or dropped.
        open_end = ~records["ends"]
        open_end[last] = False
        continued = open_end[:-1] & self.keep[1:] & (is_val[1:] == is_val[:-1])
        self.separated = self.keep & ~np.append(continued, False)
        self.sizes = np.maximum(sizes, 0)
        self.chosen = {"train": self.keep & ~is_val, "val": self.keep & is_val, "duplicates": (sizes > 0) & ~self.keep,
                       "empty": sizes == 0, "unreadable": sizes < 0}
        self.counts = {name: int(chosen.sum()) for name, chosen in self.chosen.items()}

    def check(self, folder):
        """DatasetError unless there is something in both splits."""
        train, val = self.counts["train"], self.counts["val"]
        if train and val:
            return
        if train + val == 0:
            problem = "the input has no text"
        elif train + val == 1:
            problem = "it is one document, and two splits need more; --max_document_bytes=BYTES cuts it into several"
        elif val == 0:
            enough = int(self.hashes[self.keep].min()) / 2**64 + 0.0005  # rounded up
            problem = f"none of its {train} documents fell to validation; --val_fraction={enough:.3f} is enough for one"
        else:
            problem = f"all of its {val} documents fell to validation; a smaller --val_fraction leaves some to train on"
        raise DatasetError(f"{folder} can't be made: {problem}")

    def split(self, tokens, name, dtype, separator, table=None):
        """The token ids of a split, an array per row. table: the ids of what the tokens are so far."""
        for begin, end, packed in zip(self.rows, self.rows[1:], tokens["ids"]):
            sizes, separated = self.sizes[begin:end], self.separated[begin:end]
            ids = np.insert(np.frombuffer(packed, dtype), np.cumsum(sizes)[separated], separator)
            ids = ids[np.repeat(self.chosen[name][begin:end], sizes + separated)]
            yield ids if table is None else table[ids]


def summary(meta):
    """What was prepared, for the screen."""
    documents = meta["documents"]
    lines = [f"{split}: {meta[f'{split}_tokens']:,} tokens in {documents[split]:,} documents" for split in SPLITS]
    lines.append(f"vocabulary: {meta['vocab_size']:,} ({meta['tokenizer']['kind']}), {meta['dtype']}")
    if left_out := [f"{documents[name]:,} {name}" for name in ("duplicates", "empty", "unreadable") if documents[name]]:
        lines.append(f"left out: {', '.join(left_out)}")
    if meta["val_tokens"] < FEW_VAL_TOKENS:
        lines.append("note: these are few tokens to validate with; a larger --val_fraction takes more")
    return "\n".join(lines)
