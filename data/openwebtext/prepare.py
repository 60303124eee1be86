"""OpenWebText in GPT-2's tokens, split as nanoGPT splits it: writes train.bin, val.bin, meta.json, meta.pkl.

    pip install datasets==5.2.0
    python data/openwebtext/prepare.py

8,013,769 documents: 54 GB in Hugging Face's cache and 18 GB here. Stopped, it goes on when it is run again.
"""

import os
import sys
from functools import partial
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent.parent))

from runtime import prepare  # noqa: E402
from runtime.data import tokenizer  # noqa: E402
from runtime.data.dataset import DatasetError, told  # noqa: E402
from runtime.documents import Source, batched  # noqa: E402

DOCUMENTS = 8_013_769
COUNTS = {"train": 9_035_582_198, "val": 4_434_897}  # tokens, as nanoGPT publishes them
WORKERS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def fetch():
    """{"train": ..., "val": ...}: the two parts, as Hugging Face's data sets."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise DatasetError("OpenWebText comes by Hugging Face's datasets, which is not installed: "
                           "pip install datasets==5.2.0") from None
    try:
        whole = load_dataset("Skylion007/openwebtext", split="train")
    except Exception as error:  # whatever ails the hub, the network or the disk
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DatasetError(f"OpenWebText could not be fetched ({reason}): HF_ENDPOINT names a mirror of the hub; or "
                           "bring ~/.cache/huggingface from a machine that has it") from None
    if len(whole) != DOCUMENTS:
        raise DatasetError(f"this OpenWebText has {len(whole):,} documents, not nanoGPT's {DOCUMENTS:,}")
    parts = whole.train_test_split(test_size=0.0005, seed=2357, shuffle=True)
    return {"train": parts["train"], "val": parts["test"]}


def batches(part):
    """As documents.Source says."""
    first, read = 1, 0
    for batch in batched(text.encode() for rows in part.iter(batch_size=100) for text in rows["text"]):
        read += sum(map(len, batch))
        yield batch, first, read
        first += len(batch)


def main(parts, folder=FOLDER, counts=COUNTS):
    sources = [Source(f"OpenWebText's {split} part", "parquet", (part.dataset_size or 0) * len(part) // DOCUMENTS, 0,
                      partial(batches, part), split) for split, part in parts.items()]
    asked = {"paths": ["Skylion007/openwebtext"], "input": [len(part) for part in parts.values()], "tokenizer": "gpt2",
             "val_share": 0.0005, "seed": 2357, "shard_tokens": 10**10}
    meta = prepare.prepare(folder, sources, *tokenizer.meta_of("gpt2"), asked, WORKERS, drop=False, known_counts=counts)
    print(prepare.summary(meta) if meta else "nothing is to do: OpenWebText has been prepared already")


if __name__ == "__main__":
    with told("interrupted; the same command goes on"):
        main(fetch())
