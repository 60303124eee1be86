"""Update the table in docs/numbers.md from the results of bench.py.

    python results/table.py
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from runtime.weights import PRETRAINED

MARKS = "<!-- results/table.py -->\n", "<!-- end -->"  # in docs/numbers.md
COLUMNS = ("GPUs", "model", "ZeRO", "micro-batch x accumulation", "ms per step", "min-max", "tokens/s", "MFU",
           "peak GB", "first step, s", "baseline, ms", "speedup", "file in results/")


def format_table(root=ROOT):
    """Return a Markdown table with a row for each results/*_bench_*.json."""
    rows = []
    for path in sorted((root / "results").glob("*_bench_*.json")):
        run = json.loads(path.read_text(encoding="utf-8"))
        s, ms, other = run["settings"], run["ms"], run.get("baseline")
        sizes = tuple(s[name] for name in ("n_layer", "n_head", "n_embd"))
        model = {sizes: name for name, sizes in PRETRAINED.items()}.get(sizes, s["init_from"])
        model = (model if model in PRETRAINED else " x ".join(map(str, sizes))) + (", fp8" if s.get("fp8") else "")
        stage = str(run["stage"]) if "stage" in run else re.search(r"zero(\d)", s["deepspeed_config"])[1]
        cells = [str(run["world_size"]), model, stage, f"{s['batch_size']} x {s['gradient_accumulation_steps']}",
                 f"{ms['median']:,.0f}", f"{ms['min']:,.0f}-{ms['max']:,.0f}", f"{run['tokens_per_s']:,.0f}",
                 f"{100 * run['mfu']:.1f}%" if run["mfu"] else "n/a", f"{run['peak_gb']:.1f}",
                 f"{run['first_step_s']:.0f}",
                 f"{other['name'].split()[0]} {other['ms']['median']:,.0f}" if other else "",
                 f"{other['ratio']:.2f}x" if other else "", f"`{path.name}`"]
        rows.append((run["world_size"], model, stage, -s["batch_size"], "| " + " | ".join(cells) + " |"))
    return "\n".join([f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS), *(row[-1] for row in sorted(rows))])


def update(root=ROOT):
    """Replace the table between the marks. Everything else on the page stays."""
    page, rows = root / "docs" / "numbers.md", format_table(root)
    before, begin, rest = page.read_text(encoding="utf-8").partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    page.write_text(f"{before}{begin}{rows}\n{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    update()
