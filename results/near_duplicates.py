"""Count how much of a dataset's validation text occurs in its training text, word for word.

    python results/near_duplicates.py cpu_near_duplicates.json --dataset=packages

For each validation document: the share of its runs of 13 tokens that occur anywhere in the training
tokens. Runs are compared by 64-bit hashes. Near-duplicates of files, such as a license, a copied
module or two versions of a page, have a share near 1.
"""

import argparse
import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np

from runtime.data.dataset import read_meta
from runtime.data.folders import dataset_dir
from runtime.git import git_commit

RUN = 13  # tokens, as in GPT-3's check for contamination (arXiv:2005.14165, appendix C)
FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so multiplying loses nothing
PIECE = 4_000_000  # training tokens at a time
SHARES = (0.5, 0.8, 0.95)


def hashes_of_runs(tokens: np.ndarray) -> np.ndarray:
    """Return the hash of each run of RUN tokens, one per place."""
    count = max(0, len(tokens) - RUN + 1)
    hashes = np.zeros(count, np.uint64)
    for place in range(RUN):
        hashes = (hashes ^ tokens[place : place + count].astype(np.uint64)) * FACTOR
        hashes ^= hashes >> np.uint64(29)
    return hashes


def documents(tokens: np.ndarray, end_of_text: int) -> list[np.ndarray]:
    """Return the documents, without their end-of-text tokens."""
    ends = np.flatnonzero(tokens == end_of_text)
    parts = np.split(tokens, ends)
    return [part[part != end_of_text] for part in parts if len(part) > 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("--dataset", default="packages")
    args = parser.parse_args()
    folder = Path(dataset_dir(args.dataset))
    meta = read_meta(folder)
    if meta["tokenizer"]["kind"] != "gpt2":
        raise SystemExit("documents are separated by GPT-2's end-of-text: prepare it with GPT-2's tokens")

    # The runs of the validation documents, each once, sorted for the search
    train = np.memmap(folder / "train.bin", meta["dtype"], mode="r")
    val = documents(np.fromfile(folder / "val.bin", meta["dtype"]), 50256)
    of_documents = [hashes_of_runs(document) for document in val]
    known = np.unique(np.concatenate(of_documents))

    # Which of them occur in training
    occurs = np.zeros(len(known), bool)
    for start in range(0, len(train), PIECE):
        hashes = hashes_of_runs(np.asarray(train[start : start + PIECE + RUN - 1]))
        places = np.searchsorted(known, hashes)
        places[places == len(known)] = 0
        occurs[places[known[places] == hashes]] = True

    # The share of each document
    shares = []
    for hashes in of_documents:
        found = occurs[np.searchsorted(known, hashes)]
        shares.append(float(found.mean()) if len(found) else 0.0)
    tokens = np.array([len(document) for document in val])
    above = {}
    for least in SHARES:
        chosen = np.array(shares) >= least
        above[str(least)] = {
            "documents": int(chosen.sum()),
            "tokens": round(float(tokens[chosen].sum() / tokens.sum()), 4),
        }
    record = {
        "what": f"the share of a validation document's runs of {RUN} tokens that occur in the training text",
        "command": " ".join(["results/near_duplicates.py", *sys.argv[1:]]),
        "commit": git_commit(),
        "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        "text": meta["files"]["train.bin"]["sha256"],
        "documents": len(val),
        "tokens": int(tokens.sum()),
        "mean_share_by_tokens": round(float(np.average(shares, weights=tokens)), 4),
        "at_least": above,
        "shares": [round(share, 3) for share in sorted(shares, reverse=True)],
    }
    Path(args.file).write_text(json.dumps(record) + "\n")
    print({key: record[key] for key in ("documents", "tokens", "mean_share_by_tokens", "at_least")})


if __name__ == "__main__":
    main()
