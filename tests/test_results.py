"""The generated table, and the memory estimate against measured peaks, from the files of results/."""

import functools
import json

import pytest
import torch
from conftest import ROOT, STAGES

from model import GPT, GPTConfig
from results.table import format_table
from runtime.data.loader import Batch
from runtime.engine.ds_config import complete_config
from runtime.hardware import Execution
from runtime.lora import TARGET_MODULES
from runtime.lora import apply as apply_lora
from runtime.plan.memory import MemoryInputs, ParamCount, estimate


def run_of(name):
    return json.loads((ROOT / "results" / f"h200_{name}.json").read_text(encoding="utf-8"))


def test_the_benchmark_table_is_made_from_the_runs():
    page = (ROOT / "docs" / "numbers.md").read_text(encoding="utf-8")
    assert f"<!-- results/table.py -->\n{format_table()}\n<!-- end -->" in page
    assert format_table().count("\n") >= 8


def table_rows(lines):
    """Return the rows of a Markdown table, each a set of (column, cell)."""
    cells = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines if line.startswith("|")]
    return [set(zip(cells[0], row, strict=True)) for row in cells[2:]] if cells else []


def test_readmes_speeds_are_rows_of_the_benchmark_table():
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## Speed\n")[2].partition("\n## ")[0]
    shown, measured = (table_rows(text.splitlines()) for text in (section, format_table()))
    assert shown and [row for row in shown if not any(row <= whole for whole in measured)] == []


@functools.cache
def meta_model(lora_rank=0, **shape):
    with torch.device("meta"):
        model = GPT(GPTConfig(**shape))
    if lora_rank:
        apply_lora(model, {"rank": lora_rank, "alpha": 1.0, "dropout": 0.0, "target_modules": TARGET_MODULES})
    return model


XL = {"n_layer": 48, "n_head": 25, "n_embd": 1600}


def planned_gb(model, preset, micro, recomputed, gpus=1, accumulate_locally=False, fp8=False, pretrained=True):
    """Return the estimated peak GB per GPU of a model on meta in bfloat16, without CUDA's own."""
    batch = Batch(micro, max(1, 32 // micro), gpus, 1024)
    config, _ = complete_config(ROOT / preset, batch, 1.0, "bfloat16", True)
    if config["zero_optimization"]["stage"] == 3 and gpus != 2:  # these runs are older than engine/zero3_blocks.py
        config["zero_optimization"]["stage3_prefetch_bucket_size"] = 0
    stored, trainable = (sum(p.numel() for p in model.parameters() if p.requires_grad or every)
                         for every in (True, False))
    parts = estimate(MemoryInputs(model.config, Execution("cuda", "bfloat16", True, 0), batch,
                         ParamCount(stored, stored, trainable), config, recomputed, accumulate_locally, fp8,
                         pretrained))
    return (sum(parts.values()) - parts["CUDA and NCCL"]) / 1e9


def test_the_memory_plan_is_what_was_measured():
    """Peaks of GPT-2 XL and small, at stages 2 and 3, on 1, 2 and 4 GPUs, within a tenth and 0.2 GB."""
    checked = 0
    for file in sorted((ROOT / "results").glob("h200_x*.json")):
        run = json.loads(file.read_text(encoding="utf-8"))
        measured = run.get("summary", run).get("peak_gb")
        if measured is None or "x1_char" in file.name:
            continue
        s, gpus = run["settings"], run.get("gpus", run.get("world_size"))
        shape = {} if "small" in file.name or "long" in file.name else XL
        at_once = "x2_bench" in file.name and s["gradient_accumulation_steps"] > 1
        planned = planned_gb(meta_model(64 if s.get("lora_rank") else 0, **shape), s["deepspeed_config"],
                             s["batch_size"], s["gradient_checkpointing"], gpus, at_once, bool(s.get("fp8")))
        assert planned == pytest.approx(measured, rel=0.1, abs=0.2), file.name
        checked += 1
    assert checked >= 24
    xl = meta_model(**XL)
    for case in (*run_of("x1_memory")["cases"], *(c for c in run_of("x1_plan")["cases"] if c["stage"] > 1)):
        planned = planned_gb(xl, STAGES[case.get("stage", 2)], case["micro"], case["recomputed"])
        assert planned == pytest.approx(case["peak_gb"], rel=0.07), case
    offload = planned_gb(xl, "config/ds/zero3_offload.json", 8, True, pretrained=False)
    assert offload == pytest.approx(run_of("x1_zero3_offload")["after"][0]["peak_gb"], rel=0.1)


@pytest.mark.parametrize("name, rank, micro, recomputed, preset", [
    ("lora64", 64, 1, True, STAGES[2]), ("lora64_8x4", 64, 8, False, STAGES[2]), ("lora320", 320, 1, True, STAGES[2]),
    ("offload2", 0, 8, True, "config/ds/zero2_offload.json"), ("offload3", 0, 8, True, "config/ds/zero3_offload.json")])
def test_lora_and_offload_take_the_planned_memory(name, rank, micro, recomputed, preset):
    planned = planned_gb(meta_model(rank, **XL), preset, micro, recomputed)
    assert planned == pytest.approx(run_of("x1_lora_offload")["runs"][name]["peak_gb"], rel=0.1)
