"""Plot the curves of one run, or compare several, from the history.jsonl in their out_dir.

    python plot.py out-shakespeare-xl-deepspeed     writes curves.png to that folder
    python plot.py out-a out-b --png=compare.png    one color per run
    python plot.py out-a --report                   writes report.html to that folder, to be opened
                                                    in a browser, also offline

It also works during a run. A folder without records ends it with exit code 2."""

import argparse
import contextlib
import io
import math
import os
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from configurator import settings_of_script
from runtime.files import ROOT, write_atomic
from runtime.monitor.history import read_history, series
from runtime.monitor.report import report_html
from runtime.output import exit_on_error, exit_with_error
from runtime.paths import expand_path
from runtime.untrusted import open_regular, parse_json
from runtime.version import version_line


class Panel(NamedTuple):
    """One of the panels of a picture."""

    title: str
    unit: float = 1  # of the axis
    may_be_log: bool = False  # a log scale helps, if the values differ much


PANELS = {  # by the key of a record
    "loss": Panel("loss (bold: validation ± standard error)", may_be_log=True),
    "lr": Panel("learning rate"),
    "grad_norm": Panel("gradient norm before clipping", may_be_log=True),
    "tokens_per_s": Panel("thousand tokens per second", unit=1e3),
    "memory": Panel("peak memory, GB", unit=1e9),
    "data_ms": Panel("waiting for data, ms per step"),
}
# Per line. Longer runs are drawn as means of groups, with their minimum and maximum
MAX_POINTS = 400
MAX_SETTINGS_BYTES = 10**7


class Group(NamedTuple):
    """Points that are drawn as one."""

    iteration: float  # their mean
    lowest: float
    mean: float
    highest: float


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "out_dirs",
        nargs="+",
        metavar="out_dir",
        type=expand_path,
        help="the output folder of a run",
    )
    parser.add_argument(
        "--png",
        metavar="FILE",
        type=expand_path,
        help="output file; default: curves.png in the first folder",
    )
    parser.add_argument(
        "--report",
        action="store_true",
        help="write report.html, with the curves, settings, evaluations and samples of one run",
    )
    parser.add_argument("--version", action="version", version=version_line())
    args = parser.parse_args()

    # The runs, all of which need a record
    runs = {}
    for out_dir in args.out_dirs:
        name = os.path.normpath(out_dir)
        runs[name] = read_history(name)
    empty = [name for name, history in runs.items() if not history]
    if empty:
        why = "has no complete record: check the folder's name, or wait for the first evaluation"
        exit_with_error("\n".join(f"{name}/history.jsonl {why}" for name in empty))

    if args.report:
        if len(runs) > 1 or args.png:
            exit_with_error("--report is of one run: name one folder, and leave --png out")
        write_report(*runs.popitem())
        return

    # Draw first: a picture that can't be drawn must not replace one that is there
    picture = draw(runs, "png")
    path = args.png or os.path.join(args.out_dirs[0], "curves.png")
    try:
        if args.png:
            Path(path).write_bytes(picture)
        else:
            write_atomic(path, picture)  # replaces a link that others may have put there
    except OSError as error:
        exit_with_error(
            f"{path} cannot be written ({error.strerror}): choose another with --png=FILE"
        )
    print(f"written to {path}")


def write_report(out_dir: str, history: list[dict]) -> None:
    """Write a run's report.html into its folder."""
    # What the run was started with
    path = os.path.join(out_dir, "settings.json")
    try:
        with open_regular(path, MAX_SETTINGS_BYTES, follow_links=False) as file:
            settings = parse_json(file.read().decode())
    except (OSError, ValueError) as error:
        exit_with_error(f"{path} cannot be read ({error}): a run writes it when it starts")
    if not isinstance(settings, dict) or not isinstance(settings.get("settings"), dict):
        exit_with_error(f"{path} is not what a run writes: it has no settings")
    defaults = vars(settings_of_script(os.path.join(ROOT, "train_deepspeed.py"), []))

    # The curves, without what matplotlib writes before the element
    svg = draw({out_dir: history}, "svg").decode()
    picture = svg[svg.index("<svg") :]

    # The page, in the place of an earlier one
    name = os.path.basename(os.path.abspath(out_dir))
    text = report_html(name, history, settings, defaults, picture)
    path = os.path.join(out_dir, "report.html")
    try:
        write_atomic(path, text)
    except OSError as error:
        exit_with_error(f"{path} cannot be written ({error.strerror}): check permissions and space")
    print(f"written to {path}")


def downsample(points: list[tuple[int, float]]) -> list[Group]:
    """Return at most MAX_POINTS groups of points, [(iteration, value)]."""
    # Groups of equal size, so that a spike of one step stays visible in its group's maximum
    size = max(1, math.ceil(len(points) / MAX_POINTS))
    groups = []
    for start in range(0, len(points), size):
        some = points[start : start + size]
        values = [value for _, value in some]
        group = Group(
            iteration=statistics.fmean(iteration for iteration, _ in some),
            lowest=min(values),
            mean=statistics.fmean(values),
            highest=max(values),
        )
        groups.append(group)
    return groups


def draw_panel(axis: Any, runs: dict[str, list[dict]], key: str) -> None:
    """Draw one panel: a line per run, and for the loss also its evaluations.

    axis: matplotlib's. runs: {name: history}.
    """
    panel = PANELS[key]
    for number, history in enumerate(runs.values()):
        color = f"C{number}"
        draw_line(axis, history, key, color)
        if key == "loss":
            draw_evaluations(axis, history, color)

    # The scale, by all that is drawn: from inf to -inf if that is nothing
    title = panel.title
    low, high = axis.dataLim.intervaly
    if low > high:
        axis.text(0.5, 0.5, "not recorded", transform=axis.transAxes, ha="center")
    if not panel.may_be_log:
        axis.set_ylim(0, 1.08 * max(high, 0) or 1)
    elif 0 < 10 * low < high:
        axis.set_yscale("log")
        axis.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
        title += ", log scale"
    axis.set_title(title, loc="left")
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.7g}")


def draw_line(axis: Any, history: list[dict], key: str, color: str) -> None:
    """Draw the values of each step, or of groups of steps."""
    # In the axis's unit, and few enough points to see each
    unit = PANELS[key].unit
    points = [(iteration, value / unit) for iteration, value in series(history, key)]
    groups = downsample(points)
    x = [group.iteration for group in groups]
    mean = [group.mean for group in groups]

    # The mean of each group. Few points are marked, so that a single one can be seen
    marker = None
    if len(x) <= 30:
        marker = "."
    alpha = 1.0
    if key == "loss":  # its evaluations are above it
        alpha = 0.6
    axis.plot(x, mean, color, alpha=alpha, linewidth=1, marker=marker)

    # Their range, as a band
    low = [group.lowest for group in groups]
    high = [group.highest for group in groups]
    axis.fill_between(x, low, high, color=color, alpha=0.25)


def draw_evaluations(axis: Any, history: list[dict], color: str) -> None:
    """Draw the validation losses with their standard errors."""
    # A record may have no standard error
    losses = dict(series(history, "val_loss"))
    error_of = dict(series(history, "val_loss_stderr"))
    errors = [error_of.get(iteration, 0) for iteration in losses]
    axis.errorbar(
        losses.keys(),
        losses.values(),
        errors,
        color=color,
        linewidth=2.2,
        capsize=3,
        marker="o",
        markersize=4,
    )


def draw(runs: dict[str, list[dict]], form: str) -> bytes:
    """Draw all panels into one picture, and return it as a file. form: png or svg."""
    # From the project's folder: matplotlib also reads a matplotlibrc in the working directory
    with contextlib.chdir(ROOT):
        from matplotlib.figure import Figure

    # Six panels
    figure = Figure((15, 8), layout="constrained")
    for axis, key in zip(figure.subplots(2, 3).flatten(), PANELS):
        axis.grid(color="black", alpha=0.12)
        axis.set_xlabel("iteration")
        axis.xaxis.get_major_locator().set_params(integer=True)
        draw_panel(axis, runs, key)

    # The legend, with as many columns as the longest name leaves room for. matplotlib hides a name
    # that begins with _, and takes what is between two $ as a formula
    names = [" " + name.replace("$", r"\$") for name in runs]
    longest = max(len(name) for name in names)
    columns = max(1, 160 // (longest + 8))
    figure.legend(axis.lines, names, loc="outside upper left", ncols=columns)

    # In memory, so that the caller decides how the file is replaced
    picture = io.BytesIO()
    figure.savefig(picture, format=form, dpi=120)
    return picture.getvalue()


if __name__ == "__main__":
    with exit_on_error("interrupted"):
        main()
