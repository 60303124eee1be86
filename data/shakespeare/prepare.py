"""Prepare tiny Shakespeare in GPT-2's tokens, split as in nanoGPT: train.bin, val.bin, meta.json, meta.pkl."""

import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent.parent))

from runtime.prepare import shakespeare  # noqa: E402

if __name__ == "__main__":
    shakespeare.main(FOLDER, "gpt2")
