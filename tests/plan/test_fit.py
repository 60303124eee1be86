"""The memory estimate as a user meets it: --dry_run, GPUs that aren't here, and settings that fit instead."""

import itertools
import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import ROOT, SOURCE, done, launch

from configurator import settings_of_script
from model import GPTConfig
from runtime.cluster.ranks import Ranks
from runtime.data.dataset import write_dataset
from runtime.data.loader import BatchSizes
from runtime.errors import UserError
from runtime.hardware import GPUS, Execution, find_gpu, peak_flops
from runtime.plan.advice import fit_batch
from runtime.plan.memory import MemoryInputs, ParamCount, bytes_with_eval, estimate, gpu_bytes
from runtime.plan.report import memory_report, summary
from runtime.plan.run_plan import Problems, make_plan
from runtime.plan.step_time import relative_step_time

XL = ("config/xl_shakespeare.py", "--dry_run=True")
SIZE = re.compile(r"^each GPU   ([\d.]+) GB of ([\d.]+) GB(: too much \(10% must stay free\))?$", re.M)
SUGGESTION = re.compile(r"^ +[\d.]+ GB +([\d.]+x|LoRA)  (--batch_size=.+)$", re.M)


def dry_run(*args, **env):
    return done(launch(ROOT / "train_deepspeed.py", *XL, *args, **env)).stdout


def report(*args, ranks=1, per_node=None):
    """What a dry run of these prints, in this process."""
    settings = settings_of_script(str(ROOT / "train_deepspeed.py"), [*args, "--dry_run=True"])
    plan = make_plan(settings, ranks := Ranks(0, 0, ranks, per_node or ranks), Problems(), [])
    return f"{summary(plan)}\n{memory_report(plan, ranks)}"


def test_gpt2_xl_on_one_24_gb_card_and_what_fits_instead(tmp_path):
    """Without a GPU, weights or data. Each of the suggestions fits, added to any command line."""
    told = dry_run("--target_gpu=24", f"--dataset={tmp_path}/none", "--max_epochs=3")
    total, room, much = SIZE.search(told).groups()
    parts = [float(size) * {"GB": 1, "MB": 1e-3}[unit] for size, unit in
             re.findall(r"^ {11} *([\d.]+) (GB|MB)  █", told.split("\nhost")[0], re.M)]
    assert float(total) == pytest.approx(sum(parts), abs=0.03) and float(total) == pytest.approx(33.6, abs=0.1)
    assert room == "24.00" and much and "none/" in told
    assert "note       on this machine, " in told and "note       without its dataset, the plan has" in told
    suggested = SUGGESTION.findall(told)
    times = [float(time[:-1]) for time, _ in suggested[:-1]]
    assert len(suggested) == 6 and times == sorted(times) and times[0] > 1
    for time, words in suggested[:-1]:  # compact state goes before offload
        assert ("offload" in words) is (float(time[:-1]) > 1.6) is ("--compact_optimizer=True" not in words), words
    assert suggested[-1][0] == "LoRA" and "--lora_rank=64" in suggested[-1][1]
    for before in (("--compact_optimizer=True",),
                   ("--gradient_checkpointing=True", "--deepspeed_config=ds_config_zero3.json")):
        for _, words in SUGGESTION.findall(report(XL[0], *before, "--batch_size=32", "--gradient_accumulation_steps=1",
                                                  "--target_gpu=24")):
            split = {k: int(v) for k, v in re.findall(r"--(batch_size|gradient_accumulation_steps)=(\d+)", words)}
            assert split["batch_size"] * split["gradient_accumulation_steps"] == 32
            assert not SIZE.search(report(XL[0], *before, *words.split(), "--target_gpu=24"))[3], words
    assert not any("--lora" in report(XL[0], other, "--target_gpu=24") for other in ("--optimizer=muon", "--fp8=True"))
    for before in ("--optimizer=muon", "--skip_grad_spikes=True"):
        base = "config/train_gpt2_xl.py", before, "--target_gpu=12"
        suggested = SUGGESTION.findall(report(*base, ranks=8))
        assert suggested and not any(SIZE.search(report(*base, *words.split(), ranks=8))[3] for _, words in suggested)


def test_a_dry_run_downloads_no_weights(tmp_path, monkeypatch):
    ids = np.arange(2000)
    write_dataset(tmp_path, ids, ids, {"kind": "gpt2"}, 50257, SOURCE)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: None)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", None)
    assert "model      124,439,808 parameters from gpt2," in report(
        "--init_from=gpt2", f"--dataset={tmp_path}", "--device=cpu", "--keep_last=0")


def test_the_model_of_a_plan_is_the_last_configs():
    told = report("config/train_gpt2_xl.py", "config/train_gpt2.py", "--target_gpu=80")
    assert told.startswith("model      124,439,808 parameters from scratch, block_size 1024\nplan ")


def test_four_cards_of_a_name():
    """T4s have no bfloat16 and 16 GB: the run is a little too large for them, and recomputation makes it fit."""
    told = dry_run("--target_gpu=T4", WORLD_SIZE="4")
    assert SIZE.search(told)[3]
    assert any("--gradient_checkpointing=True" in arguments and "offload" not in arguments
               for _, arguments in SUGGESTION.findall(told))
    assert not SIZE.search(report(XL[0], "--target_gpu=A100", ranks=4))[3] and GPUS["A100"].gb == 80
    assert "of 24.00 GB: too much" in report(XL[0], "--target_gpu=4090")  # a name, though it reads as a number
    assert not SIZE.search(report(XL[0], "--target_gpu=24", "--batch_size=auto", ranks=4))[3]


@pytest.mark.parametrize("name, gb, tflops", [
    ("NVIDIA A100-SXM4-40GB", 40, 312), ("NVIDIA A100 80GB PCIe", 80, 312), ("A100-40GB", 40, 312),
    ("NVIDIA H100 PCIe", 80, 756), ("NVIDIA H100 80GB HBM3", 80, 989), ("Tesla V100-SXM2-32GB", 32, 125),
    ("Tesla T4", 16, 65), ("NVIDIA A10G", 24, 70), ("NVIDIA RTX A6000", 48, 155), ("rtx4090", 24, 165),
    ("NVIDIA GeForce RTX 4090", 24, 165), ("24GB", 24, None), ("47.5 gb", 47.5, None), (24.0, 24, None),
    *((name, None, None) for name in ("NVIDIA RTX A1000", "NVIDIA T400", "NVIDIA GeForce RTX 4090 Laptop GPU", "GB",
                                      "NVIDIA H200 MIG 1g.18gb", "A100-60GB", "RTX 3080", "0GB", "2e3"))])
def test_a_card_is_known_by_its_whole_name(name, gb, tflops, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: str(name))
    assert peak_flops("cuda") == (tflops and tflops * 1e12)
    if gb:
        assert (find_gpu(name).gb, find_gpu(name).tflops) == (gb, tflops)
    else:
        with pytest.raises(UserError, match=f"^target_gpu={name} is unknown: give a number of GB, or one of T4,"):
            find_gpu(name)


def test_speeds_are_reckoned_from_what_was_measured():
    """On H200: micro-batches on one GPU, ZeRO-3 against ZeRO-2 on two."""
    def ms(name):
        return json.loads((ROOT / "results" / f"h200_{name}.json").read_text())["ms"]["median"]

    for micro, name in itertools.product((32, 16, 8, 4, 1), ("", "recomputed_", "offload_")):
        if name != "offload_" or micro in (8, 1):
            estimate = relative_step_time(micro, name != "", "zero2_offload" if name == "offload_" else "zero2")
            measured = ms(f"x1_bench_{name}{micro}x{32 // micro}") / ms("x1_bench_32x1")
            assert estimate == pytest.approx(measured, rel=0.03), (name, micro)
    for batch_size, split in ((32, "32x1"), (8, "8x4"), (1, "1x32")):
        zero2, zero3 = (relative_step_time(batch_size, False, preset) for preset in ("zero2", "zero3"))
        assert zero3 / zero2 == pytest.approx(ms(f"x2_bench_zero3_{split}") / ms(f"x2_bench_{split}"), rel=0.02)


def test_the_planned_time_holds_what_was_measured():
    """On H200s. A GPU without a known peak has no time, and a step that takes the launches longer than the kernels."""
    files = [file for file in (ROOT / "results").glob("h200_x*_bench_*.json") if "lora" not in file.name]
    for file in files:
        run = json.loads(file.read_text())
        names = {"batch_size", "gradient_accumulation_steps", "deepspeed_config", "fp8", "optimizer",
                 "gradient_checkpointing"}
        given = {"optimizer": "adamw"} | {name: run["settings"][name] for name in names & run["settings"].keys()}
        told = report(f"config/train_gpt2{'' if 'small' in file.name else '_xl'}.py", "--target_gpu=H200",
                      "--max_iters=9", *(f"--{name}={value}" for name, value in given.items()),
                      ranks=int(file.name[6]))
        low, high = (int(text.replace(",", "")) for text in re.search(
            r"^time       (?:at least )?([\d,]+)(?: to ([\d,]+))? ms per step, .* for 9 st", told, re.M).groups("9999"))
        assert low < run["ms"]["median"] < high, file.name
    assert len(files) >= 16
    assert "\ntime " not in report(XL[0], "--target_gpu=24")
    offload = "--deepspeed_config=config/ds/zero2_offload.json"  # the CPU's time is not known
    assert re.search("^time       at least [0-9,]+ ms per step", report(XL[0], "--target_gpu=4090", offload), re.M)
    # No figure is of a network
    for per_node, left_out in ((8, "and saves"), (4, ", saves and the network between nodes")):
        told = report("config/train_gpt2.py", "--target_gpu=H200", ranks=8, per_node=per_node)
        assert re.search(f"^time .*, without evaluations ?{left_out}$", told, re.M), per_node
    # GPT-2 XL's 597 ms on an H200 take 6 times as long on a 4090, but the CPU's 400 ms don't
    fast, slow = (relative_step_time(32, False, "zero2_offload", speed) for speed in (1, 165 / 989))
    assert fast - slow == pytest.approx(400 / 597 * (1 - 165 / 989))
    assert "\ntime " not in report("config/train_gpt2.py", "--target_gpu=H200", "--n_head=1", "--n_embd=64")


@pytest.mark.parametrize("stage, overlap, parts", [
    (2, False, (2.0, 1.0, 3.0, 0.2)), (2, True, (2.0, 1.0, 3.0, 0.4)),
    (3, True, (0.5, 1.0, 3.0, 0.2 + 2.0))])
def test_the_plan_of_a_billion_parameters_on_4_gpus_by_hand(stage, overlap, parts):
    """In bfloat16, with buckets of 0.1 billion: GB of weights, gradients, float32
    weights with two moments, and buckets, of which overlap_comm takes two."""
    config = {"zero_optimization": {"stage": stage, "reduce_bucket_size": 10**8, "overlap_comm": overlap,
                                    "stage3_prefetch_bucket_size": 0}}  # DeepSpeed's own path at ZeRO-3
    planned = estimate(MemoryInputs(GPTConfig(), Execution("cuda", "bfloat16", False, 0), BatchSizes(1, 1, 4, 1024),
                                    ParamCount(10**9, 10**9, 10**9), config))
    assert [planned[part] / 1e9 for part in ("weights", "gradients", "optimizer", "buckets")] == pytest.approx(parts)


def test_compact_state_by_hand():
    """A billion parameters on 2 GPUs, 60% of them Muon's: remainders, moments and the scales of blocks. At the start,
    there are the float32 weights, too."""
    config = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 1, "overlap_comm": False}}
    run = MemoryInputs(GPTConfig(n_layer=1, n_head=1, n_embd=1, block_size=1), Execution("cuda", "bfloat16", True, 0),
                       BatchSizes(1, 1, 2, 1), ParamCount(10**9, 10**9, 10**9, muon=6 * 10**8), config,
                       compact_optimizer=True)
    planned = estimate(run)
    assert planned["optimizer"] == (4 * 10**9 + 2 * 4 * 10**8 // 128) // 2
    at_start = 2e9 + 4e9 / 2 + 6e9 / 2 + 1.6e9
    assert sum(planned.values()) == pytest.approx(max(at_start, sum(planned.values()) - planned["start"]), rel=1e-6)
    on_cpu = replace(run, execution=Execution("cpu", "float32", False, 0))
    assert estimate(on_cpu)["optimizer"] == (12 * 10**9 - 4 * 6 * 10**8) // 2


def test_on_a_cpu_offload_is_no_advice(characters, monkeypatch):
    monkeypatch.setattr("runtime.plan.machine.available_memory", lambda: 24e9)
    told = report("config/train_gpt2_xl.py", "--device=cpu", f"--dataset={characters}", "--optimizer=adamw",
                  "--keep_last=0")
    assert "of 24.00 GB: too much" in told and "offload" not in told


@pytest.mark.parametrize("config, target_gpu, suggested", [
    (XL[0], 1, []), ("config/finetune_shakespeare.py", 2.4, ["LoRA"])])
def test_if_nothing_fits_lora_may(config, target_gpu, suggested):
    config = (config, "--learning_rate=1e-3", "--min_lr=5e-4")  # above LoRA's
    text = report(*config, f"--target_gpu={target_gpu}")
    suggestions = SUGGESTION.findall(text)
    assert [time for time, _ in suggestions] == suggested
    assert suggested or ", and no ZeRO stage of this optimizer makes it fit: use more GPUs or larger ones" in text
    for _, words in suggestions:
        assert "--min_lr=0.0002" in words
        assert "too much" not in report(*config, *words.split(), f"--target_gpu={target_gpu}")


@pytest.mark.parametrize("page, config, options, gigabytes", [
    ("config/lora_xl.py", "config/lora_xl.py", [], 8),
    ("config/lora_xl.py", "config/lora_xl.py", ["--lora_rank=320"], 16),
    ("docs/lora.md", "config/lora_xl.py", ["--batch_size=8", "--gradient_accumulation_steps=8"], 12),
    ("config/finetune_shakespeare.py", "config/finetune_shakespeare.py", [], 8)])
def test_configs_fit_the_gpu_that_a_page_names(page, config, options, gigabytes):
    assert f"one GPU with {gigabytes} GB or more." in (ROOT / page).read_text()
    text = report(config, *options, f"--target_gpu={gigabytes}")
    assert f" of {gigabytes:.2f} GB" in text and "too much" not in text


def test_each_preset_fits_its_card_and_says_by_how_much():
    presets = sorted((ROOT / "config" / "presets").glob("*.py"))
    assert [p.stem for p in presets] == ["16gb", "24gb", "32gb"]
    older = {"16": ["T4", "V100"], "32": ["V100-32"]}
    for preset in presets:
        card, planned = re.search(r"--target_gpu=(\S+) estimates ([\d.]+) GB", preset.read_text()).groups()
        for name in (card, *older.get(card, [])):
            told = report(XL[0], f"config/presets/{preset.name}", f"--target_gpu={name}")
            size = SIZE.search(told)
            more = float(size[1]) - float(planned)  # older cards don't compile, so loss and activations take more
            assert not size[3] and (0.1 < more < 2 if name != card else more == 0), (preset, name, size[1])
            assert ("float16, ZeRO" if name != card else "bfloat16, ZeRO") in told, told


def test_compact_state_takes_what_was_measured():
    """18.7 GB on an H200. The dry run adds CUDA's part, which PyTorch doesn't count."""
    measured = json.loads((ROOT / "results" / "h200_x1_compact.json").read_text(encoding="utf-8"))["runs"]
    for split, state in itertools.product(("8x4", "4x8", "1x32"), ("fp32", "compact")):
        micro, accumulation = split.split("x")
        batch = (f"--batch_size={micro}", f"--gradient_accumulation_steps={accumulation}")
        text = report("config/xl_shakespeare.py", "config/presets/24gb.py", *batch, "--target_gpu=H200",
                      f"--compact_optimizer={state == 'compact'}")
        cuda = float(re.search(r"^ +([\d.]+) GB .*CUDA and NCCL$", text, re.M)[1])
        planned = float(SIZE.search(text)[1]) - cuda
        assert planned == pytest.approx(measured[split][state]["peak_gb"], rel=0.07), (split, state)


@pytest.mark.parametrize("changes, expected", [
    ({}, 448),  # of a block 11 x 1,024 x 1,600 values of 2 bytes, and 1,024 x 50,304 logits of 8 bytes
    ({"gradient_checkpointing": True}, 448), ({"cuda_graph": False}, 0),
    ({"execution": Execution("cuda", "float16", True, 80e9)}, 0),  # its loss scale changes
    ({"execution": Execution("cuda", "bfloat16", False, 80e9)}, 0),
    ({"ds_config": {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}}, 0)], ids=str)
def test_an_evaluation_comes_on_top_of_a_cuda_graph_alone(changes, expected):
    """GPT-2 XL on one GPU, in MB. Without a graph, evaluations take the room that a micro-step leaves."""
    run = MemoryInputs(GPTConfig(n_layer=48, n_head=25, n_embd=1600), Execution("cuda", "bfloat16", True, 80e9),
                       BatchSizes(1, 32, 1, 1024), ParamCount(1_557_611_200, 1_557_686_400, 1_557_686_400),
                       {"zero_optimization": {"stage": 2}})
    run = replace(run, **changes)
    assert (bytes_with_eval(run) - gpu_bytes(run)) / 1e6 == pytest.approx(expected, abs=1)
    # What an evaluation holds at one time fits into what a micro-step does
    at_once = 11 * 1024 * 1600 * 2 + 1024 * 50304 * 8
    parts = estimate(run)
    assert at_once < parts["activations"] + parts["loss"]


def test_the_largest_batch_that_fits_and_divides():
    """GPT-2 XL on one GPU: 28 GB, and what each sequence adds."""
    config = {"zero_optimization": {"stage": 2}}
    def job(memory, sequences=32):
        return MemoryInputs(GPTConfig(n_layer=48, n_head=25, n_embd=1600), Execution("cuda", "bfloat16", True, memory),
                   BatchSizes(1, sequences, 1, 1024), ParamCount(1_557_611_200, 1_557_686_400, 1_557_686_400), config)

    def size(micro, sequences=32):
        return next(bytes_with_eval(split) for split in job(0, sequences).splits() if split.batch.micro == micro)

    size_1, size_2 = size(1), size(2)
    for sequences in (32, 30):
        for micro in (d for d in range(1, sequences + 1) if sequences % d == 0):
            batch = fit_batch(job((size(micro, sequences) + 1e6) / 0.9, sequences))
            assert (batch.micro, batch.micro * batch.accumulation) == (micro, sequences)
    assert fit_batch(job(size_1 / 2)).micro == 1 and size_2 > size_1
    assert len(job(0, 10**10).splits()) == 121  # at once, for a batch_size with zeros too many
