"""The run of GPT-2 small over thousands of steps (docs/pretrain.md): prepare its text, and record the run.

    pip install --no-deps --no-compile --target=packages -r results/long_run_packages.txt
    python results/long_run.py text packages.jsonl packages     documentation and sources, the same bytes each time
    python data/prepare.py packages.jsonl --name=packages
    python results/long_run.py record OUT_DIR FILE.json         the record of a run with --log_interval=1

Every file of the folders counts once, up to 190 MB in all. Markdown, reStructuredText and plain text come first, then
Python, both in random order.
"""

import argparse
import hashlib
import json
import random
import re
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from runtime.data.dataset import read_meta
from runtime.data.folders import dataset_dir
from runtime.git import git_commit
from runtime.monitor.history import read_history

MB = 190  # of text; 85 million tokens
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
    """Return the steps whose loss is above 1.5 times the median of the 100 steps before, plus 0.1, or isn't finite.

    In history.jsonl, a loss that isn't finite is None.
    """
    found = []
    for i, step in enumerate(steps):
        loss = step["loss"]
        before = [other["loss"] for other in steps[max(0, i - 100) : i] if other["loss"] is not None]
        if loss is None or (i >= 100 and before and loss > 1.5 * statistics.median(before) + 0.1):
            found.append(step["iter"])
    return found


def rounded(value, digits):
    """Return a number with so many digits after the point. None, which isn't finite, stays None."""
    return None if value is None else round(value, digits)


def record(out_dir, path):
    history = read_history(out_dir)
    settings = json.loads((out_dir / "settings.json").read_text(encoding="utf-8"))
    meta = read_meta(dataset_dir(settings["settings"]["dataset"]))
    steps = [entry for entry in history if "loss" in entry]
    assert [step["iter"] for step in steps] == list(range(1, len(steps) + 1))
    norms = [step["grad_norm"] for step in steps]
    finite_norms = [norm for norm in norms[1000:] or norms if norm is not None]
    result = {
        "command": settings["command"], "commit": git_commit(),
        "hardware": f"{settings['world_size']} x {settings['hardware']}", "world_size": settings["world_size"],
        "versions": settings["versions"], "tokens": meta["train_tokens"],
        "text": meta["files"]["train.bin"]["sha256"], "settings": settings["settings"], "steps": len(steps),
        "resumed_at": [step["iter"] for step in steps if "first_step_s" in step][1:], "spikes": spikes(steps),
        "ms": round(statistics.median(step["ms"] for step in steps), 2),
        "peak_gb": round(max(step["memory"] for step in steps) / 1e9, 2),
        "largest_grad_norm_after_1000": rounded(max(finite_norms, default=None), 3),
        "evaluations": [{key: rounded(entry[key], 4) for key in ("iter", "train_loss", "val_loss")}
                        for entry in history if "val_loss" in entry],
        "losses": [rounded(step["loss"], 4) for step in steps],
        "grad_norms": [None if norm is None else float(f"{norm:.4g}") for norm in norms]}
    lines = json.dumps(result, indent=1)
    lines = re.sub(r"\[\s+((?:null|[-\d.,\s])+?)\s+\]", lambda match: "[" + re.sub(r"\s+", " ", match[1]) + "]", lines)
    Path(path).write_text(lines + "\n", encoding="utf-8")
    print({key: value for key, value in result.items() if key not in ("losses", "grad_norms", "evaluations")})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["text", "record"])
    parser.add_argument("path", type=Path)
    parser.add_argument("others", nargs="+", help="folders with texts, or the file to write")
    args = parser.parse_args()
    folders = args.others if args.what == "text" else [args.path]
    if problems := [f"{folder} is not a folder" for folder in folders if not Path(folder).is_dir()]:
        parser.error(f"{', '.join(problems)}: name folders with texts, or the out_dir of a run")
    if args.what == "text":
        text(args.path, folders)
    else:
        record(args.path, args.others[0])
