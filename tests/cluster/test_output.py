"""A run whose output breaks loses the lines that could not be printed, and nothing else."""

import os
import shlex
import signal
import subprocess
import sys

import pytest
from conftest import ROOT, SMALL, ForkedJob, command_line, launch, read_history, wait_until

from runtime.checkpoint.tags import TagStore

ENDLESS = ("--max_iters=1000000", "--eval_interval=1000000", "--log_interval=10")


@pytest.mark.long
def test_ctrl_c_that_also_ends_tee_saves_a_checkpoint(characters, tmp_path):
    """`python launch_deepspeed.py ... 2>&1 | tee log`, and Ctrl-C: the terminal sends SIGINT to both."""
    out_dir, log = tmp_path / "out", tmp_path / "log"
    command = command_line(ROOT / "train_deepspeed.py", *SMALL, *ENDLESS, f"--dataset={characters}",
                           f"--out_dir={out_dir}", ranks=2, launcher="launch_deepspeed.py")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT, process_group=0) as job:
        with open(log, "w") as f:
            tee = subprocess.Popen(["tee"], stdin=job.stdout, stdout=f, process_group=job.pid)
        job.stdout.close()
        try:
            assert wait_until(lambda: "iter 10:" in log.read_text()), log.read_text()
            os.killpg(job.pid, signal.SIGINT)
            assert tee.wait() == -signal.SIGINT and job.wait() == 130
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
    assert TagStore(out_dir).find().manifest["iter_num"] >= 10
    assert (out_dir / "latest").read_text() == f"iter_{TagStore(out_dir).find().manifest['iter_num']}"


def test_a_full_disk_under_the_log_does_not_stop_training(characters, tmp_path):
    out_dir = tmp_path / "out"
    command = [ROOT / "train_deepspeed.py", *SMALL, f"--dataset={characters}", f"--out_dir={out_dir}"]
    assert ForkedJob(command, 1, "/dev/full", "/dev/full").wait() == 0
    assert TagStore(out_dir).list() == ["iter_2", "iter_4", "best", "final"]
    assert [r["iter"] for r in read_history(out_dir) if "loss" in r] == [1, 2, 3, 4]


def test_closed_streams_do_not_stop_training(characters, tmp_path):
    """`>&- 2>&-`: sys.stdout is None."""
    shell = f"exec {shlex.quote(sys.executable)} train_deepspeed.py \"$@\" >&- 2>&-"
    done = subprocess.run(["bash", "-c", shell, "bash", *SMALL, f"--dataset={characters}", f"--out_dir={tmp_path}/a"],
                          cwd=ROOT)
    assert done.returncode == 0 and "final" in TagStore(tmp_path / "a").list()


def test_a_rank_in_the_shell_does_not_silence_an_error(tmp_path):
    run = launch(ROOT / "plot.py", tmp_path / "nothing", launcher="python", LOCAL_RANK="1")
    assert run.returncode == 2 and "nothing" in run.stderr


def test_lines_of_two_threads_stay_whole():
    """The thread that saves prints, too. With print(text), 7% of these lines were torn."""
    code = ("import sys, threading; from runtime.output import protect_output; protect_output(); "
            "from runtime.cluster.ranks import print0; sys.setswitchinterval(1e-5)\n"
            "for c in 'ab': threading.Thread(target=lambda c=c: [print0(50 * c) for _ in range(5000)]).start()")
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert sorted(out.splitlines()) == [50 * "a"] * 5000 + [50 * "b"] * 5000


def test_a_print_of_any_text_in_ascii():
    script = "from runtime.output import protect_output; protect_output(); print('caf\\u00e9'); print('then')"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True,
                          env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stdout) == (0, "caf\\xe9\nthen\n")


def test_a_full_pipe_that_does_not_block_loses_only_what_does_not_fit():
    """As Node's pipes are, and a terminal that ssh shares."""
    script = ("import os, sys; from runtime.output import protect_output; protect_output()\n"
              "for i in range(3000): print('x' * 100, flush=True)\n"
              "os.close(2); sys.stdin.readline(); print('after', flush=True)")
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdin=subprocess.PIPE, stdout=writer,
                          stderr=subprocess.PIPE) as job:
        os.close(writer)
        assert job.stderr.read() == b""  # until it closes that, when it has printed all
        text = os.read(reader, 2**20)
        job.stdin.write(b"go on\n")
        job.stdin.close()
        while part := os.read(reader, 2**20):
            text += part
    os.close(reader)
    assert job.returncode == 0 and text.endswith(b"after\n")


def test_nothing_else_gets_the_descriptor_of_a_closed_stream():
    """`<&- 2>&-`: a library that writes to descriptor 2 must not write into a socket or a checkpoint."""
    script = "from runtime.output import protect_output; protect_output(); import os; f = open('README.md'); " \
             "print(f.fileno() > 2, os.readlink('/proc/self/fd/2'))"
    shell = f'exec {shlex.quote(sys.executable)} -c "$1" <&- 2>&-'
    done = subprocess.run(["bash", "-c", shell, "bash", script], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "True /dev/null\n"


@pytest.mark.long
def test_the_shell_script_trains_after_its_reader_has_ended(characters, tmp_path):
    command = [ROOT / "run_deepspeed_xl.sh", *SMALL, f"--dataset={characters}", f"--out_dir={tmp_path}/out"]
    head = shlex.join(map(str, command)) + " 2>&1 | head -n 1; exit ${PIPESTATUS[0]}"
    done = subprocess.run(["bash", "-c", head], capture_output=True, text=True,
                          env={**os.environ, "PYTHON": sys.executable, "DS_ACCELERATOR": "cpu"})
    assert done.returncode == 0 and "final" in TagStore(tmp_path / "out").list()
    assert done.stdout.startswith("No CUDA GPU ") and len(done.stdout.splitlines()) == 1


EXPLAINED = """
import io, sys
from runtime.errors import UserError
from runtime.output import Explainer, explain_uncaught

explain_uncaught(Explainer.LOST_RANK, lambda error: "a rank is lost" if "NCCL" in str(error) else None)
ours = sys.excepthook
def drops_what_ours_prints(*args):  # as PyTorch's does if ours exits
    out, sys.stderr = sys.stderr, io.StringIO()
    try:
        ours(*args)
        out.write("[rank0]: " + sys.stderr.getvalue())
    finally:
        sys.stderr = out
sys.excepthook = drops_what_ours_prints
explain_uncaught(Explainer.OUT_OF_MEMORY, lambda error: "too much memory" if "memory" in str(error) else None)
raise {error}
"""


@pytest.mark.parametrize("error, code, line", [
    ("RuntimeError('NCCL: out of memory')", 1, "too much memory"), ("RuntimeError('NCCL')", 1, "a rank is lost"),
    ("UserError('a mistake')", 2, "a mistake"),
    ("ValueError('a bug')", 1, "[rank0]: Traceback (most recent call last):")])
def test_uncaught_errors_are_explained_in_one_order(error, code, line):
    """Whoever has come last, and also if another hook was put above ours meanwhile."""
    command = [sys.executable, "-c", EXPLAINED.format(error=error)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.splitlines()[0]) == (code, "", line)
    assert "Traceback" in line or done.stderr.count("\n") == 1


EXIT_AND_SIGNAL = """
import atexit, os, signal
from runtime.cluster.ranks import exit_process
from runtime.output import exit_on_error
atexit.register(lambda: os.kill(os.getpid(), signal.SIGTERM))
with exit_on_error("interrupted"):
    exit_process(2)
"""


def test_a_signal_while_a_rank_exits_prints_no_traceback():
    """A launcher sends SIGTERM to the ranks that have not exited yet."""
    done = subprocess.run([sys.executable, "-c", EXIT_AND_SIGNAL], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (-signal.SIGTERM, "")
