"""Prepare tiny Shakespeare by character, split as in nanoGPT: train.bin, val.bin, meta.json, meta.pkl."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from runtime.prepare import shakespeare

shakespeare.main(Path(__file__).resolve().parent, "char")
