"""Draw the pictures of the documents from the files in results/ and from the memory estimate.

    python results/draw.py           race.png, memory.png, zero.png, long_run.png and unstable.png in docs/
    python results/draw.py FOLDER    the same files in another folder
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import plot
from results.estimates import XL, meta_model, planned_parts
from results.race import best_baselines, group_of
from results.runs import is_of_recipe, newest, races, training_runs

RESULTS = ROOT / "results"
PRESETS = {2: "ds_config_zero2.json", 3: "ds_config_zero3.json"}
PARTS = {"weights": "#2f7fd6", "gradients": "#1f9d62", "optimizer": "#dd6b10", "buckets": "#8b6be0",
         "activations": "#d9484b", "loss": "#a58500", "CUDA and NCCL": "#9a9a9a"}
TEXT = "documentation and Python sources of PyPI packages"
UNSTABLE = {  # file of results/: what the picture calls it
    "h200_x2_long_run": "attention in bfloat16, text of 87 million tokens",
    "h100_x2_long_run_control": "attention in bfloat16, 85 million, stopped by its warning",
    "h200_x2_long_run_1337": "attention in float16, 85 million, seed 1337",
    "h200_x2_long_run_1338": "attention in float16, 85 million, seed 1338",
}
RACE_COLORS = {
    "plain PyTorch, AdamW": "#2f7fd6",
    "this code, AdamW": "#8b6be0",
    "this code, Muon": "#dd6b10",
    "this code, Muon, FP8": "#1f9d62",
}
WINDOW = 100  # steps of a median


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "docs")
    folder = parser.parse_args().folder
    draw_race(folder / "race.png")
    draw_memory(folder / "memory.png")
    draw_zero(folder / "zero.png")
    draw_long_run(folder / "long_run.png")
    draw_unstable(folder / "unstable.png")
    for name in ("race.png", "memory.png", "zero.png", "long_run.png", "unstable.png"):  # in 64 colors
        Image.open(folder / name).convert("RGB").quantize(64).save(folder / name, optimize=True)
        print(f"written to {folder / name}")


def read(name):
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def race_lines(runs):
    """Return {name: run} of the runs to draw, all of one GPU, seed and text: first plain PyTorch.

    The group is the one that has ours with AdamW, or else the one with the most lines.
    """
    groups = {}
    for group, base in best_baselines(runs).items():
        lines = {"plain PyTorch, AdamW": base}
        for run in runs:
            if group_of(run) != group or not is_of_recipe(run):
                continue
            if "muon" not in run["label"]:
                name = "this code, AdamW"
            elif "fp8" in run["label"]:
                name = "this code, Muon, FP8"
            else:
                name = "this code, Muon"
            lines[name] = run
        groups[group] = lines
    return max(groups.values(), key=lambda lines: ("this code, AdamW" in lines, len(lines)))


def draw_race(path):
    """Draw the validation losses of GPT-2 small against time, at each length of results/race.py: the best run of
    plain PyTorch, and ours with the same seed, at the rates of config/train_gpt2.py, on the same kind of GPU."""
    from matplotlib.figure import Figure

    figure = Figure((9, 4), layout="constrained")
    figure.suptitle(f"GPT-2 124M from scratch on {TEXT}", x=0.01, ha="left")
    files = races()
    for axis, file in zip(figure.subplots(1, len(files), squeeze=False)[0], files):
        lines = race_lines(file["runs"])
        for name, run in lines.items():
            _, seconds, losses = zip(*run["curve"][1:])
            axis.plot(seconds, losses, marker="o", markersize=3, label=name, color=RACE_COLORS[name])
        base = lines["plain PyTorch, AdamW"]
        steps, _, loss = base["curve"][-1]
        axis.axhline(loss, color="black", linewidth=0.8, linestyle=":", label="plain PyTorch's last loss")
        gpu = base["hardware"].split()[1]
        axis.set(xlabel=f"seconds of training on one {gpu}", ylabel="validation loss", ylim=(0.8, 2.5))
        axis.set_title(f"{steps:,} steps of plain PyTorch", loc="left", fontsize=9)
        axis.grid(color="black", alpha=0.12)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend()
    figure.savefig(path, format="png", dpi=110)


def xl_estimate(stage, micro, gpus=1, recomputed=False):
    """Return {part: GB per GPU} of GPT-2 XL in bfloat16, with 32 sequences of 1,024 tokens per GPU and step."""
    return planned_parts(meta_model(**XL), PRESETS[stage], micro, recomputed, gpus)


def stack(draw_bar, place, parts, width):
    """Draw one bar of parts, and return its length."""
    total = 0
    for part, color in PARTS.items():
        draw_bar(place, parts[part], width, total, color=color, edgecolor="white", linewidth=0.5)
        total += parts[part]
    return total


def draw_measured(axis, x, y):
    axis.plot(x, y, "o", color="black", markersize=5)


def finish(figure, axis, path):
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=color, linewidth=7) for color in PARTS.values()]
    handles.append(Line2D([], [], color="black", marker="o", linestyle="", markersize=5))
    names = [*PARTS, "measured, and the estimate of CUDA and NCCL"]
    figure.legend(handles, names, loc="outside lower center", ncols=4)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png", dpi=110)


def draw_memory(path):
    """Draw what --dry_run estimates for one GPU, by micro-batch, and a case on two, with the measured peaks.

    PyTorch's peaks are without what CUDA and NCCL take, so a dot adds the estimate of that.
    """
    from matplotlib.figure import Figure

    figure = Figure((9, 5), layout="constrained")
    axis = figure.subplots()
    runs = {}
    for case, same in training_runs().items():
        is_plain = case.model in ("gpt2-xl", "gpt2-xl, gradient checkpointing")
        if case[:2] == ("H200", 1) and case.stage == 2 and case.optimizer == "adamw" and is_plain:
            runs[case.micro, "checkpointing" in case.model] = newest(same)

    bars = []  # (label, parts, measured GB)
    for micro, recomputed in sorted(runs, reverse=True):
        label = f"{micro} x {32 // micro}" + ", gradient checkpointing" * recomputed
        bars.append((label, xl_estimate(2, micro, 1, recomputed), runs[micro, recomputed]["peak_gb"]))
    two = read("h200_x2_bench_zero3_8x4")
    at_once = planned_parts(meta_model(**XL), PRESETS[3], 8, False, 2, accumulate_locally=True)
    bars.append(("8 x 4 on two GPUs, ZeRO-3", at_once, two["peak_gb"]))

    for place, (_, parts, measured) in enumerate(bars):
        total = stack(axis.barh, place, parts, 0.7)
        draw_measured(axis, measured + parts["CUDA and NCCL"], place)
        axis.text(total + 2, place, f"{total:.1f}", va="center")
    axis.set_yticks(range(len(bars)), [label for label, _, _ in bars])
    axis.set(xlabel="GB per GPU", xlim=(0, 122))
    axis.set_title("GPT-2 XL, bfloat16, one H200 and ZeRO-2 unless said: estimated peak memory", loc="left")
    finish(figure, axis, path)


def zero_estimates(gpus):
    """Return {name: parts} of plain data parallelism and of ZeRO-1, 2 and 3, at 1 x 32.

    The first two don't exist here as such: gradients and optimizer states are those of one GPU, if not sharded.
    """
    alone, sharded = xl_estimate(2, 1), xl_estimate(2, 1, gpus)
    zero1 = sharded | {"gradients": alone["gradients"]}
    return {
        "data\nparallel": zero1 | {"optimizer": alone["optimizer"]},
        "ZeRO-1": zero1,
        "ZeRO-2": sharded,
        "ZeRO-3": xl_estimate(3, 1, gpus),
    }


def draw_zero(path):
    """Draw how the stages shard the memory of GPT-2 XL at 1 x 32, with the measured peak on one GPU."""
    from matplotlib.figure import Figure

    figure = Figure((11, 4.8), layout="constrained")
    axis = figure.subplots()
    alone = xl_estimate(2, 1)
    bars = {0: ("1 GPU", alone)}
    for group, gpus in enumerate((2, 4, 8)):
        for number, (name, parts) in enumerate(zero_estimates(gpus).items()):
            bars[1.5 + 4.6 * group + number] = (name, parts)
        axis.text(3 + 4.6 * group, 37.5, f"{gpus} GPUs", ha="center", weight="bold")
    for place, (_, parts) in bars.items():
        total = stack(axis.bar, place, parts, 0.8)
        axis.text(place, total + 0.7, f"{total:.1f}", ha="center")
    measured = read("h200_x1_bench_1x32")["peak_gb"]  # on several, gradients were accumulated locally
    draw_measured(axis, 0, measured + alone["CUDA and NCCL"])
    axis.set_xticks(list(bars), [name for name, _ in bars.values()], fontsize=8)
    axis.set(ylabel="GB per GPU", ylim=(0, 40))
    axis.set_title("GPT-2 XL, 1 x 32, bfloat16, H200: estimated peak memory per GPU", loc="left")
    finish(figure, axis, path)


def medians(values, first, last):
    """Return (steps, medians) of each WINDOW steps from `first` to `last`, as far as the values go."""
    steps = range(first + WINDOW, min(last, len(values)) + 1, WINDOW)
    return steps, [statistics.median(v for v in values[step - WINDOW : step] if v is not None) for step in steps]


def draw_unstable(path):
    """Draw medians of the training losses and of the gradient norms of UNSTABLE, steps 6,000 to 10,000."""
    from matplotlib.figure import Figure

    figure = Figure((12, 4.8), layout="constrained")
    figure.suptitle(f"GPT-2 124M with nanoGPT's recipe on {TEXT}: medians of {WINDOW} steps", x=0.01, ha="left")
    loss_axis, norm_axis = figure.subplots(1, 2)
    for name, label in UNSTABLE.items():
        run = read(name)
        loss_axis.plot(*medians(run["losses"], 6000, 10000), label=label)
        norm_axis.plot(*medians(run["grad_norms"], 6000, 10000))
    norm_axis.set_yscale("log")
    norm_axis.set_yticks([0.2, 0.3, 0.5, 1, 2, 5, 10, 20], [0.2, 0.3, 0.5, 1, 2, 5, 10, 20])
    loss_axis.set_title("training loss", loc="left")
    norm_axis.set_title("gradient norm before clipping, log scale", loc="left")
    for axis in (loss_axis, norm_axis):
        axis.set_xlabel("step")
        axis.grid(color="black", alpha=0.12)
    figure.legend(loc="outside lower center", ncols=2)
    figure.savefig(path, format="png", dpi=110)


def draw_long_run(path):
    """Draw the losses and gradient norms of the long run of config/train_gpt2.py, with a line at its resume."""
    from matplotlib.figure import Figure

    run = read("h200_x1_long_run")
    steps = zip(run["losses"], run["grad_norms"])
    history = [{"iter": i, "loss": loss, "grad_norm": norm} for i, (loss, norm) in enumerate(steps, 1)]
    runs = {"config/train_gpt2.py": history + run["evaluations"]}
    figure = Figure((12, 4.6), layout="constrained")
    figure.suptitle(f"GPT-2 124M, config/train_gpt2.py with Muon on one H200, on {TEXT}", x=0.01, ha="left")
    for axis, key in zip(figure.subplots(1, 2), ("loss", "grad_norm")):
        plot.draw_panel(axis, runs, key)
        axis.grid(color="black", alpha=0.12)
        axis.set_xlabel("step; dashed: stopped and resumed")
        for step in run["resumed_at"]:
            axis.axvline(step, color="C0", linestyle="--", linewidth=0.8)
    norms = figure.axes[1]
    norms.plot(*medians(run["grad_norms"], 0, 10000), color="black", linewidth=1.2, label=f"median of {WINDOW} steps")
    norms.legend()
    figure.savefig(path, format="png", dpi=110)


if __name__ == "__main__":
    main()
