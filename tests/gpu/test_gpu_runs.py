"""Whole runs of train_deepspeed.py on GPUs: resuming, dropout, saving in the background, float16, out of memory.

All runs that the selected tests need are started together: each takes seconds to start and uses little of a GPU."""

import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, launch, planted, read_history
from torch.utils._pytree import tree_leaves

# With several pytest workers, one has to take all of these: each one would start all runs again.
# Run those with --dist=loadgroup
pytestmark = pytest.mark.xdist_group("runs")

SMALL = ("--init_from=scratch", "--n_layer=2", "--n_head=2", "--n_embd=64", "--block_size=64", "--batch_size=4",
         "--gradient_accumulation_steps=2", "--learning_rate=1e-3", "--warmup_iters=2", "--max_iters=8",
         "--eval_interval=4", "--eval_iters=2", "--keep_last=10")
DETERMINISTIC = ("--deterministic=True", "--compile=True")
OFFLOAD = "--deepspeed_config=config/ds/zero2_offload.json"
FP16 = {"zero_optimization": {"stage": 2}, "fp16": {"initial_scale_power": 24, "loss_scale_window": 3, "hysteresis": 1}}
# For a GPU of 5 GB: this run takes 6.4 GB by the plan, and 4.0 with half of its micro-batch
LARGE = ("--init_from=scratch", "--n_layer=12", "--n_head=12", "--n_embd=768", "--block_size=1024", "--batch_size=16",
         "--gradient_accumulation_steps=1", "--max_iters=3", "--eval_iters=1", "--keep_last=0")
SUGGESTION = r"^ +[\d.]+ GB +[\d.]+x  (--batch_size=.+)$"
SMALL_CARD = """import torch
torch.cuda.set_per_process_memory_fraction(5.0e9 / torch.cuda.get_device_properties(0).total_memory)
"""
# A V100 as far as PyTorch's answers go, under a PyTorch 2.7, whose matmuls can't return float32
V100 = """import torch
torch.cuda.get_device_capability = lambda *_: (7, 0)
torch._C._cuda_getArchFlags = lambda: "sm_70"
from runtime import loss
loss.ADDMM_OUT_DTYPE = False
"""
# A checkpoint is written three seconds after its tensors were copied
SLOW_DISK = """import time
from runtime.checkpoint.saver import Saver
write = Saver._write_and_commit
def slow(self, *args):
    print(f"staging buffer pinned: {self.staging.pinned}", flush=True)
    time.sleep(3)
    return write(self, *args)
Saver._write_and_commit = slow
"""


def needs(*names):
    def mark(test):
        test.needs = names
        return test

    return mark


class Runs:
    """The runs by name. Each is a method that returns the finished process with its out_dir, history and steps."""

    def __init__(self, folder, data, ranks):
        self.folder, self.data, self.ranks = folder, data, ranks

    def start(self, names):
        """Begin these runs. One that continues another comes after it."""
        self.pool, self.futures = ThreadPoolExecutor(16), {}
        for name in names:
            self.futures[name] = self.pool.submit(getattr(self, name))

    def __getitem__(self, name):
        run = self.futures[name].result()
        assert run.returncode == 0 or name == "no_memory", run.stdout[-3000:] + run.stderr[-3000:]
        return run

    def train(self, name, *args, plant="", settings=SMALL):
        out_dir = self.folder / name / "out"
        out_dir.parent.mkdir(exist_ok=True)
        script = planted(out_dir.parent, plant) if plant else ROOT / "train_deepspeed.py"
        done = launch(script, *settings, f"--dataset={self.data}", f"--out_dir={out_dir}", *args, ranks=self.ranks,
                      launcher="python" if self.ranks == 1 else "launch_deepspeed.py")
        history = read_history(out_dir)
        return SimpleNamespace(
            returncode=done.returncode, stdout=done.stdout, stderr=done.stderr, out_dir=out_dir, history=history,
            steps={r["iter"]: (r["loss"], r["grad_norm"]) for r in history if "loss" in r})

    def resumed(self, name, *args):
        before = self[name].out_dir
        shutil.copytree(before, self.folder / f"{name}_resumed" / "out")
        return self.train(f"{name}_resumed", *args, "--init_from=resume", "--resume_tag=iter_4", "--overwrite=True")

    def whole(self):
        return self.train("whole", *DETERMINISTIC, "--async_save=False")

    def whole_resumed(self):
        return self.resumed("whole", *DETERMINISTIC)

    def offload(self):
        return self.train("offload", *DETERMINISTIC, OFFLOAD)

    def offload_resumed(self):
        return self.resumed("offload", *DETERMINISTIC, OFFLOAD)

    def dropout(self):
        return self.train("dropout", *DETERMINISTIC, "--dropout=0.2")

    def dropout_resumed(self):
        return self.resumed("dropout", *DETERMINISTIC, "--dropout=0.2")

    def background(self):
        return self.train("background", *DETERMINISTIC, "--async_save=True", plant=SLOW_DISK)

    def float16(self, name="float16", *args, plant=""):
        config = self.folder / f"{name}.json"
        config.write_text(json.dumps(FP16))
        return self.train(name, "--dtype=float16", f"--deepspeed_config={config}", "--max_iters=30", *args, plant=plant)

    def v100(self):
        return self.float16("v100", "--dtype=auto", plant=V100)

    def no_memory(self):
        return self.train("no_memory", settings=LARGE, plant=SMALL_CARD)

    def suggested(self):
        """Run the first settings that no_memory suggests."""
        first = re.search(SUGGESTION, self["no_memory"].stderr, re.M)[1]
        return self.train("suggested", settings=[*LARGE, *first.split()], plant=SMALL_CARD)


@pytest.fixture(scope="module")
def every(request, characters, tmp_path_factory):
    """Start all runs; returns {ranks: Runs}."""
    found = {ranks: Runs(tmp_path_factory.mktemp("runs"), characters, ranks)
             for ranks in (1, 2) if ranks <= torch.cuda.device_count()}
    for ranks, runs in found.items():
        chosen = [item for item in request.session.items if "runs" in getattr(item, "fixturenames", ())
                  and item.callspec.params["runs"] == ranks]
        runs.start(dict.fromkeys(name for item in chosen for name in item.function.needs))
    yield found
    for runs in found.values():
        runs.pool.shutdown()


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def runs(request, every):
    if request.param not in every:
        # NCCL takes one GPU per rank. With one GPU the same cases run on one rank
        pytest.skip(f"needs {request.param} GPUs")
    return every[request.param]


one_rank = pytest.mark.parametrize("runs", [1], indirect=True, ids=["1 rank"])


def all_tensors(out_dir, tag):
    """Return every tensor of a checkpoint's files, in their order."""
    files = sorted((out_dir / tag).glob("*.pt"))
    assert files
    content = [torch.load(file, map_location="cpu", weights_only=False) for file in files]
    return [leaf for leaf in tree_leaves(content) if torch.is_tensor(leaf)]


def assert_equal_checkpoints(a, b, tag):
    mine, theirs = (all_tensors(run.out_dir, tag) for run in (a, b))
    assert len(mine) == len(theirs) > 28
    assert all(torch.equal(x, y) for x, y in zip(mine, theirs)), tag


@needs("whole", "whole_resumed", "offload", "offload_resumed")
@pytest.mark.parametrize("name", ["whole", "offload"])
def test_a_resumed_run_is_the_same_to_the_last_bit(runs, name):
    """With offload by DeepSpeed's CPU Adam, which must compute the powers of beta anew."""
    whole, resumed = runs[name], runs[f"{name}_resumed"]
    assert list(whole.steps) == [1, 2, 3, 4, 5, 6, 7, 8] and "compiled" in whole.stdout
    assert re.findall(r"^iter (\d):", resumed.stdout, re.M) == ["5", "6", "7", "8"]
    assert resumed.steps == whole.steps
    assert_equal_checkpoints(resumed, whole, "iter_8")


@needs("whole", "offload")
def test_offload_trains_as_the_gpu_does(runs):
    losses, offloaded = ([loss for loss, _ in runs[name].steps.values()] for name in ("whole", "offload"))
    assert offloaded == pytest.approx(losses, rel=1e-4)


@needs("dropout", "dropout_resumed", "whole")
def test_dropout_repeats_after_a_resume(runs):
    whole, resumed = runs["dropout"], runs["dropout_resumed"]
    assert len(whole.steps) == 8 and whole.steps != runs["whole"].steps
    assert re.findall(r"^iter (\d):", resumed.stdout, re.M) == ["5", "6", "7", "8"]
    assert resumed.steps == whole.steps
    assert_equal_checkpoints(resumed, whole, "iter_8")


@needs("whole", "background")
def test_a_checkpoint_saved_in_the_background_is_that_of_its_step(runs):
    """Steps 5 to 8 are made while iter_4 waits to be written, and it holds what a run has that waits for its save."""
    waited, run = runs["whole"], runs["background"]
    order = re.findall(r"^(iter \d|saved iter_\d)", run.stdout, re.M)
    assert order.index("iter 8") < order.index("saved iter_4") < order.index("saved iter_8")
    assert re.findall(r"staging buffer pinned: (True|False)", run.stdout) == ["True"] * 2 * runs.ranks
    assert run.steps == waited.steps
    for tag in ("iter_4", "iter_8"):
        assert_equal_checkpoints(run, waited, tag)


@one_rank
@needs("float16", "v100")
@pytest.mark.parametrize("name", ["float16", "v100"])
def test_float16_survives_overflows_and_grows_its_scale(runs, name):
    """Each overflow halves the scale and is reported. The 4th good step in a row doubles it, then each third one."""
    run = runs[name]
    steps = [r for r in run.history if "loss_scale" in r]
    skipped = [r["iter"] for r in run.history if "float16 gradient overflow: step skipped" in r.get("warning", "")]
    scale, good = 2.0**24, 0
    for record in steps:
        good = 0 if record["iter"] in skipped else good + 1
        scale *= 0.5 if not good else 2 if good % 3 == 1 < good else 1
        assert record["loss_scale"] == scale, record
    assert len(steps) == 30 and len(skipped) >= 4 and max(r["loss_scale"] for r in steps[20:]) > min(
        r["loss_scale"] for r in steps[:20])
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.3


@one_rank
@needs("float16", "v100")
def test_a_v100_trains_in_fp16_without_our_kernels(runs):
    """--dtype=auto and --compile=auto choose its path, whose last loss is that of compiled blocks."""
    run, compiled = runs["v100"], runs["float16"]
    assert "float16, ZeRO-2" in run.stdout and ", compiled" in compiled.stdout and ", compiled" not in run.stdout
    assert "note       not compiled: compile=auto needs compute capability 8.0" in run.stdout
    assert run.steps[30][0] == pytest.approx(compiled.steps[30][0], rel=0.05)


@one_rank
@needs("no_memory", "suggested")
def test_out_of_memory_ends_in_settings_that_fit(runs):
    """As on a GPU of which another process uses the rest. The first settings suggested fit."""
    run = runs["no_memory"]
    assert run.returncode == 2 and "Traceback" not in run.stderr, run.stdout + run.stderr
    lines = run.stderr.splitlines()
    (first,) = [i for i, line in enumerate(lines) if re.fullmatch(
        r"out of memory: the estimate was \d+\.\d\d GB per GPU\. Check nvidia-smi for other processes\.", line)]
    assert lines[first + 1].startswith("It doesn't fit. Add one of these to your command")
    assert "--batch_size=8" in re.fullmatch(SUGGESTION, lines[first + 2])[1]
    assert list(runs["suggested"].steps) == [1, 2, 3]
