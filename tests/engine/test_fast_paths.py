"""Which fast paths a run takes, and the reason of each that it doesn't: decided by proofs, and printed."""

import pytest
import torch
from conftest import ROOT, SMALL, STAGES, done
from edited_model import GRAPHS, edited_model

from configurator import settings_of_script
from model import GPT, GPTConfig
from runtime import lora
from runtime.cluster.ranks import Ranks
from runtime.engine.fast_paths import Choice, ModelFacts, decide, describe, inspect_model
from runtime.engine.zero3_blocks import blocks_to_gather
from runtime.hardware import Execution
from runtime.plan.memory import gpu_bytes
from runtime.plan.report import summary
from runtime.plan.run_plan import Problems, make_plan

GPU = Execution("cuda", "bfloat16", True, 80 * 10**9)
CPU = Execution("cpu", "float32", False, 8 * 10**9)
ZERO2 = {"zero_optimization": {"stage": 2}}
ZERO3 = {"zero_optimization": {"stage": 3}}
OFFLOAD2 = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
OFFLOAD3 = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
SHAPE = GPTConfig(block_size=16, vocab_size=61, n_layer=2, n_head=2, n_embd=32)


def taken(*args, **options):
    """The names of the paths that decide() takes."""
    paths = decide(*args, **options)
    return {name for name in vars(paths) if getattr(paths, name).taken}


@pytest.fixture(autouse=True)
def with_triton(monkeypatch):
    """Decide as on a GPU machine, also where Triton isn't installed."""
    monkeypatch.setattr("runtime.engine.fast_paths.triton", "installed")


@pytest.mark.parametrize("execution, config, ranks, expected", [
    (GPU, ZERO2, 1, {"gradients", "kernels", "chain", "copies", "step", "graph"}),
    (GPU, ZERO2, 2, {"gradients", "kernels", "chain", "copies", "step", "graph", "local"}),
    (GPU, ZERO3, 2, {"gradients", "kernels", "chain", "by_block", "step", "graph", "local"}),
    (GPU, ZERO3, 1, {"gradients", "kernels", "chain", "step", "graph"}),
    (GPU, OFFLOAD2, 1, {"gradients", "kernels", "chain", "copies", "graph"}),
    (GPU, OFFLOAD3, 2, {"kernels", "chain"}),
    (Execution("cuda", "float16", True, 0), ZERO2, 1, {"gradients", "kernels", "chain"}),
    (CPU, ZERO2, 2, {"gradients", "local"}),
])
def test_what_an_unedited_model_takes(execution, config, ranks, expected):
    facts = inspect_model(GPT(SHAPE))
    assert facts == ModelFacts()
    assert taken(facts, execution, config, world_size=ranks, accumulate_locally=True) == expected


def test_each_edit_loses_the_paths_that_it_breaks():
    """On two GPUs at ZeRO-3, with a reason for each."""
    facts = ModelFacts(no_kernels="K", no_blocks="B", varies="V")
    paths = decide(facts, GPU, ZERO3, world_size=2)
    assert paths.kernels == Choice(False, "K") and paths.by_block == Choice(False, "B")
    assert not paths.graph.taken and paths.graph.reason.startswith("V, so a micro-step may depend on the data")
    assert paths.gradients.taken and paths.step.taken
    assert decide(facts, GPU, ZERO3, world_size=2, cuda_graph=True).graph.taken

    # ZeRO-3 that gathers all weights at once isn't captured, unless somebody asks for it
    at_once = ModelFacts(no_blocks="B")
    assert not decide(at_once, GPU, ZERO3, world_size=2).graph.taken
    assert decide(at_once, GPU, ZERO3, world_size=2, cuda_graph=True).graph.taken
    assert decide(at_once, GPU, ZERO3, world_size=1).graph.taken
    assert decide(at_once, GPU, ZERO2, world_size=2).graph.taken
    lines = describe(paths)
    assert lines[0] == "fast gradients and step, one-kernel AdamW"
    assert "no ZeRO-3 by block: B" in lines and "no fused blocks: K" in lines


@pytest.mark.parametrize("graph, reason", [
    ("blocks twice", "GPT.forward in use is not the original one of model.py"),
    ("a block never", "GPT.forward in use is not the original one of model.py"),
    ("blocks shared in pairs", "blocks share a module"),
    ("one MLP", "blocks share a module"),
    ("a matrix in odd blocks", "the blocks have different parameters"),
])
def test_blocks_that_cannot_be_gathered_one_by_one(tmp_path, graph, reason):
    module = edited_model(tmp_path, GRAPHS[graph])
    blocks, why = blocks_to_gather(module.GPT(module.GPTConfig(**vars(SHAPE) | {"n_layer": 4})))
    assert blocks == [] and why == reason


def test_shared_parameters_and_lora():
    model = GPT(SHAPE)
    assert len(blocks_to_gather(model)[0]) == 2
    model.transformer.h[0].mlp.c_fc.weight = model.transformer.h[1].mlp.c_fc.weight
    assert blocks_to_gather(model) == ([], "blocks share a parameter")
    model = GPT(SHAPE)
    model.extra = torch.nn.Linear(32, 32)
    model.extra.weight = model.transformer.h[1].attn.c_proj.weight
    assert blocks_to_gather(model) == ([], "a parameter of a block is used outside of it")
    model = GPT(SHAPE)
    lora.apply(model, {"rank": 2, "alpha": 2.0, "dropout": 0.1, "target_modules": ["attn.c_attn"]})
    assert len(blocks_to_gather(model)[0]) == 2
    assert inspect_model(model).no_kernels == "some parameters are frozen"
    model.forward = lambda *args: None
    assert blocks_to_gather(model) == ([], "the forward of a GPT was replaced")


def test_the_summary_and_the_dry_run_say_it(train):
    run = done(train("--dry_run=True"))
    assert "paths      fast gradients and step\n" in run.stdout
    assert "           no fused blocks, no one-kernel AdamW, no CUDA graph: on a CPU\n" in run.stdout
    run = done(train("--dry_run=True", "--deepspeed_config=config/ds/zero3_offload.json"))
    assert "paths      none\n" in run.stdout
    reason = "ZeRO-3 with offload, or a key of the JSON, takes DeepSpeed's own path"
    assert f"no fast gradients and step: {reason}" in run.stdout


@pytest.mark.parametrize("arguments, reason", [
    (["--gradient_accumulation_steps=1"], "one micro-step per step"),
    (["--accumulate_locally=False"], "accumulate_locally=False"),
    (["--deepspeed_config=config/ds/zero3_offload.json"],
     "ZeRO-3 with offload, or a key of the JSON, takes DeepSpeed's own path"),
    (["config/train_gpt2_xl.py", "--target_gpu=32"],
     "with 6.23 GB of float32 gradients on each rank, less than a fifth of the memory would stay free"),
    (["config/train_gpt2_xl.py", "--target_gpu=32", "--accumulate_locally=True"], None)])
def test_the_plan_says_why_there_is_no_local_accumulation(characters, arguments, reason):
    """On two ranks."""
    argv = [*SMALL[:9], f"--dataset={characters}", "--dry_run=True"]
    if "--target_gpu=32" in arguments:
        argv = ["--dry_run=True"]
    settings = settings_of_script(str(ROOT / "train_deepspeed.py"), [*argv, *arguments])
    problems = Problems()
    plan = make_plan(settings, Ranks(0, 0, 2, 2), problems, [])
    assert not problems
    local = plan.paths.local
    assert local == (Choice(True) if reason is None else Choice(False, reason))
    if reason:
        assert any("local accumulation" in line and line.endswith(f": {reason}") for line in describe(plan.paths))


def test_the_plan_of_a_length_ramp_has_a_graph_and_as_much_memory(characters):
    argv = ["config/train_gpt2.py", "--dry_run=True", "--target_gpu=H200"]
    found = {}
    for name, options in {"none": [], "grows": ["--length_ramp=256@0, 1024@0.4"],
                          "one": ["--length_ramp=1024@0"]}.items():
        settings = settings_of_script(str(ROOT / "train_deepspeed.py"), [*argv, *options])
        problems = Problems()
        plan = make_plan(settings, Ranks(0, 0, 8, 8), problems, [])
        assert not problems
        found[name] = plan
    for plan in found.values():
        assert plan.paths.graph.taken
    assert gpu_bytes(found["grows"]) == gpu_bytes(found["none"])  # a step keeps its tokens
    assert "time " in summary(found["none"]) and "time " not in summary(found["grows"])


def test_a_model_that_the_script_changes_is_looked_at_again(train):
    plant = """
from runtime import lora
import model
class Other(model.GPT):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)
build = model.GPT.crop_block_size
def crop(self, size):
    build(self, size)
    self.__class__ = Other
model.GPT.crop_block_size = crop
"""
    run = done(train("--max_iters=1", f"--deepspeed_config={STAGES[3]}", ranks=2, plant=plant))
    told = "no ZeRO-3 by block: Other.forward in use is not the original one of model.py"
    assert f"note       the model is not as planned: {told}" in run.stdout
