"""Saves that fail in unexpected ways, planted: they are reported, the run ends, and no rank waits in vain."""

import contextlib
import errno
import io
import os
import pickle
import subprocess
import sys

import pytest
from conftest import ROOT, done, edited_script

from runtime.checkpoint import tag_writer as save
from runtime.checkpoint.save_errors import cause_of
from runtime.checkpoint.tags import TagStore
from runtime.errors import UserError
from runtime.files import lock_folder

FAILS_ONCE = """
import threading, time
from runtime.checkpoint import tag_writer as save
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


SMALL_FILES = """
import resource
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, most))
"""


def test_a_limit_on_the_size_of_files_is_named(train, tmp_path):
    """As `ulimit -f` sets it. torch.save's own error is about its position in the file."""
    run = train(out_dir=tmp_path / "out", plant=SMALL_FILES)
    first, second = run.stderr.splitlines()
    assert run.returncode == 2
    assert first.startswith(f"{tmp_path}/out/iter_2 could not be saved (rank 0: {tmp_path}/out/iter_2.saving/")
    assert first.endswith(".pt: File too large; raise the limit on the size of files (ulimit -f), or choose an out_dir "
                          "on a file system that has none, unlike FAT); earlier checkpoints are intact")
    assert second.startswith("a checkpoint could not be saved: fix that, or make room")


def test_a_disk_that_fails_is_named(monkeypatch, tmp_path):
    class FailingDisk(io.FileIO):
        def write(self, content):
            if self.tell() > 1000:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().write(content)

    monkeypatch.setattr(save, "create_new", lambda path: FailingDisk(path, "w"))
    failures = []
    save.write_files(tmp_path / "tag", [(str(tmp_path / "tag" / "a.pt"), {"a": bytes(9000)})], {}, failures)
    assert failures == [f"{tmp_path}/tag/a.pt: Input/output error; the disk or its connection fails: see dmesg, and "
                        "choose an out_dir on another disk"]


def test_an_error_that_is_not_the_systems_stays(tmp_path):
    """Versions of Python differ in the kind of error and in its first words."""
    with pytest.raises((AttributeError, pickle.PicklingError)) as error:
        save.write_file(str(tmp_path / "a.pt"), {"a": lambda: 0})
    assert "local object" in cause_of(error.value)


MOVED = """
from runtime.checkpoint.saver import Saver
save = Saver.save
def save_after_a_move(self, tag, *args):
    if tag == "iter_4":
        self._join()
        if os.environ["RANK"] == "0":
            os.rename(self.store.out_dir, self.store.out_dir + ".moved")
            {then}
    save(self, tag, *args)
Saver.save = save_after_a_move
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_out_dir_that_was_moved_is_made_again(train, tmp_path, ranks):
    run = done(train(ranks=ranks, out_dir=tmp_path / "out", plant=MOVED.format(then="")))
    assert (f"{tmp_path}/out was moved or removed during the run. It is made again: the earlier checkpoints and "
            "records are where it was moved to") in run.stdout.splitlines()
    assert TagStore(tmp_path / "out.moved").list() == ["iter_2", "best"]
    assert TagStore(tmp_path / "out").find("final").manifest["iter_num"] == 4


def test_another_run_in_the_place_of_an_out_dir_is_left_alone(train, tmp_path):
    other = done(train()).out_dir
    before = {path: path.read_bytes() for path in other.rglob("*") if path.is_file()}
    then = f"os.rename({str(other)!r}, self.store.out_dir)"
    run = train(ranks=2, out_dir=tmp_path / "out", plant=MOVED.format(then=then))
    assert run.returncode == 2
    assert run.stderr.splitlines()[0] == (
        f"{tmp_path}/out/iter_4 could not be saved ({tmp_path}/out is another folder than at the start of this run, "
        "and holds checkpoints: move it away); earlier checkpoints are intact")
    after = {other / path.relative_to(tmp_path / "out"): path.read_bytes()
             for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert [path for path in before if after.get(path) != before[path]] == []


def lock_elsewhere(folder):
    """Lock a folder in another process. Return what it prints."""
    code = ("import sys; from runtime.files import lock_folder; from runtime.errors import UserError\n"
            "try: lock_folder(sys.argv[1], '--out_dir')\nexcept UserError as error: print(error)")
    return subprocess.run([sys.executable, "-c", code, folder], cwd=ROOT, check=True, capture_output=True,
                          text=True).stdout


@contextlib.contextmanager
def lock_held(folder):
    """A context in which another process holds the lock of a folder."""
    code = ("import sys; from runtime.files import lock_folder\n"
            "lock = lock_folder(sys.argv[1], '--out_dir'); print('locked', flush=True); sys.stdin.read()")
    with subprocess.Popen([sys.executable, "-c", code, folder], cwd=ROOT, stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "locked\n"
        yield


def test_a_folder_that_is_made_again_is_locked(tmp_path):
    out = tmp_path / "out"
    store = TagStore(out, read_only=False)
    store.hold_folder()  # nothing has happened to it
    assert "another run is writing" in lock_elsewhere(out)
    out.rename(tmp_path / "moved")
    with lock_held(out), pytest.raises(UserError) as taken:
        store.hold_folder()
    assert str(taken.value).startswith(
        f"{out} was moved or removed during the run, and another run is writing to {out}: ")
    store.hold_folder()
    assert "another run is writing" in lock_elsewhere(out) and lock_elsewhere(tmp_path / "moved") == ""
    (out / ".lock").unlink()
    store.hold_folder()
    assert "another run is writing" in lock_elsewhere(out)


@pytest.mark.parametrize("path", ["out", "out/run", "out/a/b"])
def test_a_link_to_nowhere_is_named(tmp_path, path):
    """Most often to a disk that isn't mounted: nothing is made in its place."""
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "out")
    with pytest.raises(UserError) as error:
        lock_folder(tmp_path / path, "--out_dir")
    assert str(error.value) == (
        f"{tmp_path}/out is a link to {tmp_path}/disk/out, which does not exist: create that folder or mount its disk, "
        "or choose another --out_dir=DIR")
    assert not (tmp_path / "disk").exists()


def test_a_state_that_no_resume_would_take_is_named(train, tmp_path):
    """Before, every tag was written, and each reader refused them all."""
    script = edited_script(tmp_path, ('"improved": improved,', '"improved": int(improved),'))
    run = train("--max_iters=4", ranks=2, script=script)
    assert run.returncode == 2
    told = "no resume would take the state that save() records: improved is 1: Input should be a"
    assert told in run.stderr and "Traceback" not in run.stderr
    assert not TagStore(run.out_dir).list()


def test_a_loss_below_0_is_saved_and_resumed(train):
    """As with a bonus that a loss of the user's own subtracts. Losses of characters are about 3."""
    plant = """
import model
plain = model.LMHead.losses
model.LMHead.losses = lambda self, x, targets: plain(self, x, targets) - 20
"""
    run = done(train("--max_iters=4", plant=plant))
    best = TagStore(run.out_dir).find("best").manifest["state"]["best_val_loss"]
    assert -18 < best < -16
    resumed = done(train("--max_iters=6", "--init_from=resume", plant=plant, out_dir=run.out_dir))
    assert [*resumed.losses] == [1, 2, 3, 4, 5, 6]


def test_a_tensor_in_the_state_is_named(train, tmp_path):
    position = '"sequences": batches.position'
    script = edited_script(tmp_path, (position, f'"ema": {{"w": loss}}, {position}'))
    run = train("--max_iters=4", ranks=2, script=script)
    assert run.returncode == 2
    told = "('ema' in the state that save() records can't be written as JSON: Object of type Tensor is not"
    assert told in run.stderr and "with register_buffer)" in run.stderr
    assert "Traceback" not in run.stderr and not TagStore(run.out_dir).list()
