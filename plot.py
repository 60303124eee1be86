"""Curves of one run, or of several compared, from the history.jsonl in their out_dir.

    python plot.py out-shakespeare-xl-deepspeed     curves.png in that folder
    python plot.py out-a out-b --png=compare.png    one color per run

A run may still be going on. Exit code 2: a mistake, reported in one sentence.
"""

import argparse
import math
import os
import statistics

from configurator import exit_quietly_on_broken_pipe
from runtime.cluster.ranks import exit_with_error
from runtime.monitor.history import read_history, series

PANELS = {  # a record's key: title, what 1 on the axis stands for, whether it is of interest on a log scale
    "loss": ("loss (bold: validation, ± error)", 1, True),
    "lr": ("learning rate", 1, False),
    "grad_norm": ("gradient norm before clipping", 1, True),
    "tokens_per_s": ("thousand tokens per second", 1e3, False),
    "memory": ("peak memory, GB", 1e9, False),
    "data_ms": ("waiting for data, ms per step", 1, False),
}
COLOURS = ("#2f7fd6", "#dd6b10", "#1f9d62", "#c64aa0", "#8b6be0", "#a58500", "#1a9bab", "#d9484b")  # on white and black
DASHES = ("-", "--", ":", "-.")  # the second for the runs after the eighth, and so on
MOST = 400  # points of a line; more are drawn in groups, as their mean within their least and most


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dirs", nargs="+", metavar="out_dir", help="a folder that a run has written to")
    parser.add_argument("--png", metavar="FILE", help="the curves; curves.png in the first folder")
    args = parser.parse_args()
    exit_quietly_on_broken_pipe()
    runs, problems = {}, []
    for out_dir in map(os.path.normpath, args.out_dirs):
        try:
            runs[out_dir] = read_history(out_dir)
        except OSError as error:
            problems.append(f"{error.filename} cannot be read ({error.strerror}): fix that, or leave it out")
        else:
            problems += [] if runs[out_dir] else [
                f"{out_dir}/history.jsonl has no complete record: name the out_dir of a run, or wait for its first "
                "evaluation"]
    try:
        import matplotlib
    except ImportError as error:
        problems.append(f"the curves need matplotlib ({error}): pip install -r requirements.txt")
    if problems:
        exit_with_error("\n".join(problems))

    path = args.png or os.path.join(args.out_dirs[0], "curves.png")
    with matplotlib.rc_context({"font.size": 9, "axes.titlesize": 9.5, "legend.frameon": False}):
        try:
            write_png(runs, path)
        except OSError as error:
            exit_with_error(f"{path} cannot be written ({error.strerror}): choose another with --png=FILE")
    print(f"written to {path}")


def looks(runs):
    """[(colour, dashes)] of the runs, in order."""
    every = [(colour, dashes) for dashes in DASHES for colour in COLOURS]
    return [every[number % len(every)] for number in range(len(runs))]


def grouped(points):
    """At most MOST (iter, least, mean, most, all finite) of neighbouring points; NaN where none is finite."""
    size, found = math.ceil(len(points) / MOST), []
    for group in (points[i : i + size] for i in range(0, len(points), size or 1)):
        values = [value for _, value in group if math.isfinite(value)]
        least, mean, most = (min(values), statistics.fmean(values), max(values)) if values else 3 * [math.nan]
        found.append((statistics.fmean(it for it, _ in group), least, mean, most, len(values) == len(group)))
    return found


def draw(axis, runs, key):
    """One panel, with all runs."""
    from matplotlib.ticker import LogLocator, NullFormatter

    title, unit, log = PANELS[key]
    drawn, marked = [], False
    for number, (history, (colour, dashes)) in enumerate(zip(runs.values(), looks(runs))):
        points = grouped([(it, value / unit) for it, value in series(history, key)])
        x, least, mean, most, finite = zip(*points) if points else ((), (), (), (), ())
        axis.plot(x, mean, dashes, color=colour, alpha=0.6 if key == "loss" else 1, linewidth=1,
                  marker="." if len(x) <= 30 else None)
        if least != most:
            axis.fill_between(x, least, most, color=colour, alpha=0.25, linewidth=0.5)
        drawn += [*least, *most]
        strange = [it for it, good in zip(x, finite) if not good]
        if key == "loss":
            validation, error = dict(series(history, "val_loss")), dict(series(history, "val_error"))
            good = {it: loss for it, loss in validation.items() if math.isfinite(loss)}
            axis.errorbar(good.keys(), good.values(), [error.get(it, 0) for it in good], fmt=dashes, color=colour,
                          linewidth=2.2, elinewidth=1.2, capsize=3, marker="o" if len(good) <= 60 else None,
                          markersize=4, errorevery=math.ceil(len(good) / 60) or 1)
            drawn += good.values()
            strange += validation.keys() - good.keys()
        if strange:  # at the head of the panel, below those of the run before
            marked = True
            axis.plot(strange, [0.96 - 0.05 * (number % 8)] * len(strange), "x", color=colour,
                      transform=axis.get_xaxis_transform())
    drawn = [value for value in drawn if math.isfinite(value)]
    if log and drawn and 0 < 10 * min(drawn) < max(drawn):
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if max(drawn) < 1e3 * min(drawn) else (1,)))
        axis.yaxis.set_minor_formatter(NullFormatter())
        title += ", log scale"
    elif not log:
        axis.set_ylim(0, 1.08 * max(drawn, default=0) or 1)
    if not drawn and not marked:
        axis.text(0.5, 0.5, "not recorded", transform=axis.transAxes, ha="center")
        axis.set(xticks=[], yticks=[])
    axis.set_title(title + (", × not finite" if marked else ""), loc="left")
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.7g}")


def figure(rows, columns, width, height):
    """(a figure of so many inches, its panels in order)."""
    from matplotlib.figure import Figure

    made = Figure((width, height), layout="constrained")
    panels = made.subplots(rows, columns, squeeze=False).flatten()
    for axis in panels:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color="black", alpha=0.12)
        axis.set_xlabel("iteration")
        axis.xaxis.get_major_locator().set_params(integer=True)
    return made, panels


def write_png(runs, path):
    """Draw all panels as one picture."""
    from matplotlib.lines import Line2D

    made, panels = figure(2, 3, 15, 8)
    for axis, key in zip(panels, PANELS):
        draw(axis, runs, key)
    handles = [Line2D([], [], color=colour, linestyle=dashes, linewidth=3) for colour, dashes in looks(runs)]
    names = [f" {name}" for name in runs]  # matplotlib hides a name that begins with an underscore
    legend = made.legend(handles, names, loc="outside upper left", ncols=max(1, 160 // (max(map(len, names)) + 8)))
    for text in legend.get_texts():
        text.set_parse_math(False)  # a $ is a $
    made.savefig(path, format="png", dpi=120)


if __name__ == "__main__":
    main()
