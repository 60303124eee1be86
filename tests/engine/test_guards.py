"""What a CUDA graph takes for fixed is watched: a training loop may change it. A capture that fails is one sentence."""

from types import SimpleNamespace

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig
from deepspeed.utils.timer import ThroughputTimer
from edited_model import edited_model
from torch import nn

from model import GPT, GPTConfig
from runtime.engine.forward_backward import (
    ForwardBackward,
    capture_error,
    without_throughput_timer,
)
from runtime.engine.guards import Guards
from runtime.errors import UserError

SHAPE = {"block_size": 16, "vocab_size": 61, "n_layer": 2, "n_head": 2, "n_embd": 32}
LOSS = [
    ("        return self.lm_head(x, targets, reduction)\n",
     "        self.norm = x.detach().norm()\n"
     "        return self.lm_head(x, targets, reduction) + WEIGHTS * self.aux_weight * x.square().mean()\n"),
    ("        self.gradient_checkpointing = False\n",
     "        self.gradient_checkpointing = False\n        self.aux_weight = 0.25\n"),
    ("class GPT(nn.Module):\n", "WEIGHTS = 1.0\n\n\nclass GPT(nn.Module):\n    scheduled = 1\n\n"
                               "    def is_scheduled(self):\n        return self.scheduled\n\n"),
]  # fmt: skip


def edited(tmp_path):
    module = edited_model(tmp_path, LOSS)
    return module, module.GPT(module.GPTConfig(**SHAPE))


CHANGES = {
    "model.aux_weight": lambda module, gpt: setattr(gpt, "aux_weight", 0.5),
    "transformer.drop.p": lambda module, gpt: setattr(gpt.transformer.drop, "p", 0.1),
    "transformer.h.1.ln_1.eps": lambda module, gpt: setattr(gpt.transformer.h[1].ln_1, "eps", 1e-6),
    "transformer.h.0.attn.n_head": lambda module, gpt: setattr(gpt.transformer.h[0].attn, "n_head", 4),
    "transformer.h.1.mlp.dropout.training": lambda module, gpt: gpt.transformer.h[1].mlp.dropout.eval(),
    "model.config.n_embd": lambda module, gpt: setattr(gpt.config, "n_embd", 64),
    "WEIGHTS": lambda module, gpt: setattr(module, "WEIGHTS", 2.0),
    "GPT.scheduled": lambda module, gpt: setattr(module.GPT, "scheduled", 2),
    "chunked_loss": lambda module, gpt: setattr(module, "chunked_loss", lambda *args: None),
    "transformer.h.0.mlp": lambda module, gpt: setattr(gpt.transformer.h[0], "mlp", nn.Linear(32, 32)),
    "the number of hooks": lambda module, gpt: gpt.lm_head.register_forward_hook(lambda *_: None),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_named(tmp_path, name):
    module, gpt = edited(tmp_path)
    guards = Guards(gpt)
    assert guards.changed() is None
    CHANGES[name](module, gpt)
    assert guards.changed() == name


def test_what_training_and_an_evaluation_change_is_no_change():
    gpt = GPT(GPTConfig(**SHAPE))
    guards = Guards(gpt)
    idx = torch.randint(61, (2, 16))
    gpt(idx, idx).backward()
    torch.optim.AdamW(gpt.parameters()).step()
    gpt.eval()
    gpt.generate(idx, 2)
    gpt.train()
    assert guards.changed() is None


def test_a_value_may_be_another_object_that_is_equal():
    gpt = GPT(GPTConfig(**SHAPE))
    guards = Guards(gpt)
    gpt.transformer.drop.p = float("0.0")
    assert guards.changed() is None
    gpt.transformer.drop.p = 0  # Python's int: code may tell it from a float
    assert guards.changed() == "transformer.drop.p"


def test_metrics_are_left_behind_and_not_watched(tmp_path):
    _, gpt = edited(tmp_path)
    idx = torch.randint(61, (2, 16))
    gpt(idx, idx)
    guards = Guards(gpt)
    gpt(idx, idx)  # the capture
    (owner, name, tensor), = guards.after_capture()
    assert owner is vars(gpt) and name == "norm" and tensor is gpt.norm
    gpt(idx, idx)  # an evaluation
    assert gpt.norm is not tensor and guards.changed() is None


def test_a_tensor_on_the_cpu_and_a_buffer_that_is_replaced(tmp_path):
    with torch.device("meta"):  # as on a GPU: not on the CPU
        _, gpt = edited(tmp_path)
    assert Guards(gpt).cpu_tensor() is None
    gpt.register_buffer("table", torch.ones(2, device="meta"))
    guards = Guards(gpt)
    assert guards.cpu_tensor() is None
    gpt.table = torch.zeros(2, device="meta")
    assert guards.changed() == "model.table"
    gpt.aux_weight = torch.tensor(0.5)
    assert Guards(gpt).cpu_tensor() == "model.aux_weight"


class FakeEngine:
    """What Launch needs of DeepSpeed's engine, without a GPU."""

    device = torch.device("cpu")

    def __init__(self, module):
        self.module = module
        self.eager = 0

    def __call__(self, *batch):
        self.eager += 1
        return self.module(*batch)

    def backward(self, loss):
        loss.backward()

    def zero_optimization_stage(self):
        return 2


class FakeGraph:
    """A graph whose replay computes nothing."""

    replays = 0
    was_reset = False

    def replay(self):
        self.replays += 1

    def reset(self):
        self.was_reset = True


@pytest.fixture
def capturing(tmp_path, monkeypatch):
    """(engine, ForwardBackward, graphs) of an edited model. graphs: FakeGraphs, in the order of their captures."""
    _, gpt = edited(tmp_path)
    gpt(*torch.randint(61, (2, 2, 16)))
    engine = FakeEngine(gpt)
    micro_step = ForwardBackward(engine, True, is_local=True)
    graphs = []

    def make_graph(batch):
        micro_step.inputs = [t.clone() for t in batch]
        micro_step.loss = micro_step.run_eagerly(*micro_step.inputs)
        micro_step.graph = FakeGraph()
        graphs.append(micro_step.graph)
        micro_step.left = micro_step.guards.after_capture()

    monkeypatch.setattr(micro_step, "make_graph", make_graph)
    monkeypatch.setattr(Guards, "cpu_tensor", lambda self: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return engine, micro_step, graphs


def test_a_changed_attribute_drops_the_graph_with_one_note(capturing, capsys):
    engine, micro_step, graphs = capturing
    gpt = engine.module
    batch = torch.randint(61, (2, 2, 16))

    def step():
        for _ in range(2):
            loss = micro_step(*batch)
        micro_step.after_step()
        return loss.item()

    step()
    assert (engine.eager, len(graphs)) == (2, 0)  # libraries initialize
    step()
    (graph,) = graphs
    assert (engine.eager, graph.replays) == (3, 2)  # the capture, and replays
    metric = gpt.norm
    gpt(*batch)  # an evaluation sets another tensor, which no replay would write
    captured = step()
    assert (engine.eager, graph.replays) == (3, 4)
    assert gpt.norm is metric

    gpt.aux_weight = 8.0
    assert step() > captured + 1.0  # eager: the new weight counts
    assert step() > captured + 1.0
    assert (engine.eager, graph.replays) == (7, 4) and micro_step.graph is None
    note = "note       model.aux_weight has changed, which a CUDA graph can't follow: micro-steps go on without one\n"
    assert capsys.readouterr().out == note


def test_an_attribute_that_changes_within_a_step_counts_at_once(capturing, capsys):
    """A loop that gives each micro-step its own weight."""
    engine, micro_step, graphs = capturing
    batch = torch.randint(61, (2, 2, 16))
    micro_step(*batch)
    micro_step.after_step()
    captured = micro_step(*batch).item()
    assert (engine.eager, graphs[0].replays) == (2, 1)

    engine.module.aux_weight = 8.0
    assert micro_step(*batch).item() > captured + 1.0
    assert (engine.eager, graphs[0].replays) == (3, 1) and micro_step.graph is None
    assert capsys.readouterr().out.startswith("note       model.aux_weight has changed")


def test_each_length_has_a_graph_of_its_own(capturing, capsys):
    """2 steps of 8 rows of 4 tokens, 3 of 4 x 8, 3 of 2 x 16: an eager step each, then one capture."""
    engine, micro_step, graphs = capturing
    seen = []
    for length, steps in ((4, 2), (8, 3), (16, 3)):
        for _ in range(steps):
            batch = torch.randint(61, (2, 32 // length, length))
            for _ in range(2):
                micro_step(*batch)
            micro_step.after_step()
            if micro_step.graph:
                assert all(torch.equal(own, t) for own, t in zip(micro_step.inputs, batch, strict=True))
            seen.append((engine.eager, [graph.replays for graph in graphs]))
    assert seen == [(2, []), (3, [2]),
                    (5, [2]), (6, [2, 2]), (6, [2, 4]),
                    (8, [2, 4]), (9, [2, 4, 2]), (9, [2, 4, 4])]
    assert [graph.was_reset for graph in graphs] == [True, True, False]

    # What changes later is noticed by the last graph, too
    engine.module.aux_weight = 8.0
    micro_step(*batch)
    assert micro_step.graph is None and graphs[-1].was_reset and engine.eager == 10
    assert capsys.readouterr().out.startswith("note       model.aux_weight has changed")


def test_shapes_that_change_within_a_step_take_no_graph(capturing):
    engine, micro_step, graphs = capturing
    for _ in range(3):
        for length in (8, 16):
            micro_step(*torch.randint(61, (2, 2, length)))
        micro_step.after_step()
    assert (engine.eager, graphs) == (6, [])


def test_a_capture_does_not_wait_for_deepspeeds_timer(monkeypatch):
    """From its third step on, the timer of a forward waits for the GPU."""
    waits = []
    monkeypatch.setattr(type(get_accelerator()), "synchronize", lambda *_: waits.append(1))
    timer = ThroughputTimer(DeepSpeedThroughputTimerConfig(), batch_size=1)
    timer.global_step_count = 2
    timer.start()
    assert len(waits) == 1
    with without_throughput_timer(SimpleNamespace(tput_timer=timer)):
        timer.start()
    assert len(waits) == 1
    timer.start()
    assert len(waits) == 2


def test_a_tensor_on_the_cpu_takes_no_graph(capsys):
    gpt = GPT(GPTConfig(**SHAPE))
    gpt.register_buffer("table", torch.ones(2))
    engine = FakeEngine(gpt)
    micro_step = ForwardBackward(engine, True, is_local=True)
    for _ in range(3):
        micro_step(*torch.randint(61, (2, 2, 16)))
        micro_step.after_step()
    assert engine.eager == 3
    note = "model.table is a tensor on the CPU, which a CUDA graph can't follow: micro-steps go on without one"
    assert capsys.readouterr().out == f"note       {note}\n"


def test_a_capture_that_fails_is_one_sentence():
    class Capture:
        """As torch.cuda.graph: its end fails if something inside has failed."""

        def __enter__(self):
            pass

        def __exit__(self, *_):
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    def error_of(first):
        try:
            with Capture():
                raise first
        except RuntimeError as error:
            return capture_error(error)

    error = error_of(RuntimeError("CUDA error: operation not permitted when stream is capturing\nCompile with ..."))
    assert isinstance(error, UserError)
    assert str(error) == (
        "a micro-step can't be captured in a CUDA graph (CUDA error: operation not permitted when stream is "
        "capturing). Most often it waits for the GPU, as code that looks at values does: leave out --cuda_graph=True, "
        "or set --cuda_graph=False"
    )
    mistake = UserError("a mistake")
    assert error_of(mistake) is mistake
    memory = torch.OutOfMemoryError("CUDA out of memory")
    assert error_of(memory) is memory  # runtime/plan/report.py explains it


def test_attributes_that_the_model_reads_are_watched():
    names = {entry.name for entry in Guards(GPT(GPTConfig(**SHAPE))).entries}
    assert {"n_head", "dropout", "gelu", "vocab_size", "gradient_checkpointing", "LOSS_CHUNK"} <= names
