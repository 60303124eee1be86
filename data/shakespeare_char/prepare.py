"""Prepare tiny Shakespeare by character, split as in nanoGPT: train.bin, val.bin, meta.json, meta.pkl."""

import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent.parent))

from runtime.prepare import shakespeare  # noqa: E402

if __name__ == "__main__":
    shakespeare.main(FOLDER, "char")
