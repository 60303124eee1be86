"""The report of one run or of several beside each other: one HTML file, without scripts, that loads nothing."""

import math
import os
import statistics
from html import escape

from configurator import settings_of
from runtime.checkpoint import CheckpointError, find_tag, tags
from runtime.save import human

SCRIPT = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "train_deepspeed.py")
NONE = "–"
HTML = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title><style>{style}</style></head><body>
{body}
</body></html>
"""
STYLE = """
:root { color-scheme: light dark; --line: #d6d9de; --dim: #5d6673; --mark: #fff3d1; --back: #fff; --ink: #1a1d21 }
@media (prefers-color-scheme: dark) {
  :root { --line: #3a4048; --dim: #9aa4b1; --mark: #453a1c; --back: #15181c; --ink: #e4e7eb } }
body { margin: 0 auto; padding: 1rem; max-width: 80rem; background: var(--back); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif }
h1 { font-size: 1.5rem } h2 { margin-top: 2rem; font-size: 1.15rem }
.curves { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 1rem }
details { margin-top: .4rem } svg { display: block; width: 100%; height: auto }
.wide { overflow-x: auto }
table { border-collapse: collapse }
th, td { padding: .25rem .75rem .25rem .4rem; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; overflow-wrap: break-word; min-width: 5rem; max-width: 30rem;
  font-variant-numeric: tabular-nums }
th:first-child { font-weight: normal; color: var(--dim) }
.differs { background: var(--mark) } .differs th { color: inherit } .differs th::after { content: " ≠" }
.note { color: var(--dim) }
pre { white-space: pre-wrap; overflow-wrap: anywhere; padding: .6rem; border: 1px solid var(--line); margin: .4rem 0 }
"""


def page(runs, curves, looks):
    """The report's HTML, bytes. runs: {out_dir: {"history": records, "made": settings.json's content}}; curves: SVG
    elements, in which a run has the colour and the line of looks, (colour, line as text)."""
    names = list(runs)
    legend = "".join(f'<span><b style="color:{colour}">{line}</b> {escape(name)}</span> '
                     for name, (colour, line) in zip(names, looks))
    summaries = [summary(run["history"]) for run in runs.values()]
    parts = [
        f"<h1>{escape(', '.join(names))}</h1>",
        table(["", *names], [[label, *(s[label] for s in summaries)] for label in summaries[0]]),
        f"<h2>Curves</h2><p>{legend}</p><div class=curves>{''.join(curves)}</div>",
        "<p class=note>The validation loss is the bold one, with its standard error. Of many steps the mean is drawn, "
        "within their least and most.</p>",
        "<h2>Settings</h2><p class=note>Those that are not the defaults of train_deepspeed.py"
        + (", or that differ between the runs, which are marked ≠." if len(runs) > 1 else ".") + "</p>",
        table(["setting", *names, "default"], settings_rows(runs), compared=len(runs)),
        "<h2>How they were made</h2>" if len(runs) > 1 else "<h2>How it was made</h2>",
        table(["", *names], made_rows(runs), compared=len(runs)),
        *(f"<details><summary>{escape(name)}: what differed from the commit</summary>"
          f"<pre>{escape(str(run['made']['git_diff']))}</pre></details>"
          for name, run in runs.items() if run["made"].get("git_diff")),
        memory_plan(runs), checkpoints(runs), samples(runs),
    ]
    body = "\n".join(part for part in parts if part)
    return HTML.format(title=escape(", ".join(names)), style=STYLE, body=body).encode("utf-8", "replace")


def table(head, rows, compared=0):
    """A table of plain text. The rows in which the runs' cells, the first `compared`, are not the same are marked."""
    lines = ["<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head)]
    for row in rows:
        label, *cells = [escape(str(cell)).replace("_", "_<wbr>") for cell in row]  # where a phone may break a name
        marked = ' class="differs"' if len(set(cells[:compared])) > 1 else ""
        lines.append(f"<tr{marked}><th>{label}</th>" + "".join(f"<td>{cell}</td>" for cell in cells))
    return f"<div class=wide><table>{'</tr>'.join(lines)}</tr></table></div>"


def numbers(history, key):
    """The records that have a number there, NaN and infinity among them."""
    return [r for r in history if type(r.get(key)) in (int, float)]


def finite(history, key):
    """The numbers that the records have there, but for NaN and infinity."""
    return [r[key] for r in numbers(history, key) if math.isfinite(r[key])]


def median(history, key, form):
    values = finite(history, key)
    return form.format(statistics.median(values)) if values else "n/a"


def peak(history):
    """The most memory that was held, as people read it."""
    return human(max(finite(history, "memory"))) if finite(history, "memory") else "n/a"


def summary(history):
    """{what: text} of a run: its losses, speed and memory. The speeds are medians over the recorded steps."""
    steps, evals = numbers(history, "loss"), numbers(history, "val_loss")
    best = min((r for r in evals if math.isfinite(r["val_loss"])), key=lambda r: r["val_loss"], default=None)
    strange = [r["iter"] for key in ("loss", "val_loss", "grad_norm") for r in numbers(history, key)
               if not math.isfinite(r[key])]

    told = [r for r in history if isinstance(r.get("trouble"), str)]

    def loss(record, key):
        return NONE if record is None else f"{record[key]:.4f} at iteration {record['iter']}"

    return {
        "iterations": max(r["iter"] for r in history),
        "best validation loss": loss(best, "val_loss"),
        "its standard error": median([best or {}], "val_error", "{:.4f}"),
        "its perplexity": median([best or {}], "perplexity", "{:.2f}"),
        "last validation loss": loss(evals[-1] if evals else None, "val_loss"),
        "last training loss": loss(steps[-1] if steps else None, "loss"),
        "median ms a step": median(steps, "ms", "{:,.1f}"),
        "tokens a second": median(steps, "tokens_per_s", "{:,.0f}"),
        "MFU": median(steps, "mfu", "{:.1%}"),
        "peak memory": peak(history),
        "not finite": f"{len(set(strange))}, the first at iteration {min(strange)}" if strange else "none",
        "told of": f"{len(told)}, the last at iteration {told[-1]['iter']}: {told[-1]['trouble']}"
                   if told else "nothing",
    }


def part(run, key):
    """A dict of a run's settings.json; empty where it has none."""
    found = run["made"].get(key)
    return found if isinstance(found, dict) else {}


def settings_rows(runs):
    """[name, value in each run, default] of the settings that are not the default in all runs."""
    defaults, rows = settings_of(SCRIPT, []), []
    used = [part(run, "settings") for run in runs.values()]
    for name in dict.fromkeys([*defaults, *(name for settings in used for name in settings)]):
        values = [repr(settings[name]) if name in settings else NONE for settings in used]
        default = repr(defaults[name]) if name in defaults else NONE
        if set(values) not in ({default}, {NONE}):
            rows.append([name, *values, default])
    return rows


def made_rows(runs):
    """[what, of each run]: start, command, commit, hardware and versions."""
    rows = [[label, *(run["made"].get(key) or NONE for run in runs.values())] for label, key in (
        ("started", "started"), ("command", "command"), ("commit (+: with changes)", "commit"),
        ("hardware", "hardware"), ("processes", "world_size"))]
    versions = [part(run, "versions") for run in runs.values()]
    return rows + [[name, *(found.get(name) or NONE for found in versions)]
                   for name in dict.fromkeys(name for found in versions for name in found)]


def memory_plan(runs):
    """The plan's parts and their sum beside what was measured, where a run has its plan."""
    plans = [{name: size for name, size in part(run, "memory_plan").items() if type(size) in (int, float)}
             for run in runs.values()]
    if not any(plans):
        return ""
    rows = [[name, *(human(plan[name]) if name in plan else NONE for plan in plans)]
            for name in dict.fromkeys(name for plan in plans for name in plan)]
    # as runtime/fit.py reckons: PyTorch's count knows nothing of these
    sums = [sum(plan.values()) - plan.get("CUDA and NCCL", 0) for plan in plans]
    rows.append(["together, without CUDA and NCCL", *(human(size) if size else NONE for size in sums)])
    on_cpu = ["CPU cores" in str(run["made"].get("hardware")) for run in runs.values()]
    rows += [[label, *(peak(run["history"]) if cpu is there else NONE for run, there in zip(runs.values(), on_cpu))]
             for label, cpu in (("measured peak of these", False),
                                ("peak of the whole process on CPU, with Python and PyTorch", True)) if cpu in on_cpu]
    return "<h2>Memory, planned and measured</h2>" + table(["", *runs], rows)


def checkpoints(runs):
    """The tags of the runs. Names of the same files, as best and final are, share a row."""
    rows = []
    for out_dir, run in runs.items():
        losses = {r["iter"]: r["val_loss"] for r in run["history"] if finite([r], "val_loss")}
        same = {}
        try:
            there = tags(out_dir)
        except CheckpointError as error:
            rows.append([out_dir, NONE, error, NONE, NONE])
            continue
        for tag in there:
            try:
                seen = os.stat(os.path.join(out_dir, tag, "manifest.json"))
                same.setdefault((seen.st_dev, seen.st_ino), []).append(tag)
            except FileNotFoundError:  # a run that goes on removes its older tags
                continue
            except OSError:  # find_tag() below says why
                same[tag] = [tag]
        for names in same.values():
            try:
                manifest = find_tag(out_dir, names[0])[1]
            except CheckpointError as error:
                rows.append([out_dir, " = ".join(names), error, NONE, NONE])
                continue
            iter_num, size = manifest["iter_num"], sum(entry["bytes"] for entry in manifest["files"].values())
            loss = f"{losses[iter_num]:.4f}" if iter_num in losses else NONE
            rows.append([out_dir, " = ".join(names), iter_num, loss, human(size)])
    if not rows:
        return ""
    return ("<h2>Checkpoints</h2><p class=note>Names joined by = are hard links to the same files.</p>"
            + table(["run", "tag", "iteration", "validation loss", "size"], rows))


def samples(runs):
    """The texts that the runs wrote at their evaluations, the last of each run open."""
    parts = []
    for name, run in runs.items():
        texts = [(r["iter"], r["sample"]) for r in run["history"] if isinstance(r.get("sample"), str)]
        for number, (iter_num, text) in enumerate(texts, 1):
            parts.append(f"<details{' open' * (number == len(texts))}><summary>{escape(name)}, iteration {iter_num}"
                         f"</summary><pre>{escape(text)}</pre></details>")
    return "<h2>Samples</h2>" + "".join(parts) if parts else ""
