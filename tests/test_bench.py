"""bench.py at toy size: real runs of both sides, whose figures agree with one another."""

import json

import pytest
from conftest import ROOT, SMALL, launch


def bench(out, *args):
    run = launch(ROOT / "bench.py", *args, f"--json={out}", launcher="python")
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(out.read_text()), run.stdout


@pytest.mark.parametrize(("peer", "name"), [("hf", "transformers"), ("plain", "PyTorch alone")])
def test_train_beside_a_peer(characters, tmp_path, peer, name):
    found, words = bench(tmp_path / "train.json", "train", "--gpus=2", f"--peer={peer}", "--repeats=5", *SMALL,
                         f"--dataset={characters}")
    ms = [r["ms"] for r in found["history"][4:]]
    assert found["ms"] == {"median": sorted(ms)[2], "least": min(ms), "most": max(ms), "count": 5}
    assert found["tokens_per_s"] == pytest.approx(2 * 2 * 2 * 32 / (found["ms"]["median"] / 1000))
    parts = found["parts_ms"]
    assert 0.3 * min(ms) < parts["forward"] + parts["backward"] + parts["optimizer"] < 1.1 * max(ms)
    assert 0 < parts["reduction"] < max(ms) and 0 <= parts["data"] < max(ms)
    assert found["peer"]["ratio"] == found["peer"]["ms"]["median"] / found["ms"]["median"] and found["world_size"] == 2
    assert f"bench.py train --gpus=2 --peer={peer}" in found["command"] and "times ours" in words
    assert found["peer"]["name"].startswith(name)
    assert 0.2 < found["host_gb"] < 16  # two processes with PyTorch and DeepSpeed


def test_sample_beside_transformers(tmp_path):
    found, words = bench(tmp_path / "sample.json", "sample", "--model=1,2,32", "--batch=2", "--tokens=20", "--peer=hf")
    assert found["tokens_per_s"]["count"] == 5 and 0 < found["share_of_limit"] < 1
    assert found["peer"]["ratio"] == found["tokens_per_s"]["median"] / found["peer"]["tokens_per_s"]["median"]
    assert "tokens/s" in words and found["first_token_ms"]["median"] > 0


def test_checkpoint_and_data(characters, tmp_path):
    found, _ = bench(tmp_path / "checkpoint.json", "checkpoint", *SMALL, f"--dataset={characters}")
    assert found["save_s"]["count"] == 5 and found["checked_s"] >= 0 and found["tag"].endswith(" MB")
    found, _ = bench(tmp_path / "data.json", "data", *SMALL, f"--dataset={characters}")
    assert found["tokens_a_step"] == 2 * 2 * 32 and found["ms"]["count"] == 5


def test_a_misspelt_setting_ends_before_anything_starts(tmp_path):
    run = launch(ROOT / "bench.py", "train", "--learing_rate=1", launcher="python")
    assert run.returncode == 2 and "did you mean 'learning_rate'" in run.stderr and "Traceback" not in run.stderr
