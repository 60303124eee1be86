"""Draw the pictures of the documents from the files in results/ and from the memory estimate.

    python results/draw.py           docs/race.png, docs/curves.png, docs/memory.png, docs/zero.png and
                                     docs/long_run.png
    python results/draw.py FOLDER    the same files in another folder
"""

import argparse
import json
import sys
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import plot
from results.estimates import XL, meta_model, planned_parts
from results.race import best_baselines
from results.runs import newest, races, training_runs

RESULTS = ROOT / "results"
PRESETS = {2: "ds_config_zero2.json", 3: "ds_config_zero3.json"}
PARTS = {"weights": "#2f7fd6", "gradients": "#1f9d62", "optimizer": "#dd6b10", "buckets": "#8b6be0",
         "activations": "#d9484b", "loss": "#a58500", "CUDA and NCCL": "#9a9a9a"}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "docs")
    folder = parser.parse_args().folder
    runs = {"config/shakespeare_char.py on one H200": read("h200_x1_char")["history"]}
    (folder / "curves.png").write_bytes(plot.draw_png(runs))
    draw_race(folder / "race.png")
    draw_memory(folder / "memory.png")
    draw_zero(folder / "zero.png")
    draw_long_runs(folder / "long_run.png", "h200_x1_long_run")
    draw_long_runs(folder / "unstable.png", "h200_x2_long_run", "h100_x2_long_run_control", "h200_x2_long_run_1337",
                   "h200_x2_long_run_1338")
    for name in ("race.png", "curves.png", "memory.png", "zero.png", "long_run.png", "unstable.png"):  # in 64 colors
        Image.open(folder / name).convert("RGB").quantize(64).save(folder / name, optimize=True)
        print(f"written to {folder / name}")


def read(name):
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def draw_race(path):
    """Draw the validation losses of GPT-2 small against time, at each length of results/race.py: the best run of
    nanoGPT's recipe, and ours with the same seed, at the rates of config/train_gpt2.py."""
    from matplotlib.figure import Figure

    figure = Figure((9, 3.6), layout="constrained")
    files = races()
    for axis, file in zip(figure.subplots(1, len(files), squeeze=False)[0], files):
        ours = [run for run in file["runs"] if "muon 0.02, adamw 0.0036" in run["label"]]
        seed = next(run["seed"] for run in ours if "fp8" in run["label"])
        base = best_baselines(file["runs"])[seed]
        shown = {"plain PyTorch, nanoGPT's recipe": base}
        shown |= {f"Muon, {'FP8' if 'fp8' in run['label'] else 'bfloat16'}": run for run in ours if run["seed"] == seed}
        for name, run in shown.items():
            _, seconds, losses = zip(*run["curve"][1:])
            axis.plot(seconds, losses, marker="o", markersize=3, label=name)
        steps, _, loss = base["curve"][-1]
        axis.axhline(loss, color="black", linewidth=0.8, linestyle=":")
        gpu = base["hardware"].split()[1]
        axis.set(xlabel=f"seconds of training on one {gpu}", ylabel="validation loss", ylim=(0.8, 2.5))
        axis.set_title(f"GPT-2 small from scratch, {steps:,} steps of nanoGPT's recipe", loc="left", fontsize=9)
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


def finish(figure, axis, path):
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=color, linewidth=7) for color in PARTS.values()]
    handles.append(Line2D([], [], color="black", marker="o", linestyle="", markersize=5))
    figure.legend(handles, [*PARTS, "measured, without CUDA and NCCL"], loc="outside lower center", ncols=4)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png", dpi=110)


def draw_memory(path):
    """Draw what --dry_run estimates for one GPU, by micro-batch, with the measured peaks."""
    from matplotlib.figure import Figure

    figure = Figure((9, 4.6), layout="constrained")
    axis = figure.subplots()
    cases = {(case.micro, "checkpointing" in case.model): newest(runs) for case, runs in training_runs().items()
             if case[:2] == ("H200", 1) and case.stage == 2 and case.optimizer == "adamw"
             and case.model in ("gpt2-xl", "gpt2-xl, gradient checkpointing")}
    cases = {case: cases[case] for case in sorted(cases, reverse=True)}
    for place, ((micro, recomputed), run) in enumerate(cases.items()):
        total = stack(axis.barh, place, xl_estimate(2, micro, 1, recomputed), 0.7)
        axis.plot(run["peak_gb"], place, "o", color="black", markersize=5)
        axis.text(total + 0.7, place, f"{total:.1f}", va="center")
    axis.set_yticks(range(len(cases)), [f"{micro} x {32 // micro}" + ", gradient checkpointing" * recomputed
                                        for micro, recomputed in cases])
    axis.set(xlabel="GB", xlim=(0, 122))
    axis.set_title("GPT-2 XL, ZeRO-2, bfloat16, one H200: estimated peak memory", loc="left")
    finish(figure, axis, path)


def draw_zero(path):
    """Draw how the stages shard the memory of GPT-2 XL at 1 x 32, with the measured peaks."""
    from matplotlib.figure import Figure

    figure = Figure((10, 4.6), layout="constrained")
    axis = figure.subplots()
    measured = {(2, 1): read("h200_x1_bench_1x32")["peak_gb"]}  # on several, gradients were accumulated locally
    ticks = []
    for group, gpus in enumerate((1, 2, 4, 8)):
        for stage in (2, 3):
            place = group * 4 + stage
            total = stack(axis.bar, place, xl_estimate(stage, 1, gpus), 0.8)
            axis.text(place, total + 0.4, f"{total:.1f}", ha="center")
            if (stage, gpus) in measured:
                axis.plot(place, measured[stage, gpus], "o", color="black", markersize=5)
            ticks.append((place, f"ZeRO-{stage}" + f"\n{gpus} GPU{'s' * (gpus > 1)}" * (stage == 2)))
    axis.set_xticks(*zip(*ticks), fontsize=8)
    axis.set_ylabel("GB per GPU")
    axis.set_title("GPT-2 XL, 1 x 32, bfloat16, H200: estimated peak memory per GPU", loc="left")
    finish(figure, axis, path)


def draw_long_runs(path, *names):
    """Draw the losses and gradient norms of files of results/long_run.py, with a line at each resume."""
    from matplotlib.figure import Figure

    files, figure = [read(name) for name in names], Figure((13, 4.6), layout="constrained")
    runs = {name: [{"iter": i, "loss": loss, "grad_norm": norm}
                   for i, (loss, norm) in enumerate(zip(run["losses"], run["grad_norms"]), 1)] + run["evaluations"]
            for name, run in zip(names, files)}
    for axis, key in zip(figure.subplots(1, 2), ("loss", "grad_norm")):
        plot.draw(axis, runs, key)
        axis.grid(color="black", alpha=0.12)
        axis.set_xlabel("iteration; dashed: a resume")
        for number, run in enumerate(files):
            for step in run["resumed_at"]:
                axis.axvline(step, color=f"C{number}", linestyle="--", linewidth=0.8)
    figure.savefig(path, format="png", dpi=110)


if __name__ == "__main__":
    main()
