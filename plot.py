"""Plot the curves of one run, or compare several, from the history.jsonl in their out_dir.

    python plot.py out-shakespeare-xl-deepspeed     writes curves.png to that folder
    python plot.py out-a out-b --png=compare.png    one color per run

It also works during a run. A folder without records ends it with exit code 2."""

import argparse
import contextlib
import io
import math
import os
import statistics
from pathlib import Path

from runtime.files import ROOT, write_atomic
from runtime.monitor.history import read_history, series
from runtime.output import exit_on_error, exit_with_error
from runtime.paths import expand_path

PANELS = {  # key of a record: (title, unit of the axis, whether a log scale may help)
    "loss": ("loss (bold: validation ± standard error)", 1, True),
    "lr": ("learning rate", 1, False),
    "grad_norm": ("gradient norm before clipping", 1, True),
    "tokens_per_s": ("thousand tokens per second", 1e3, False),
    "memory": ("peak memory, GB", 1e9, False),
    "data_ms": ("waiting for data, ms per step", 1, False)}
MAX_POINTS = 400  # per line; longer runs are drawn as means of groups, with their minimum and maximum


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dirs", nargs="+", metavar="out_dir", type=expand_path, help="the output folder of a run")
    parser.add_argument("--png", metavar="FILE", type=expand_path,
                        help="output file; default: curves.png in the first folder")
    args = parser.parse_args()
    runs = {out_dir: read_history(out_dir) for out_dir in map(os.path.normpath, args.out_dirs)}
    if empty := [out_dir for out_dir, history in runs.items() if not history]:
        why = "has no complete record: check the folder's name, or wait for the first evaluation"
        exit_with_error("\n".join(f"{out_dir}/history.jsonl {why}" for out_dir in empty))
    path = args.png or os.path.join(args.out_dirs[0], "curves.png")
    picture = draw_png(runs)
    try:
        if args.png:
            Path(path).write_bytes(picture)
        else:
            write_atomic(path, picture)  # replaces a link that others may have put there
    except OSError as error:
        exit_with_error(f"{path} cannot be written ({error.strerror}): choose another with --png=FILE")
    print(f"written to {path}")


def downsample(points):
    """Return at most MAX_POINTS (iter, min, mean, max), each of a group of points."""
    size, groups = math.ceil(len(points) / MAX_POINTS), []
    for group in (points[i : i + size] for i in range(0, len(points), size or 1)):
        steps, values = zip(*group)
        groups.append((statistics.fmean(steps), min(values), statistics.fmean(values), max(values)))
    return groups


def draw(axis, runs, key):
    """Draw one panel: a line per run, and for the loss also its evaluations."""
    title, unit, log = PANELS[key]
    for number, history in enumerate(runs.values()):
        points = downsample([(it, value / unit) for it, value in series(history, key)])
        x, low, mean, high = zip(*points) if points else ((), (), (), ())
        axis.plot(x, mean, f"C{number}", alpha=0.6 if key == "loss" else 1, linewidth=1,
                  marker="." if len(x) <= 30 else None)
        axis.fill_between(x, low, high, color=f"C{number}", alpha=0.25)
        if key == "loss":
            losses, errors = dict(series(history, "val_loss")), dict(series(history, "val_loss_stderr"))
            axis.errorbar(losses.keys(), losses.values(), [errors.get(it, 0) for it in losses], color=f"C{number}",
                          linewidth=2.2, capsize=3, marker="o", markersize=4)
    low, high = axis.dataLim.intervaly  # of all that is drawn: inf, -inf if that is nothing
    if low > high:
        axis.text(0.5, 0.5, "not recorded", transform=axis.transAxes, ha="center")
    if not log:
        axis.set_ylim(0, 1.08 * max(high, 0) or 1)
    elif 0 < 10 * low < high:
        axis.set_yscale("log")
        axis.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
        title += ", log scale"
    axis.set_title(title, loc="left")
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.7g}")


def draw_png(runs: dict[str, list[dict]]) -> bytes:
    """Draw all panels into one picture, and return it as a PNG file."""
    # From the project's folder: matplotlib also reads a matplotlibrc in the working directory
    with contextlib.chdir(ROOT):
        from matplotlib.figure import Figure

    figure = Figure((15, 8), layout="constrained")
    for axis, key in zip(figure.subplots(2, 3).flatten(), PANELS):
        axis.grid(color="black", alpha=0.12)
        axis.set_xlabel("iteration")
        axis.xaxis.get_major_locator().set_params(integer=True)
        draw(axis, runs, key)
    names = [" " + name.replace("$", r"\$") for name in runs]  # matplotlib hides a name that begins with _
    figure.legend(axis.lines, names, loc="outside upper left", ncols=max(1, 160 // (max(map(len, names)) + 8)))
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    return picture.getvalue()


if __name__ == "__main__":
    with exit_on_error("interrupted"):
        main()
