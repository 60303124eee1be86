"""Tiny Shakespeare, or a text of your own, in GPT-2's tokens: writes train.bin, val.bin, meta.json, meta.pkl.

    python data/shakespeare/prepare.py [--input FILE] [--out_dir DIR]
"""

import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent.parent))

from runtime.prepare import shakespeare  # noqa: E402

if __name__ == "__main__":
    shakespeare.main(FOLDER, "gpt2")
