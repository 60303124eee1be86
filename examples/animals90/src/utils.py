"""Draw the curves of runs: python src/utils.py --history logs/training_history.json --output curves.png"""

import argparse
import json

import matplotlib.pyplot as plt

PANELS = {"loss": ("train_loss", "val_loss"), "accuracy, %": ("train_acc", "val_acc"),
          "learning rate": ("learning_rate",), "pictures per second": ("images_per_s",)}


def draw(histories, output):
    """Draw {name: history} as a picture: loss, accuracy, learning rate and speed by epoch."""
    figure, axes = plt.subplots(2, 2, figsize=(12, 8), layout="constrained")
    for axis, (label, keys) in zip(axes.flat, PANELS.items()):
        for color, (name, history) in enumerate(histories.items()):
            for key, style in zip(keys, (".-", ".--")):
                points = [(record["epoch"], record[key]) for record in history["epochs"]]
                axis.plot(*zip(*points), style, color=f"C{color}", label=f"{name} {key}")
        axis.set(xlabel="epoch", ylabel=label)
        axis.legend()
    figure.savefig(output)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--history", nargs="+", type=argparse.FileType(), required=True)
    parser.add_argument("--output", default="curves.png")
    args = parser.parse_args()
    try:
        draw({file.name: json.load(file) for file in args.history}, args.output)
    except Exception as error:  # a JSON may hold anything
        parser.exit(2, f"can't draw: --history needs training_history.json, --output a picture's name ({error!r})\n")
