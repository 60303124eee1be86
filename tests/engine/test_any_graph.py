"""Any graph of model.py trains as in plain PyTorch, in every way and on any number of ranks.

The edits are in edited_model.py: blocks that run twice or never, that share parameters, experts
without tokens, choices that differ between ranks. graph_worker.py trains each in all ways of a table,
in one launch. Whole runs of the training script follow, with a resume from two ranks to one, Muon,
another optimizer, and offload."""

import math
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import graph_training
import numpy as np
import pytest
import torch
from conftest import CHARS, ROOT, ForkedJob, done, free_port, kill, stage, wait_until
from edited_model import BY_MICRO_BATCH, GRAPHS, edited_model
from graph_training import WAYS
from muon_reference import PlainMuon, by_singular_values

from runtime.data.loader import locate_sequences, read_windows

WORKER = ROOT / "tests" / "engine" / "graph_worker.py"
STALLED_S = 40  # without a result. A way takes a second
ONE_RANK = (
    "ZeRO-2",
    "ZeRO-2, 2 micro-steps",
    "ZeRO-3",
    "ZeRO-3, DeepSpeed's",
    "ZeRO-3, 2 micro-steps",
)
SPECIAL = {  # ways of some edits alone
    "recomputed": ("blocks twice", "experts"),
    "LoRA": ("blocks twice",),
}


def every(*values):
    """The values of a parametrized test, marked every."""
    return pytest.param(*values, marks=pytest.mark.every)


def ways_of(graph: str, ranks: int) -> list[str]:
    """Return the ways to train an edited model on so many ranks."""
    ways = []
    for way in WAYS:
        special = SPECIAL.get(way.partition(", ")[2])
        if special is None:
            applies = ranks > 1 or way in ONE_RANK
        else:
            applies = graph in special
        if applies:
            ways.append(way)
    return ways


def cases() -> list:
    """Return (edit, ranks, way) of each test. Those on two ranks are in the default set."""
    found = []
    for ranks in (1, 2, 3):
        for graph in GRAPHS:
            for way in ways_of(graph, ranks):
                case = (graph, ranks, way)
                found.append(case if ranks == 2 else every(*case))
    return found


# ---------------------------------------------------------------------------------------------
# In plain PyTorch


@pytest.fixture(scope="module")
def edited(tmp_path_factory):
    """edited(graph): a folder with model.py, edited, and the module."""
    found = {}

    def edit(graph):
        if graph not in found:
            folder = tmp_path_factory.mktemp("edited")
            module = edited_model(folder, GRAPHS[graph])
            found[graph] = SimpleNamespace(folder=folder, module=module)
        return found[graph]

    return edit


@pytest.fixture(scope="module")
def plain(edited):
    """plain(graph, ranks, way): what plain PyTorch makes of the same steps, over all data of a step
    at once where the loss is linear in it."""
    found = {}

    def reference(graph, ranks, way):
        micro_batches = 1
        if graph in BY_MICRO_BATCH:
            micro_batches = ranks * WAYS[way].get("accumulation", 1)
        with_lora = WAYS[way].get("with_lora", False)
        key = graph, micro_batches, with_lora
        if key not in found:
            module = edited(graph).module
            found[key] = graph_training.train_plainly(module, micro_batches, with_lora)
        return found[key]

    return reference


def calls_of(module, sequences, step=0):
    """How often a forward over these sequences calls each block, and each expert of a block."""
    model = graph_training.fresh_model(module)
    model.step = step
    counts = {}
    for name, part in model.named_modules():
        if isinstance(part, module.Block) or name.rpartition(".")[0].endswith("experts"):
            counts[name] = 0

    def count(name):
        counts[name] += 1

    for name in counts:
        model.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: count(name))
    model(sequences[:, :-1], sequences[:, 1:])
    return counts


def test_the_edits_do_what_their_names_say(edited):
    """Else the other tests here would test little."""
    first, second = graph_training.data(0).chunk(2)

    def counts(graph, sequences, step=0):
        return list(calls_of(edited(graph).module, sequences, step).values())

    assert counts("blocks twice", first) == [2, 2, 2, 2]
    assert counts("a block never", first) == [1, 0, 1, 1]
    assert counts("blocks shared in pairs", first) == [2, 2]

    # A block that all ranks skip, another one in another step
    skipped = [counts("a random block skipped", first, step).index(0) for step in range(8)]
    assert len(set(skipped)) > 2
    assert skipped == [counts("a random block skipped", second, step).index(0) for step in range(8)]

    # Ranks that skip different blocks, in most steps
    for ranks in (2, 3):
        differ = 0
        for step in range(graph_training.STEPS):
            chunks = graph_training.data(step).chunk(ranks)
            choices = {counts("a block skipped per rank", chunk).index(0) for chunk in chunks}
            differ += len(choices) > 1
        assert differ >= graph_training.STEPS / 2

    # An expert with tokens on one rank alone, and one without any
    mine = calls_of(edited("experts").module, first)
    others = calls_of(edited("experts").module, second)
    assert any(mine[name] > others[name] for name in mine)
    assert any(mine[name] < others[name] for name in mine)
    assert any(mine[name] == others[name] == 0 for name in mine)


# ---------------------------------------------------------------------------------------------
# In all ways


def launch_worker(folder: Path, ranks: int, ways: list[str]) -> str:
    """Run graph_worker.py until it ends, or brings no result for a while. Return what went wrong."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    alone |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    stderr = folder / "stderr"
    stderr.unlink(missing_ok=True)
    job = ForkedJob([WORKER, folder, *ways], ranks, folder / "stdout", stderr, alone)

    def finished():
        return len([*folder.glob("*.pt")])

    def goes_on(before):
        return job.poll() is not None or finished() > before

    try:
        while job.poll() is None:
            if not wait_until(partial(goes_on, finished()), STALLED_S):
                return f"no result for {STALLED_S} s"
    finally:
        kill(job)
    if job.returncode == 0:
        return ""
    return f"exit code {job.returncode}: {stderr.read_text(errors='replace')[-2000:]}"


def train_in_all_ways(folder: Path, ranks: int, ways: list[str]) -> dict:
    """Return {way: its result, or a text that says why there is none}. After a crash or a hang, launch
    again for the ways that are left."""
    results = {}
    left = list(ways)
    while left:
        problem = launch_worker(folder, ranks, left)
        for way in list(left):
            file = folder / f"{way}.pt"
            if file.exists():
                results[way] = torch.load(file)
                left.remove(way)
        if problem:
            failed = left.pop(0) if left else ways[-1]
            results[failed] = problem
    return results


@pytest.fixture(scope="module")
def trained(edited, tmp_path_factory):
    """trained(graph, ranks): the results of all ways, of one launch."""
    found = {}

    def results(graph, ranks):
        if (graph, ranks) not in found:
            folder = tmp_path_factory.mktemp("ways")
            shutil.copy(edited(graph).folder / "model.py", folder)
            found[graph, ranks] = train_in_all_ways(folder, ranks, ways_of(graph, ranks))
        return found[graph, ranks]

    return results


@pytest.mark.parametrize("graph, ranks, way", cases())
def test_training_is_plain_pytorchs(trained, plain, graph, ranks, way):
    """Float32: losses within 2e-6, norms within a 1e-5th of them, weights within 1e-5.

    DeepSpeed's own stage 3 may be refused, in one sentence: it keeps the last gradient of a parameter
    that gets none, and its ranks may make different collectives."""
    expected = plain(graph, ranks, way)
    result = trained(graph, ranks)[way]
    if isinstance(result, str):
        assert "DeepSpeed's" in way, result
        assert result.startswith("exit code 2: "), result
        assert "Traceback" not in result
        return
    assert result["losses"] == pytest.approx(expected["losses"], abs=2e-6)
    assert result["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    assert result["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        assert (result["weights"][name] - weight).abs().max() < 1e-5, name


# ---------------------------------------------------------------------------------------------
# Whole runs of the training script

RUN_STEPS = 20
PER_STEP = 8  # sequences
RUN = (f"--max_iters={RUN_STEPS}", f"--lr_decay_iters={RUN_STEPS}", "--eval_interval=10", "--n_layer=4")
RUN += ("--weight_decay=0.1", "--beta1=0.9", "--beta2=0.95", "--keep_last=10", "--grad_clip=1.0")
# Adam's eps keeps elements of nearly no gradient from taking full steps
OPTIMIZERS = {
    "AdamW": "torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-5)",
    "NAdam": "torch.optim.NAdam(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-5)",
    "Muon": "torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-5)",  # of the rest
}


def plant(folder: Path, optimizer: str) -> str:
    """Take the model.py of a folder, and this optimizer."""
    return f"""
sys.path.insert(0, {str(folder)!r})
import torch
from runtime.engine import setup
setup.adamw = lambda groups, *_, **options: {OPTIMIZERS[optimizer]}
"""


def micro_batches_of(step: int, tokens: np.memmap, number: int) -> list[tuple]:
    """Return the (x, y) of a step's micro-batches, over all ranks, as the training script divides it
    among two ranks, or into two micro-steps of one rank."""
    ids = np.arange(PER_STEP * step, PER_STEP * (step + 1))
    batches = []
    for own in np.split(ids, number):
        _, offsets = locate_sequences(own, [(tokens, 1)], 32, 1337)
        batches.append(read_windows([(tokens, offset) for offset in offsets], 32, len(CHARS)))
    return batches


def plain_optimizer(model: torch.nn.Module, optimizer: str):
    """Return the optimizer of a run, in plain PyTorch."""
    if optimizer == "Muon":
        parts = {}
        for name, p in model.named_parameters():
            if ".h." in name and p.dim() == 2:
                parts[name] = 3 if "c_attn" in name else 1
        return PlainMuon(model, 0.1, 0.02 / 1e-3, parts, betas=(0.9, 0.95), eps=1e-5)
    return eval(OPTIMIZERS[optimizer], {"torch": torch, "groups": model.parameter_groups(0.1)})


def plain_losses(module, characters: Path, optimizer: str, number: int, steps=RUN_STEPS) -> list[float]:
    """Return the losses of a run in plain PyTorch. number: of micro-batches in a step."""
    tokens = np.memmap(characters / "train.bin", np.uint16, mode="r")
    torch.manual_seed(1337)
    config = module.GPTConfig(
        block_size=32, vocab_size=len(CHARS), n_layer=4, n_head=2, n_embd=32
    )
    model = module.GPT(config)
    stepper = plain_optimizer(model, optimizer)
    losses = []
    for step in range(steps):
        rate = 1e-4 + 0.5 * (1 + math.cos(math.pi * step / RUN_STEPS)) * 9e-4
        for group in stepper.param_groups:
            group["lr"] = rate * group.get("lr_ratio", 1)
        for p in model.parameters():  # a gradient that doesn't come is zero
            p.grad = torch.zeros_like(p)
        total = 0.0
        for x, y in micro_batches_of(step, tokens, number):
            loss = model(x, y)
            (loss / number).backward()
            total += loss.item()
        losses.append(total / number)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        stepper.step()
    return losses


RESUMES = [  # (edit, optimizer, ZeRO stage on two ranks, then on one)
    ("blocks twice", "AdamW", 3, 3),
    every("blocks twice", "AdamW", 2, 3),
    every("a block never", "AdamW", 2, 2),
    every("a block never", "AdamW", 3, 2),
    every("blocks shared in pairs", "AdamW", 2, 2),
    every("blocks shared in pairs", "AdamW", 3, 3),
    every("one MLP", "AdamW", 2, 3),
    every("one MLP", "AdamW", 3, 2),
    ("a block skipped per rank", "AdamW", 2, 2),
    every("a block skipped per rank", "AdamW", 3, 3),
    every("an order per rank", "AdamW", 2, 3),
    every("an order per rank", "AdamW", 3, 2),
    ("experts", "NAdam", 2, 3),
    every("experts", "NAdam", 3, 2),
    every("experts", "AdamW", 2, 2),
    every("experts", "AdamW", 3, 3),
    ("skip connections", "Muon", 2, 2),
    every("skip connections", "AdamW", 2, 3),
    every("skip connections", "AdamW", 3, 2),
    every("a matrix in odd blocks", "Muon", 2, 2),
    every("a matrix in odd blocks", "AdamW", 2, 3),
    every("a matrix in odd blocks", "AdamW", 3, 2),
]


@pytest.mark.parametrize("graph, optimizer, first, second", RESUMES)
def test_a_run_goes_on_on_one_rank(
    train, characters, edited, monkeypatch, graph, optimizer, first, second
):
    """Ten steps on two ranks, and ten more on one rank in two micro-steps: the same micro-batches."""
    monkeypatch.setattr(torch.optim._muon, "_zeropower_via_newtonschulz", by_singular_values)
    number = 2 if graph in BY_MICRO_BATCH else 1
    expected = plain_losses(edited(graph).module, characters, optimizer, number)
    arguments = [*RUN, "--batch_size=4"]
    if optimizer == "Muon":
        arguments += ["--optimizer=muon", "--muon_learning_rate=0.02"]
    planted = plant(edited(graph).folder, optimizer)
    half = done(
        train(
            *arguments,
            "--gradient_accumulation_steps=1",
            "--max_iters=10",
            stage(first),
            ranks=2,
            plant=planted,
            timeout=100,
        )
    )
    assert [*half.losses.values()] == pytest.approx(expected[:10], abs=2e-6)
    resumed = done(
        train(
            *arguments,
            "--gradient_accumulation_steps=2",
            "--init_from=resume",
            stage(second),
            out_dir=half.out_dir,
            plant=planted,
            timeout=100,
        )
    )
    assert [*resumed.losses.values()] == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize(
    "graph, ranks",
    [
        ("blocks twice", 2),
        every("blocks twice", 1),
        every("experts", 2),
        every("experts", 1),
        ("a block skipped per rank", 2),
        every("a block skipped per rank", 1),
    ],
)
def test_offload_is_right_or_refused(train, characters, edited, graph, ranks):
    """At ZeRO-3, with config/ds/zero3_offload.json. PyTorch's AdamW needs no compiler."""
    number = ranks if graph in BY_MICRO_BATCH else 1
    run = train(
        *RUN,
        f"--batch_size={PER_STEP // ranks}",
        "--gradient_accumulation_steps=1",
        "--max_iters=6",
        "--deepspeed_config=config/ds/zero3_offload.json",
        ranks=ranks,
        plant=plant(edited(graph).folder, "AdamW"),
        timeout=60,
    )
    if run.returncode == 2:
        assert "Traceback" not in run.stderr
        *_, sentence = run.stderr.strip().splitlines()
        assert "zero3_offload.json" in sentence
        assert not run.losses
        return
    expected = plain_losses(edited(graph).module, characters, "AdamW", number, steps=6)
    assert [*done(run).losses.values()] == pytest.approx(expected, abs=2e-6)
