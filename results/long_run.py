"""The run of GPT-2 small over thousands of steps (docs/pretrain.md): prepare its text, and record the run.

    pip install --no-deps --no-compile --target=packages -r results/long_run_packages.txt
    python results/long_run.py text packages.jsonl packages     documentation and sources, the same bytes each time
    python data/prepare.py packages.jsonl --name=packages
    python results/long_run.py record OUT_DIR --commit=... --tokens=...   writes h200_x2_long_run.json

Every file of the folders counts once, up to 190 MB in all. Markdown, reStructuredText and plain text come first, then
Python, both in random order.
"""

import argparse
import hashlib
import json
import random
import re
import statistics
from pathlib import Path

MB = 190  # of text; 87 million tokens
KINDS = (".md", ".rst", ".txt"), (".py",)


def text(path, folders):
    seen, left, count = set(), MB * 1e6, 0
    with open(path, "w", encoding="utf-8") as out:
        for kinds in KINDS:
            paths = sorted(path for folder in folders for path in Path(folder).rglob("*") if path.suffix in kinds)
            random.Random(0).shuffle(paths)
            for path in paths:
                data = path.read_bytes() if path.is_file() and 300 < path.stat().st_size < min(300_000, left) else b""
                key, content = hashlib.sha256(data).digest(), data.decode("utf-8", errors="replace")
                if not data or key in seen or "\ufffd" in content:
                    continue
                seen.add(key)
                left, count = left - len(data), count + 1
                out.write(json.dumps({"text": content}) + "\n")
    print(f"{count:,} files, {MB - left / 1e6:.1f} MB")


def spikes(steps):
    """Return the steps whose loss is above 1.5 times the median of the 100 steps before, plus 0.1."""
    losses = [step["loss"] for step in steps]
    return [step["iter"] for i, step in enumerate(steps)
            if i >= 100 and step["loss"] > 1.5 * statistics.median(losses[i - 100 : i]) + 0.1]


def record(out_dir, commit, tokens):
    history = [json.loads(line) for line in (out_dir / "history.jsonl").read_text(encoding="utf-8").splitlines()]
    settings = json.loads((out_dir / "settings.json").read_text(encoding="utf-8"))
    steps = [entry for entry in history if "loss" in entry]
    assert [step["iter"] for step in steps] == list(range(1, len(steps) + 1))
    result = {
        "command": settings["command"], "commit": commit,
        "hardware": f"{settings['world_size']} x {settings['hardware']}", "world_size": settings["world_size"],
        "versions": settings["versions"], "tokens": tokens, "settings": settings["settings"], "steps": len(steps),
        "resumed_at": [step["iter"] for step in steps if "first_step_s" in step][1:], "spikes": spikes(steps),
        "ms": round(statistics.median(step["ms"] for step in steps), 2),
        "peak_gb": round(max(step["memory"] for step in steps) / 1e9, 2),
        "largest_grad_norm_after_1000": round(max(step["grad_norm"] for step in steps[1000:]), 3),
        "evaluations": [{key: round(entry[key], 4) for key in ("iter", "train_loss", "val_loss")}
                        for entry in history if "val_loss" in entry],
        "losses": [round(step["loss"], 4) for step in steps],
        "grad_norms": [float(f"{step['grad_norm']:.4g}") for step in steps]}
    lines = json.dumps(result, indent=1)
    lines = re.sub(r"\[\s+([-\d.,\s]+?)\s+\]", lambda match: "[" + re.sub(r"\s+", " ", match[1]) + "]", lines)
    Path(__file__).with_name("h200_x2_long_run.json").write_text(lines + "\n", encoding="utf-8")
    print({key: value for key, value in result.items() if key not in ("losses", "grad_norms", "evaluations")})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["text", "record"])
    parser.add_argument("path", type=Path)
    parser.add_argument("folders", nargs="*")
    parser.add_argument("--commit")
    parser.add_argument("--tokens", type=int, help="of train.bin")
    args = parser.parse_args()
    problems = [f"{folder} is not a folder" for folder in args.folders if not Path(folder).is_dir()]
    if args.what == "text" and (problems or not args.folders):
        parser.error(f"{', '.join(problems) or 'no folder given'}: name folders with texts")
    if args.what == "record" and not (args.path / "history.jsonl").is_file():
        parser.error(f"{args.path} has no history.jsonl: name the out_dir of a run")
    if args.what == "text":
        text(args.path, args.folders)
    else:
        record(args.path, args.commit, args.tokens)
