"""A run's report: one HTML file that opens offline. `python plot.py OUT --report` writes it.

It loads nothing from elsewhere, and all texts of the run are escaped: names, settings, warnings and
samples may come from others.
"""

import statistics
from collections.abc import Mapping, Sequence
from html import escape
from string import Template
from typing import Any

from runtime.files import format_bytes

MOST_EVENTS = 200  # in the table; the rest is counted
MOST_SAMPLES = 5  # the newest
Rows = Sequence[Sequence[object]]

PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>$title</title>
<style>
:root { color-scheme: light dark; }
body { margin: 0 auto; max-width: 60rem; padding: 1rem; font: 1rem/1.5 system-ui, sans-serif; }
h1, h2 { line-height: 1.2; }
table { border-collapse: collapse; }
th, td { padding: .2rem .8rem .2rem 0; text-align: left; vertical-align: top; }
th { font-weight: 600; border-bottom: 1px solid GrayText; }
td { border-bottom: 1px solid color-mix(in srgb, GrayText 30%, transparent); }
.scroll { overflow-x: auto; }
.picture { overflow-x: auto; background: white; border-radius: .5rem; }
.picture svg { width: 100%; min-width: 40rem; height: auto; display: block; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; padding: .8rem; border-radius: .5rem;
      background: color-mix(in srgb, GrayText 15%, transparent); }
</style>
</head>
<body>
<h1>$title</h1>
$body
</body>
</html>
""")


def report_html(
    name: str,
    history: Sequence[Mapping],
    settings: Mapping,
    defaults: Mapping,
    picture: str,
) -> str:
    """Return the report of a run.

    name: of its out_dir. history: the records of history.jsonl. settings: the content of
    settings.json. defaults: {setting: default}. picture: the curves, as an <svg> element.
    """
    parts = [
        section("Result", table(("", ""), result_rows(history))),
        section("Curves", f'<div class="picture">{picture}</div>'),
        section("Evaluations", evaluation_table(history)),
        section("Settings that differ from the defaults", settings_table(settings, defaults)),
        section("Hardware and speed", table(("", ""), speed_rows(history, settings))),
        section("What happened", events_table(history)),
        section("Samples", samples(history)),
        section("Command", text_block(settings.get("command", "not recorded"))),
    ]
    return PAGE.substitute(title=escape(f"Report of {name}"), body="\n".join(parts))


def result_rows(history: Sequence[Mapping]) -> Rows:
    """Return how far the run is, and its best validation loss."""
    rows: list[tuple[str, str]] = [("iterations", f"{history[-1]['iter']:,}")]
    tokens = values_of(history, "tokens")
    if tokens:
        rows.append(("tokens trained on", f"{tokens[-1]:,.0f}"))

    # The best evaluation. A loss that wasn't finite is null
    evaluations = [record for record in history if is_number(record.get("val_loss"))]
    if evaluations:
        best = min(evaluations, key=lambda record: record["val_loss"])
        error = number(best.get("val_loss_stderr"))
        value = f"{best['val_loss']:.4f} at iteration {best['iter']:,} (standard error {error})"
        rows.append(("best validation loss", value))

    # Where training is now
    losses = values_of(history, "loss")
    if losses:
        rows.append(("last training loss", f"{losses[-1]:.4f}"))
    return rows


def evaluation_table(history: Sequence[Mapping]) -> str:
    """Return the table of evaluations."""
    rows = []
    for record in history:
        if "val_loss" in record:
            train = number(record.get("train_loss"))
            val = number(record["val_loss"])
            bits = number(record.get("bits_per_byte"))
            rows.append((f"{record['iter']:,}", train, val, bits))
    heads = ("iteration", "training loss", "validation loss", "bits per byte")
    return table(heads, rows)


def settings_table(settings: Mapping, defaults: Mapping) -> str:
    """Return the table of settings that aren't at their defaults."""
    rows = []
    for name, value in settings.get("settings", {}).items():
        if name in defaults and value != defaults[name]:
            rows.append((name, repr(value), repr(defaults[name])))
    return table(("setting", "value", "default"), rows)


def speed_rows(history: Sequence[Mapping], settings: Mapping) -> Rows:
    """Return the machine, and what a step took beside what was planned."""
    # The machine and the code
    versions = settings.get("versions", {})
    rows = [
        ("hardware", settings.get("hardware", "not recorded")),
        ("ranks", settings.get("world_size", "not recorded")),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("version, commit", f"{settings.get('version')}, {settings.get('commit')}"),
        ("started", settings.get("started", "not recorded")),
    ]

    # Medians, since the first steps and those after a save are slow
    speeds = values_of(history, "tokens_per_s")
    if speeds:
        rows.append(("tokens per second, median", f"{statistics.median(speeds):,.0f}"))
    times = values_of(history, "ms")
    if times:
        rows.append(("step, median", f"{statistics.median(times):,.1f} ms"))
    shares = values_of(history, "mfu")
    if shares:
        rows.append(("MFU, median", f"{100 * statistics.median(shares):.1f}%"))

    # Memory, and its plan
    peaks = values_of(history, "memory")
    if peaks:
        rows.append(("peak memory", format_bytes(max(peaks))))
    plan = settings.get("memory_plan", {})
    if plan:
        planned = sum(plan.values()) - plan.get("CUDA and NCCL", 0)
        rows.append(("peak memory, planned", format_bytes(planned)))
    return rows


def events_table(history: Sequence[Mapping]) -> str:
    """Return the table of starts, warnings (such as skipped steps) and saves."""
    # In the order of the file
    rows = []
    starts = 0
    for record in history:
        iteration = f"{record['iter']:,}"
        if "first_step_s" in record:
            starts += 1
            rows.append((iteration, "started" if starts == 1 else "resumed"))
        if "warning" in record:
            rows.append((iteration, record["warning"]))
        if "saved" in record:
            rows.append((iteration, f"saved {record['saved']}"))

    # A long run has many saves: the newest events count
    left = len(rows) - MOST_EVENTS
    text = table(("iteration", "event"), rows[-MOST_EVENTS:])
    if left > 0:
        text += f"<p>{left:,} earlier events are in history.jsonl.</p>"
    return text


def samples(history: Sequence[Mapping]) -> str:
    """Return the newest samples that the run has printed."""
    found = [record for record in history if "sample" in record]
    if not found:
        return "<p>None: --sample_interval=N prints one every N steps.</p>"

    # The last ones, as they were printed
    texts = []
    for record in found[-MOST_SAMPLES:]:
        texts.append(f"<p>Iteration {record['iter']:,}:</p>{text_block(record['sample'])}")
    return "\n".join(texts)


# -----------------------------------------------------------------------------
# HTML


def section(title: str, content: str) -> str:
    """Return a section of the page. content: HTML."""
    return f"<h2>{escape(title)}</h2>\n{content}"


def table(heads: Sequence[str], rows: Rows) -> str:
    """Return a table of texts, or a sentence if there are no rows."""
    if not rows:
        return "<p>None.</p>"

    # A table of two columns needs no heads
    lines = []
    if any(heads):
        lines.append("".join(f"<th>{escape(head)}</th>" for head in heads))
    for row in rows:
        lines.append("".join(f"<td>{escape(str(cell))}</td>" for cell in row))
    text = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table>\n{text}\n</table></div>'


def text_block(text: object) -> str:
    """Return a text as it is, with its line breaks."""
    return f"<pre>{escape(str(text))}</pre>"


def is_number(value: Any) -> bool:
    """Return whether a value of a record is a number. A loss that isn't finite is None there."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def number(value: Any) -> str:
    """Return a number with four digits, or a word that says why there is none."""
    if is_number(value):
        return f"{value:.4f}"
    return "not recorded, or not finite"


def values_of(history: Sequence[Mapping], key: str) -> list[float]:
    """Return the numbers that records have under a key."""
    return [record[key] for record in history if is_number(record.get(key))]
