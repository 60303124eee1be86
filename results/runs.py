"""Read the measurements of results/ by what they measure, and format them, for results/table.py."""

import json
import re
from collections import namedtuple
from pathlib import Path

from results.estimates import SMALL, meta_model
from runtime.hardware import gpu_named
from runtime.pretrained import PRETRAINED

RESULTS = Path(__file__).resolve().parent
Case = namedtuple("Case", "gpu gpus model stage micro accumulation optimizer")


def read(*patterns):
    """Return the files of results/ that match, each with its name as "file"."""
    paths = [path for pattern in patterns for path in sorted(RESULTS.glob(pattern))]
    return [json.loads(path.read_text(encoding="utf-8")) | {"file": path.name} for path in paths]


def races():
    """Return the files of results/race.py, the short race first."""
    return read("race_short.json", "race_long.json")


def is_of_recipe(run):
    """Return whether a run of results/race.py has the rates of config/train_gpt2.py, or the baseline's with AdamW."""
    return "muon 0.02, adamw 0.0036," in run["label"] or run["label"].startswith("ours, cosine, adamw 0.001,")


def newest(runs):
    return max(runs, key=lambda run: run["date"])


def shape_of(run):
    """Return a run's layers, heads and width. Those of a folder of weights are GPT-2 XL's."""
    s = run["settings"]
    return PRETRAINED.get(s["init_from"]) or tuple(s[name] for name in SMALL if s[name]) or PRETRAINED["gpt2-xl"]


def case_of(run):
    s, shape = run["settings"], shape_of(run)
    names = {sizes: name for name, sizes in PRETRAINED.items()}
    options = {"FP8": s.get("fp8"), "float16": s.get("dtype") == "float16",
               "`--compile=False`": s.get("compile") is False,
               f"LoRA of rank {s.get('lora_rank')}": s.get("lora_rank"),
               "offload": "offload" in s["deepspeed_config"], "gradient checkpointing": s.get("gradient_checkpointing")}
    model = ", ".join([names.get(shape, str(shape)), *(name for name, used in options.items() if used)])
    stage = run.get("stage") or int(re.search(r"zero(\d)", s["deepspeed_config"])[1])
    return Case(re.search(r"[A-Z]?\d{2,}", run["hardware"])[0], run["world_size"], model, stage, s["batch_size"],
                s["gradient_accumulation_steps"], s.get("optimizer", "adamw"))


def training_runs():
    """Return {case: its runs}, in the order of the tables."""
    cases = {}
    for run in read("*_bench_*.json"):
        cases.setdefault(case_of(run), []).append(run)
    return {case: cases[case] for case in sorted(cases, key=lambda c: (c.gpu != "H200", *c[:4], -c.micro, *c[5:]))}


def sampling_runs():
    """Return {(hardware, model, batch size): its runs}."""
    names, cases = {sizes: name for name, sizes in PRETRAINED.items()}, {}
    for run in read("*_sample_*.json"):
        cases.setdefault((run["hardware"].split(",")[0], names[tuple(run["shape"])], run["batch"]), []).append(run)
    return {case: cases[case] for case in sorted(cases, key=lambda case: ("CPU" in case[0], *case))}


def short_commit(run):
    """Return 7 digits of a run's commit, with its "+" if there were uncommitted changes."""
    commit = run["commit"]
    return commit[:7] + "+" * commit.endswith("+")


def link(run, text=""):
    """Return a link to a run's file: its commit and date, or the text."""
    return f"[{text or short_commit(run)}](results/{run['file']})" + ("" if text else f", {run['date'][:10]}")


def markdown(columns, rows):
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("|" + "|".join(map(str, line)) + "|" for line in lines)


def median(run, key="ms"):
    return f"{run[key]['median']:,.0f}" if run[key]["median"] >= 100 else f"{run[key]['median']:.1f}"


def speed_cells(case, run):
    """Return the split of a step, ms per step, tokens/s, MFU and peak GB. MFU is as in runtime/monitor/runlog.py."""
    model = meta_model(**dict(zip(SMALL, shape_of(run))))
    flops = run["tokens_per_s"] * model.flops_per_token() / run["world_size"]
    gpu = gpu_named(run["hardware"])
    mfu = f"{flops / gpu.tflops / 1e12:.1%}" if gpu else "n/a"
    return [f"{case.micro} x {case.accumulation}", median(run), f"{run['tokens_per_s']:,.0f}", mfu,
            f"{run['peak_gb']:.1f}"]
