"""Tiny Shakespeare, or a text of your own, in GPT-2's tokens: writes train.bin, val.bin, meta.json, meta.pkl.

    python data/shakespeare/prepare.py [--input FILE] [--out_dir DIR]
"""

import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent.parent))

from runtime.data.tokenizer import gpt2_encoding  # noqa: E402
from runtime.prepare import shakespeare  # noqa: E402


def tokenize(text, train, val):
    encoding = gpt2_encoding()
    return encoding.encode_ordinary(train), encoding.encode_ordinary(val), {"kind": "gpt2"}, encoding.n_vocab


if __name__ == "__main__":
    shakespeare.main(FOLDER, tokenize, expected_tokens=(301_966, 36_059))
