"""Prepare OpenWebText in GPT-2's tokens, split as in nanoGPT: train.bin, val.bin, meta.json, meta.pkl.

    python data/openwebtext/prepare.py

It has 8,013,769 documents. Hugging Face's cache takes 54 GB for them and 18 GB for their tokens, this folder 18 GB.
"""

import os
import sys
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent.parent))

from runtime.data.dataset import write_dataset  # noqa: E402
from runtime.data.tokenizer import gpt2_encoding  # noqa: E402
from runtime.errors import UserError  # noqa: E402
from runtime.output import exit_on_error  # noqa: E402

NAME = "Skylion007/openwebtext"


def fetch():
    """Return the documents for training and for validation, "train" and "test", from the Hugging Face Hub."""
    from datasets import load_dataset

    try:
        return load_dataset(NAME, split="train").train_test_split(test_size=0.0005, seed=2357, shuffle=True)
    except Exception as error:  # the Hub, the network or the disk
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"OpenWebText could not be downloaded ({reason}): set HF_ENDPOINT to a mirror of the Hub, "
                        "or copy ~/.cache/huggingface from a machine that has it") from None


def tokenize(batch):
    """Return one row with the tokens of a batch of documents, each followed by <|endoftext|>."""
    encoding = gpt2_encoding()
    ids = [token for text in batch["text"] for token in (*encoding.encode_ordinary(text), encoding.eot_token)]
    return {"ids": [np.array(ids, "<u2").tobytes()]}


def main(documents, folder=FOLDER):
    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    rows = documents.map(tokenize, batched=True, num_proc=workers, remove_columns=documents["train"].column_names)
    train, val = ((np.frombuffer(ids, "<u2") for ids in rows[split]["ids"]) for split in ("train", "test"))
    meta = write_dataset(folder, train, val, {"kind": "gpt2"}, gpt2_encoding().n_vocab,
                         {"name": NAME, "sha256": None, "bytes": None})
    print(f"train: {meta['train_tokens']:,} tokens, val: {meta['val_tokens']:,} tokens\nwritten to {folder}")


if __name__ == "__main__":
    with exit_on_error("interrupted; run it again to continue from Hugging Face's cache"):
        main(fetch())
