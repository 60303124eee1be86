"""Saves that fail in unexpected ways, planted: they are reported, the run ends, and no rank waits in vain."""

import pytest

FAILS_ONCE = """
import threading, time
from runtime.checkpoint import saver as save
import torch.distributed as dist
failures = 1
plain = {target}
def fails(*args, **kwargs):
    global failures
    on_thread = threading.current_thread() is not threading.main_thread()
    if failures and on_thread and os.environ.get("RANK", "0") in {ranks!r}:
        failures -= 1
        time.sleep({delay})
        raise RuntimeError("PytorchStreamReader failed reading file")
    return plain(*args, **kwargs)
{target} = fails
"""


@pytest.fixture
def run(train, tmp_path):
    def run(target, ranks, on="01", delay=0):
        run = train(ranks=ranks, out_dir=tmp_path / "out", timeout=90,
                    plant=FAILS_ONCE.format(target=target, ranks=on, delay=delay))
        assert run.returncode == 2 and "Traceback" not in run.stderr, run.stderr
        return run.stderr
    return run


@pytest.mark.parametrize("ranks, delay", [(1, 0), (2, 0), (2, 1)], ids=["1 rank", "2 ranks", "2 ranks, late"])
def test_an_exception_in_the_commit_ends_the_run_with_a_sentence(run, tmp_path, ranks, delay):
    assert (f"{tmp_path}/out/iter_2 could not be saved (PytorchStreamReader failed reading file); earlier "
            "checkpoints are intact") in run("save.write_atomic", ranks, delay=delay)
    assert not [*(tmp_path / "out").glob("iter_2*")]  # nor iter_2.saving


@pytest.mark.parametrize("target, on", [("save.file_digest", "1"), ("dist.broadcast", "01")],
                         ids=["a file of rank 1", "a collective"])
def test_whatever_escapes_on_any_rank_ends_the_run_with_a_sentence(run, target, on):
    assert "PytorchStreamReader failed reading file); earlier checkpoints are intact" in run(target, 2, on=on)
