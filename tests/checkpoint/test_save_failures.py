"""Saves that fail in unexpected ways, planted: they are reported, the run ends, and no rank waits in vain."""

import os

import pytest
from conftest import SMALL, launch, planted

from runtime.checkpoint.tags import TagStore

FAILS_ONCE = """
import threading, time
from runtime.checkpoint import saver as save
import torch.distributed as dist
failures = {failures}
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
def run(characters, tmp_path):
    def run(target, *args, ranks=1, failures=1, on="01", delay=0):
        script = planted(tmp_path, FAILS_ONCE.format(target=target, failures=failures, ranks=on, delay=delay))
        done = launch(script, *SMALL, f"--dataset={characters}", f"--out_dir={tmp_path}/out", *args, ranks=ranks,
                      timeout=90)
        return done, sorted(name for name in os.listdir(tmp_path / "out") if not name.startswith("."))
    return run


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_exception_in_write_adapter_ends_the_run_with_a_sentence(run, tmp_path, ranks):
    done, names = run("save.write_peft_adapter", ranks=ranks)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert (f"{tmp_path}/out/iter_2 could not be saved (PytorchStreamReader failed reading file); earlier "
            "checkpoints are intact") in done.stderr
    assert not [name for name in names if name.startswith("iter_2")]  # nor iter_2.saving


def test_a_failure_that_is_noticed_late_ends_the_run(run, tmp_path):
    done, _ = run("save.write_peft_adapter", ranks=2, delay=1)
    assert done.returncode == 2 and "iter_2 could not be saved" in done.stderr, done.stderr
    assert "iter_2" not in TagStore(tmp_path / "out").list()


@pytest.mark.parametrize("target, on", [("save.file_digest", "1"), ("dist.broadcast_object_list", "01")],
                         ids=["a file of rank 1", "a collective"])
def test_whatever_escapes_on_any_rank_ends_the_run_with_a_sentence(run, target, on):
    done, _ = run(target, ranks=2, on=on)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "PytorchStreamReader failed reading file); earlier checkpoints are intact" in done.stderr
