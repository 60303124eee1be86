"""Mixtures of data sets, exact in their shares; stages that follow one another; schedules and epochs."""

import json
import math
import re

import numpy as np
import pytest
from conftest import CHARS, EIGHT, NO_SHAPE, SOURCE, done

from runtime.checkpoint.tags import TagStore
from runtime.data.dataset import write_dataset
from runtime.data.loader import interleave_table, locate_sequences
from runtime.data.mixture import mixture_shares
from runtime.data.sequences import TokenStream
from runtime.errors import UserError

COUNT_HASHES = """
from runtime.checkpoint import verify
digest = verify.file_digest
def counted(path):
    os.write(1, f"hashed {path}\\n".encode())  # whole, whatever the other rank prints
    return digest(path)
verify.file_digest = counted
"""
TWO_NODES = """
from runtime.cluster import ranks as of_cluster
of_environment = of_cluster.ranks_from_environment
def alone_on_a_node(*args):
    return of_environment(*args)._replace(local_rank=0, local_world_size=1)
of_cluster.ranks_from_environment = alone_on_a_node
"""


@pytest.fixture(scope="session")
def backwards(characters, tmp_path_factory):
    """The test's text from its end to its beginning, as a data set."""
    folder = tmp_path_factory.mktemp("data") / "backwards"
    train, val = (np.fromfile(characters / f"{split}.bin", dtype=np.uint16)[::-1] for split in ("train", "val"))
    write_dataset(folder, train[:7000], val, {"kind": "char", "chars": CHARS}, len(CHARS), SOURCE)
    return folder


@pytest.mark.parametrize("weights, whole", [
    ({"a": 0.3, "b": 0.7}, {"a": 3, "b": 7}), ({"a": 1, "b": 1, "c": 2}, {"a": 1, "b": 1, "c": 2}),
    ({"a": 0.3333333, "b": 0.6666667}, {"a": 1, "b": 2}), ({"a": 30, "b": 70.0}, {"a": 3, "b": 7}),
    ({"a": 5e-5, "b": 1}, {"a": 1, "b": 20_000}), ({"a": 1e-9, "b": 3e-9}, {"a": 1, "b": 3})])
def test_weights_become_shares(weights, whole):
    assert mixture_shares(weights) == whole


@pytest.mark.parametrize("weights", [{}, {"a": 0}, {"a": -1, "b": 1}, {"a": "much"}, {"a": math.nan}, "{a: 1}",
                                     {"a": math.pi, "b": math.e, "c": 1}, {"a": 7e-6, "b": 1}])
def test_what_are_no_weights_is_refused(weights):
    with pytest.raises(UserError, match="dataset="):
        mixture_shares(weights)


@pytest.mark.parametrize("whole", [(1,), (3, 7), (1, 1, 98), (5, 3, 2)])
def test_every_beginning_of_a_mixture_has_its_shares_and_each_set_its_own_order(whole):
    period, n = sum(whole), 400
    streams = [TokenStream(np.zeros(size), 16) for size in (500, 900, 300)[:len(whole)]]
    located = locate_sequences(np.arange(n), list(zip(streams, whole, strict=True)), 1337)
    which = np.array([streams.index(stream) for stream, _ in located])
    offsets = np.array([offset for _, offset in located])
    for j, share in enumerate(whole):
        so_far = np.cumsum(which == j)
        assert np.abs(so_far - np.arange(1, n + 1) * share / period).max() < 1
        assert so_far[period - 1] == share and so_far[n // period * period - 1] == n // period * share
        alone = streams[j].train_places(np.arange(so_far[-1]), 1337)
        np.testing.assert_array_equal(offsets[which == j], alone)
    assert sorted(interleave_table(whole)[0]) == sorted(j for j, share in enumerate(whole) for _ in range(share))


def test_a_mixture_trains_tells_its_shares_and_goes_on(train, characters, backwards):
    mixture = f"--dataset={{'{characters}': 0.3, '{backwards}': 0.7}}"
    args = (*EIGHT, mixture, "--eval_interval=5", "--dropout=0.0")
    run, name = done(train(*args, ranks=2)), characters.name
    assert f"mixture    {name} 3, backwards 7 of each 10 sequences" in run.stdout
    assert run.stdout.count("), 30% of the mixture\n") == run.stdout.count("), 70% of the mixture\n") == 3
    records = {r["iter"]: r for r in run.history if "datasets" in r}
    assert sorted(records) == [0, 5, 8]
    for folder in (characters, backwards):  # what each set's evaluation says alone
        alone = done(train(*EIGHT, f"--dataset={folder}", "--eval_only=True", "--dropout=0.0"))
        told = float(alone.stdout.split("val loss ")[1].split()[0])
        assert records[0]["datasets"][folder.name]["val_loss"] == pytest.approx(told, abs=6e-5)
    for r in records.values():
        parts = r["datasets"][name], r["datasets"]["backwards"]
        for key in ("train_loss", "val_loss"):
            assert r[key] == pytest.approx(0.3 * parts[0][key] + 0.7 * parts[1][key], rel=1e-12)
        errors = (share * part["val_loss_stderr"] for share, part in zip((0.3, 0.7), parts, strict=True))
        assert r["val_loss_stderr"] == pytest.approx(math.hypot(*errors))
    part = done(train(*args, "--max_iters=5", "--gradient_accumulation_steps=4"))  # one rank
    on = done(train(*args, "--init_from=resume", ranks=2, out_dir=part.out_dir))
    for it in range(1, 9):
        assert {**part.losses, **on.losses}[it] == pytest.approx(run.losses[it], rel=2e-5), it


def test_a_mixture_of_two_tokenizers_or_of_what_is_not_there_is_refused(train, characters, tmp_path):
    write_dataset(tmp_path / "other", [0, 1] * 99, [1] * 50, {"kind": "char", "chars": "ab"}, 2, SOURCE)
    run = train(f"--dataset={{'{characters}': 1, '{tmp_path}/other': 1}}")
    assert run.returncode == 2 and "have different tokenizers: prepare both with the same" in run.stderr
    run = train(f"--dataset={{'{characters}': 1, '{tmp_path}/none': 1}}")
    assert run.returncode == 2 and "none" in run.stderr and "Traceback" not in run.stderr


def test_a_stage_begins_with_the_best_weights_of_the_one_before(train, backwards):
    first = done(train("--max_iters=6", "--learning_rate=1e-2"))
    second = done(train(f"--init_from={first.out_dir}", *NO_SHAPE, "--max_iters=2", "--learning_rate=1e-4"))
    best = min(val for _, val in first.evals.values())
    assert second.evals[0][1] == pytest.approx(best, abs=1e-6) and second.losses[1] < first.losses[1] - 0.1
    assert f"weights from {first.out_dir}/best, iteration 6; the optimizer starts fresh" in second.stdout
    third = done(train(f"--init_from={second.out_dir}/iter_2", *NO_SHAPE, f"--dataset={backwards}", "--max_iters=1",
                       "--block_size=16", ranks=2, plant=COUNT_HASHES))
    assert f"weights from {second.out_dir}/iter_2, iteration 2; the optimizer starts fresh" in third.stdout
    files = TagStore(second.out_dir).find("iter_2").manifest["files"]  # the two ranks share the hashing
    assert sorted(re.findall(r"^hashed .*/(.+)$", third.stdout, re.M)) == sorted(files)
    done(train(*NO_SHAPE, f"--dataset={backwards}", "--max_iters=2", "--block_size=16", "--init_from=resume", ranks=2,
               out_dir=third.out_dir))
    sources = ["scratch", f"{first.out_dir}/best", f"{second.out_dir}/iter_2"]
    assert json.loads((third.out_dir / "settings.json").read_text())["settings"]["sources"] == sources
    assert TagStore(third.out_dir).find("iter_2").manifest["state"]["sources"] == sources
    same = train(f"--init_from={first.out_dir}", *NO_SHAPE, out_dir=first.out_dir)
    assert same.returncode == 2 and "already holds a run (iter_6): resume it with --init_from=resume" in same.stderr


def test_epochs(train):
    """0.02 epochs of 561 windows in steps of 4: 3 of them."""
    assert TokenStream(np.zeros(18_000), 32).per_epoch == 561
    run = done(train("--max_epochs=0.02", "--lr_schedule=linear", "--min_lr=0.0", "--keep_last=0"))
    assert [r["lr"] for r in run.history if "lr" in r] == pytest.approx([1e-3, 2e-3 / 3, 1e-3 / 3])
    assert "561" not in run.stderr and sorted(run.losses) == [1, 2, 3]
    assert TagStore(run.out_dir).list() == [] and "saving" not in run.stdout  # by keep_last=0


def test_a_node_with_an_out_dir_of_its_own_hashes_all_files(train):
    """Each of two nodes with one rank. Where a run saves, the folder is shared, and so is the hashing."""
    run = done(train("--max_iters=1"))
    files = sorted(TagStore(run.out_dir).find("iter_1").manifest["files"])
    for option, times in (("--eval_only=True", 2), ("--max_iters=2", 1)):
        again = done(train(option, "--init_from=resume", out_dir=run.out_dir, ranks=2, plant=COUNT_HASHES + TWO_NODES))
        hashed = re.findall(r"^hashed .*/iter_1/(.+)$", again.stdout, re.M)
        assert sorted(hashed) == sorted(files * times)
