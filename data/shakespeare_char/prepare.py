"""Tiny Shakespeare, or a text of your own, one token a character: writes train.bin, val.bin, meta.json, meta.pkl.

    python data/shakespeare_char/prepare.py [--input FILE] [--out_dir DIR]
"""

import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent.parent))

from runtime.data.tokenizer import tokenizer_of  # noqa: E402
from runtime.prepare import shakespeare  # noqa: E402


def tokenize(text, train, val):
    meta = {"kind": "char", "chars": "".join(sorted(set(text)))}  # 65 in tiny Shakespeare
    encode, _ = tokenizer_of(meta)
    return encode(train), encode(val), meta, len(meta["chars"])


if __name__ == "__main__":
    shakespeare.main(FOLDER, tokenize, expected_tokens=(1_003_854, 111_540))
