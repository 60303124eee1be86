"""Prepare tiny Shakespeare in GPT-2's tokens, split as in nanoGPT.

It writes train.bin, val.bin, meta.json and meta.pkl beside this script.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from runtime.prepare import shakespeare

shakespeare.main(Path(__file__).resolve().parent, "gpt2")
