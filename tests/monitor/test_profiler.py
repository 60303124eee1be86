"""profile=True, and what DeepSpeed measures itself: files that their readers open, and numbers that agree."""

import gzip
import json
import re

from conftest import done, stage

from model import GPT, GPTConfig
from runtime.monitor.profiler import count_flops

MEASURED = {"zero_optimization": {"stage": 2}, "wall_clock_breakdown": True}


def test_our_flops_are_deepspeeds_to_5_percent(tmp_path):
    """The count leaves the model as it was."""
    model = GPT(GPTConfig(n_layer=6, n_head=6, n_embd=384, block_size=256, vocab_size=65))
    counted = count_flops(model, tmp_path / "flops.txt")
    assert abs(counted / (model.flops_per_token() / 3) - 1) < 0.05 and model.training
    assert "(c_attn): QKVLinear(" in (tmp_path / "flops.txt").read_text()
    assert not any(module._forward_hooks or hasattr(module, "__flops__") for module in model.modules())


def test_a_profile_is_written_and_changes_no_loss(train):
    settings = (stage(3), "--max_iters=8", "--dropout=0.1", "--keep_last=0")
    plain, run = train(*settings, ranks=2), done(train(*settings, "--profile=True", ranks=2))
    assert run.losses == plain.losses and run.evals == plain.evals and len(run.losses) == 8
    for rank in range(2):
        with gzip.open(run.out_dir / "profile" / f"trace_rank{rank}.json.gz", "rt") as f:
            names = {event["name"] for event in json.load(f)["traceEvents"]}
        assert {name for name in names if name.startswith("ProfilerStep")} == {"ProfilerStep#5", "ProfilerStep#6"}
        assert "aten::scaled_dot_product_attention" in names or "aten::addmm" in names
    flops, operations = ((run.out_dir / "profile" / name).read_text() for name in ("flops.txt", "operations.txt"))
    assert "DeepSpeed Flops Profiler" in flops and "(mlp): MLP(" in flops and " FLOPs per token in a " in run.stdout
    assert "Self CPU time total" in operations


def test_deepspeeds_times_are_shown(train, tmp_path):
    (tmp_path / "measured.json").write_text(json.dumps(MEASURED))
    run = done(train("--dtype=bfloat16", "--max_iters=3", f"--deepspeed_config={tmp_path}/measured.json", ranks=2))
    assert len(re.findall(r"fwd_microstep: [0-9.]+ \| bwd_microstep: [0-9.]+", run.stdout + run.stderr)) == 6


def test_of_iterations_that_are_not_reached_nothing_is_written_over_what_is_there(train):
    """Going on, a run makes two iterations more, and the trace would need seven."""
    args = ("--profile=True", "--eval_interval=100")
    run = train(*args, "--max_iters=7")
    before = {path.name: path.read_bytes() for path in (run.out_dir / "profile").iterdir() if "flops" not in path.name}
    on = train(*args, "--max_iters=9", "--init_from=resume", out_dir=run.out_dir)
    assert on.returncode == 0 and "wrote a trace" not in on.stdout
    assert "profile=True wrote no trace: this run made 2 steps, and the trace is of steps 6 to 7" in on.stdout
    assert "wrote no trace" not in run.stdout
    assert sorted(before) == ["operations.txt", "trace_rank0.json.gz"]
    assert {name: (run.out_dir / "profile" / name).read_bytes() for name in before} == before
