"""Any graph of model.py trains as in plain PyTorch, in every way and on any number of ranks.

The edits are in edited_model.py: blocks that run twice or never, that share parameters, experts
without tokens, choices that differ between ranks. graph_worker.py trains each of them in all ways
of graph_training.py, in one launch. Whole runs of the training script are in test_graph_runs.py."""

import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import graph_training
import pytest
import torch
from conftest import ROOT, ForkedJob, every, free_port, kill, wait_until
from edited_model import BY_MICRO_BATCH, GRAPHS, edited_model
from graph_training import WAYS

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
    # An expert without tokens in the first micro-step, after a step in which it had some
    "DeepSpeed's, 2 micro-steps": ("experts", "a random block skipped"),
    "peeking": ("a block without gradients", "blocks twice"),
}


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
    """Run graph_worker.py until it ends, or makes no result for a while. Return what went wrong."""
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
    """Return {way: its result, or a text that says why there is none}.

    After a crash or a hang, this launches again for the ways that are left.
    """
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
    """Float32: losses within 2e-6, norms within 5e-5 of their size, weights within 1e-5.

    DeepSpeed's own stage 3 may be refused, in one sentence: it keeps the last gradient of a
    parameter that gets none, and its ranks may make different collectives.
    """
    expected = plain(graph, ranks, way)
    result = trained(graph, ranks)[way]
    if isinstance(result, str):
        assert "DeepSpeed's" in way, result
        assert result.startswith("exit code 2: "), result
        assert "Traceback" not in result
        return
    assert result["losses"] == pytest.approx(expected["losses"], abs=2e-6)
    assert result["norms"] == pytest.approx(expected["norms"], rel=5e-5)  # ours is in float32
    assert result["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        assert (result["weights"][name] - weight).abs().max() < 1e-5, name
