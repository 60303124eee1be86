"""Draw the curves of runs.

    python src/utils.py --history logs/training_history.json --output curves.png
"""

import argparse
import contextlib
import io
import math
import os
import sys
import warnings
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[3]))  # the project

from records import MAX_BYTES, History

from runtime.files import ROOT, write_atomic
from runtime.output import printable, protect_output
from runtime.paths import expand_path
from runtime.untrusted import open_no_follow, read_json

# From the project's folder: matplotlib also reads a matplotlibrc in the working directory
with contextlib.chdir(ROOT):
    import matplotlib.pyplot as plt

PANELS = {
    "loss": ("train_loss", "val_loss"),
    "accuracy, %": ("train_acc", "val_acc"),
    "learning rate": ("learning_rate",),
    "pictures per second": ("images_per_s",),
}


def draw(histories: dict[str, History], output: str) -> None:
    """Draw {name: history} as a picture: loss, accuracy, learning rate and speed by epoch.

    output: the picture's path, whose suffix says the kind. Raises UserError, OSError, ValueError.
    """
    figure, axes = plt.subplots(2, 2, figsize=(12, 8), layout="constrained")
    for axis, (label, keys) in zip(axes.flat, PANELS.items(), strict=True):
        for number, (name, history) in enumerate(histories.items()):
            for key, style in zip(keys, (".-", ".--")):
                epochs = [record["epoch"] for record in history["epochs"] if key in record]
                # One that isn't finite leaves a gap
                values = [record[key] for record in history["epochs"] if key in record]
                values = [math.nan if value is None else value for value in values]
                axis.plot(epochs, values, style, color=f"C{number}", label=f"{name} {key}")
        axis.set(xlabel="epoch", ylabel=label)
        axis.legend()

    path = Path(output if Path(output).suffix else f"{output}.png")
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix[1:])
    if os.path.lexists(path):
        os.close(open_no_follow(path, os.O_RDONLY))  # refuses a link, a pipe and a device
    write_atomic(path, picture.getvalue())


def main() -> None:
    """Draw what the command line names. Raises UserError, OSError and ValueError."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--history", nargs="+", required=True, type=expand_path)
    parser.add_argument("--output", default="curves.png", type=expand_path)
    args = parser.parse_args()
    histories = {}
    for path in args.history:
        histories[path] = read_json(path, History, MAX_BYTES)
    draw(histories, args.output)


if __name__ == "__main__":
    protect_output()
    warnings.simplefilter("ignore")  # of Matplotlib, about values at the limits of float64
    try:
        main()
    except Exception as error:  # Matplotlib raises many kinds
        needed = "--history needs training_history.json, --output a picture's name"
        message = f"can't draw: {needed} ({error})"
        print(printable(message), file=sys.stderr)
        raise SystemExit(2) from None
