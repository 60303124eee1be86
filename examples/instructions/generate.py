"""Write a small instruction set: sums, reversed words and copied words. It needs no download.

    python examples/instructions/generate.py

It writes train.jsonl and heldout.jsonl next to this script. No prompt is in both.
"""

import json
import random
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
HELD_OUT = 100  # of each task


def main():
    rng = random.Random(0)
    words = list(dict.fromkeys("".join(rng.choices("abcdefgh", k=rng.randint(2, 4))) for _ in range(9000)))
    tasks = [[(f"Add {a} to {b}", str(a + b)) for a in range(1, 4) for b in range(1000)],
             [(f"Reverse {word}", word[::-1]) for word in words[:2000]],
             [(f"Copy {word}", word) for word in words[:2000]]]
    files = {"train": [], "heldout": []}
    for pairs in tasks:
        rng.shuffle(pairs)
        files["heldout"] += pairs[:HELD_OUT]
        files["train"] += pairs[HELD_OUT:]
    for name, pairs in files.items():
        lines = [json.dumps({"prompt": prompt, "completion": answer}) + "\n" for prompt, answer in pairs]
        (FOLDER / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"{FOLDER / name}.jsonl: {len(lines):,} prompts with answers")


if __name__ == "__main__":
    main()
