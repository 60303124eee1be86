"""bench.py on a tiny model: it measures a real run, and its figures agree with each other."""

import json
import signal

import psutil
import pytest
from conftest import ROOT, SMALL, STAGES, ForkedJob, done, kill, launch, wait_until


def bench(out, *args):
    run = done(launch(ROOT / "bench.py", *args, f"--json={out}"))
    return json.loads(out.read_text()), run.stdout


@pytest.mark.long
@pytest.mark.parametrize(("baseline", "name"), [
    ("hf", "transformers"), ("hf_compiled", "transformers"), ("fsdp2", "FSDP2")])
def test_train_and_a_baseline(characters, tmp_path, baseline, name):
    """Plain PyTorch's baselines start from our weights, so their losses are ours at each step."""
    record, output = bench(tmp_path / "train.json", "--gpus=2", f"--baseline={baseline}", "--repeats=5",
                           *SMALL, f"--dataset={characters}", f"--deepspeed_config={STAGES[1]}", "--decay_lr=False",
                           "--learning_rate=1e-2", "--grad_clip=0.3", "--warmup=2", "--gradient_accumulation_steps=3",
                           "--seed=5")
    assert record["stage"] == 2  # the stage that runs
    ms = [r["ms"] for r in record["history"][2:]]
    assert record["ms"] == {"median": sorted(ms)[2], "min": min(ms), "max": max(ms), "count": 5}
    assert record["tokens_per_s"] == pytest.approx(2 * 2 * 3 * 32 / (record["ms"]["median"] / 1000))
    other = record["baseline"]
    assert other["ratio"] == other["ms"]["median"] / record["ms"]["median"] and record["world_size"] == 2
    assert output.count("\nwritten to ") == 2  # before the baseline, and after it
    assert other["ms"]["count"] == 5 and len(other["losses"]) == 7
    assert f"bench.py --gpus=2 --baseline={baseline}" in record["command"]
    assert f"\n{other['name']}: {other['ms']['median']:,.1f} ms per step, {other['ratio']:.2f} times ours\n" in output
    assert output.startswith(f"{record['ms']['median']:,.1f} ms per step, {record['tokens_per_s']:,.0f} tokens/s, MFU "
                             f"n/a, peak {record['peak_gb']:.1f} GB, ")
    assert other["name"].startswith(name) and ("compile" in other["name"]) == (baseline == "hf_compiled")
    losses = [r["loss"] for r in record["history"]]
    assert losses[-1] < losses[0] - 0.3
    assert min(r["grad_norm"] for r in record["history"]) > 0.3  # each is clipped
    if baseline == "fsdp2":
        assert other["losses"] == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize(("args", "sentence"), [
    (["--batch=8"], "there is no setting 'batch': did you mean 'batch_size'?"),
    (["--baseline=pytorch", "--lora_rank=4", "--init_from=gpt2"], "--baseline=pytorch trains all weights with AdamW: "),
    (["--baseline=hf", "--init_from=scratch", "--optimizer=muon"], "--baseline=hf trains all weights with AdamW: "),
    (["--baseline=hf", "--init_from=scratch", "--batch_ramp=8@0, 16@0.5"], "bench.py measures steps of one size: "),
    (["--target_gpu=4090", "--dry_run=True"], "bench.py measures on this machine: drop --dry_run and "),
    (["--json=docs"], "--json=docs can't be written: "), (["--repeats=0"], "--repeats must be at least 1")])
def test_mistakes_are_one_line(args, sentence):
    run = launch(ROOT / "bench.py", *args)
    assert run.returncode == 2 and sentence in run.stderr and "Traceback" not in run.stderr


def test_ctrl_c_also_ends_ranks_that_have_not_joined(tmp_path):
    rank, script, pid = tmp_path / "rank.py", tmp_path / "script.py", tmp_path / "pid"
    rank.write_text(f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(600)")
    script.write_text(f"import argparse, sys; sys.path.insert(0, {str(ROOT)!r}); import bench\n"
                      f"bench.run_ranks(argparse.Namespace(gpus=1), 'none', {str(rank)!r})\n")
    job = ForkedJob([script], 1, tmp_path / "log", tmp_path / "log")
    try:
        assert wait_until(lambda: pid.exists() and pid.read_text()), (tmp_path / "log").read_text()
        job.send_signal(signal.SIGINT)
        assert job.wait() and wait_until(lambda: not psutil.pid_exists(int(pid.read_text())))
    finally:
        kill(job)
        if psutil.pid_exists(int(pid.read_text())):
            psutil.Process(int(pid.read_text())).kill()
