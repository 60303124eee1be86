"""docs/pretrain.md: its commands, each with options that make it small, and its hours."""

import json
import os
import re
import shlex
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT, SMALL, done, launch
from test_readme import blocks, read

import configurator

PAGE = ROOT / "docs" / "pretrain.md"


@pytest.mark.long
def test_index_the_commands_lead_from_shards_to_a_sample_and_a_resume(tmp_path):
    for name, size in ("fineweb10B/fineweb_val_000000.bin", 1000), ("fineweb10B/fineweb_train_000001.bin", 5000):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        tokens = np.random.default_rng(0).integers(0, 50257, size).astype("<u2")
        (tmp_path / name).write_bytes(np.array([20240520, 1, size, *[0] * 253], "<i4").tobytes() + tokens.tobytes())
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "README.md").write_text("---\nconfigs:\n- config_name: sample-10BT\n  data_files: a.jsonl\n---")
    (tmp_path / "hub" / "a.jsonl").write_text('{"text": "a text"}\n' * 300)
    one, eight, xl, recipe = (f"--out_dir={tmp_path / name}" for name in ("one", "eight", "xl", "recipe"))
    small = [option for option in (*SMALL, f"--dataset={tmp_path / 'data'}") if not re.match("--(init|learn)", option)]
    added = [["--name=./data"], ["--dataset=hub", "--name=./edu"], [*small, one], [*small, eight], [*small, xl],
             [one, "--num_samples=1", "--max_new_tokens=5", "--device=cpu"], [one, f"--to={tmp_path / 'hf'}"],
             [*small, recipe],
             [one, f"--dataset={tmp_path / 'data'}"],
             [*small, eight, "--resume_tag=iter_2"]]
    commands, printed = [words for words in map(shlex.split, blocks(PAGE)) if words[0] == "python"], []
    for words, options in zip(commands, added, strict=True):
        place, ranks = 1, 1
        if words[1] == "launch_deepspeed.py":
            place, ranks = 3, int(words[2].removeprefix("--nproc_per_node="))
        script, arguments = ROOT / words[place], [*words[place + 1:], *options]
        if script.parent == ROOT:
            run = launch(script, *arguments, ranks=ranks)
        else:  # its paths are relative
            run = subprocess.run([sys.executable, script, *arguments], cwd=tmp_path, capture_output=True, text=True,
                                 env={**os.environ, "HF_HOME": str(tmp_path / "cache")})
        printed.append(done(run).stdout)
    shards, hub, *trained, sampled, exported, of_recipe, evaluated, resumed = printed
    assert "train: 5,000 tokens" in shards and "train: 300 tokens, val: 600 tokens" in hub
    for text, ranks in zip((*trained, of_recipe, resumed), (1, 8, 8, 8, 8)):
        assert f"{ranks} x CPU" in text and "step 4: train loss 10.8" in text  # ln(50257)
    assert "iteration 2" in resumed and "lr 5.39e-06" in resumed  # 1.8e-3, in the third of 1,000 steps of warmup
    assert "adamw (learning rate 0.0006)" in of_recipe and "lr 3.42e-06" in of_recipe  # in the fourth of 700 steps
    assert "loss 10.8" in evaluated
    assert "The meaning of life is" in sampled and "logits for 32 tokens differ" in exported


def test_the_job_and_the_hours():
    """The hours are tokens divided by the measured speed."""
    jobs = [words for words in map(shlex.split, blocks(PAGE)) if words[0] == "sbatch"]
    datasets = []
    for words in jobs:
        arguments = words[words.index("examples/slurm/train_xl.sbatch") + 1 :]
        settings = configurator.settings_of_script(str(ROOT / "train_deepspeed.py"), arguments)
        datasets.append(settings.dataset)
    assert datasets == ["fineweb100B", "fineweb10B"]
    page, measured = read(PAGE), {"124M": ("small_muon_60x1", 480), "XL": ("8x4", 512)}
    rows = re.findall(r"^\| (124M|XL) \| ([\d,]+).* \| ([\d.]+) billion \| ([\d.]+) h \| ([\d.]+) h \|$", page, re.M)
    assert len(rows) == 2
    for model, steps, *shown in rows:
        name, sequences = measured[model]
        speed = json.loads((ROOT / "results" / f"h200_x1_bench_{name}.json").read_text())["tokens_per_s"]
        tokens = int(steps.replace(",", "")) * sequences * 1024
        assert shown == [f"{value:.1f}" for value in (tokens / 1e9, tokens / speed / 3600, tokens / speed / 3600 / 8)]
        assert f"{speed:,.0f}" in page
