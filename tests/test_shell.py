"""run_deepspeed_xl.sh from end to end with a tiny model, refused, and stopped."""

import contextlib
import fcntl
import os
import re
import shlex
import shutil
import subprocess
import sys

import psutil
import pytest
from conftest import CHARS, ROOT, SMALL, done, nvidia_smi, planted, wait_until


def naming(text):
    """The processes whose command line names `text`."""
    return [p for p in psutil.process_iter(["cmdline"]) if text in " ".join(p.info["cmdline"] or [])]


@pytest.fixture
def start(characters, tmp_path):
    """start(*args) -> a context with the script running on 3 iterations of a tiny model; none of it outlives that."""

    @contextlib.contextmanager
    def started(*args):
        command = [ROOT / "run_deepspeed_xl.sh", *SMALL, f"--dataset={characters}", f"--out_dir={tmp_path}/out",
                   "--max_iters=3", "--log_interval=1", *args]
        env = {**os.environ, "PYTHON": sys.executable, "DS_ACCELERATOR": "cpu"}
        with subprocess.Popen(command, env=env, text=True, cwd="/", stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              start_new_session=True) as job:
            try:
                yield job
            finally:
                for process in naming(str(tmp_path)):
                    process.kill()

    return started


def test_sh_starts_it_too():
    done = subprocess.run(["sh", "run_deepspeed_xl.sh", "--help"], cwd=ROOT, text=True, capture_output=True)
    assert done.stdout.startswith("usage: ./run_deepspeed_xl.sh") and not done.stderr


def test_the_whole_job(start, tmp_path):
    with start() as job:
        stdout, stderr = job.communicate()
        assert naming(str(tmp_path)) == []
    assert job.returncode == 0, stdout + stderr
    assert f"2 processes train a small model in {tmp_path}/out\n" in stdout
    assert "batch      2 x 2 x 2 = 8 sequences, 256 tokens per step" in stdout
    assert re.findall(r"^iter (\d+): loss ", stdout, re.M) == ["1", "2", "3"]
    assert f"saving checkpoint to {tmp_path}/out/iter_3" in stdout
    sampled = re.split(rf"{tmp_path}/out/best: 27,392 parameters after \d iterations\n\n", stdout)[1]
    text, _, told = sampled.partition("To train on your own text")
    assert len(text) == 1 + 200 + 1 and set(text) <= set(CHARS)
    prepare, train, sample = [shlex.split(line)[1:] for line in told.splitlines()[1:]]
    scripts = [str(ROOT / name).removeprefix("/") for name in ("data/prepare.py", "launch_deepspeed.py", "sample.py")]
    assert [words.pop(0) for words in (prepare, train, sample)] == scripts  # the shorter path from /
    assert prepare == ["MY_TEXT", "--name=mine", "--tokenizer=char"] and sample == ["--out_dir=out-mine"]
    config = str(ROOT / "config" / "shakespeare_char_cpu.py").removeprefix("/")
    assert train[2:] == [config, "--dataset=mine", "--out_dir=out-mine"]

    with start() as again:  # a folder that the user named is not overwritten
        stdout, stderr = again.communicate()
    (line,) = stderr.splitlines()
    assert again.returncode == 2 and f"{tmp_path}/out already holds a run (iter_3)" in line and "iter 1:" not in stdout
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    with start("--dry_run=True", "--n_embd=64", "--n_head=2") as dry:  # it changes nothing, so it is not refused
        stdout, stderr = dry.communicate()
    assert (dry.returncode, stderr) == (0, "") and f"note       {tmp_path}/out already holds a run (iter_3): " in stdout
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}


@pytest.mark.long
def test_the_whole_job_resumes(start, train, tmp_path):
    """README's ./run_deepspeed_xl.sh --init_from=resume, after a run of the same settings."""
    done(train("--max_iters=3", "--optimizer=muon", ranks=2, out_dir=tmp_path / "out"))
    with start("--init_from=resume", "--max_iters=5") as job:
        stdout, stderr = job.communicate()
    assert job.returncode == 0, stdout + stderr
    assert f"resuming from {tmp_path}/out/iter_3, iteration 3" in stdout
    assert re.findall(r"^iter (\d+): loss ", stdout, re.M) == ["4", "5"]


@pytest.mark.long
def test_a_run_that_saves_nothing_is_not_sampled_from(start):
    with start("--max_iters=0") as job:
        stdout, stderr = job.communicate()
    assert job.returncode == 0 and "total time" in stdout and "no checkpoint" not in stderr, stderr
    assert stdout.splitlines()[-1] == "no checkpoint was saved in this run, so there is no sample of it"


STOP_AT_THE_START = """
from runtime.plan import run_plan
find_start = run_plan.find_start
def touch_stop(*args):
    open({stop!r}, "w").close()
    return find_start(*args)
run_plan.find_start = touch_stop
"""
HEADLINE = """
import sys
sys.path.insert(0, {root!r})
import launch_deepspeed
train = launch_deepspeed.train
launch_deepspeed.train = lambda ranks, script, args: train(ranks, {script!r}, args)
sys.argv = ["launch_deepspeed.py", "--headline", *sys.argv[1:]]
launch_deepspeed.main()
"""


def test_a_run_that_is_stopped_at_its_start_gets_no_sample_of_an_earlier_one(train, characters, tmp_path):
    """A user touches STOP while the run looks for earlier checkpoints, of which there is one."""
    out_dir = done(train("--max_iters=1", out_dir=tmp_path / "out")).out_dir
    script = planted(tmp_path, STOP_AT_THE_START.format(stop=str(out_dir / "STOP")))
    headline = tmp_path / "headline.py"
    headline.write_text(HEADLINE.format(root=str(ROOT), script=str(script)))
    command = [sys.executable, headline, *SMALL, f"--dataset={characters}", f"--out_dir={out_dir}", "--overwrite=True"]
    job = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert job.returncode == 0, job.stderr
    stopped, no_sample, before = job.stdout.splitlines()[-3:]
    assert stopped == "exiting: no step has been made, so nothing is saved"
    assert no_sample == "no checkpoint was saved in this run, so there is no sample of it"
    assert before.startswith(f"{out_dir} has checkpoints from before: ")
    assert before.endswith(f" sample.py --out_dir={out_dir}")


# Beside a real GPU PyTorch finds it, since this run must not set what hides GPUs: it would train GPT-2 XL. Where there
# is none, the same PyTorch build meets an nvidia-smi that lists one, which is the case to test
@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="needs a machine without a GPU")
def test_gpus_that_pytorch_cannot_use_are_an_error(tmp_path):
    nvidia_smi(tmp_path, "9.0")
    env = {name: value for name, value in os.environ.items() if name not in ("DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES")}
    run = subprocess.run([ROOT / "run_deepspeed_xl.sh"], capture_output=True, text=True,
                         env={**env, "PATH": f"{tmp_path}:{env['PATH']}", "PYTHON": sys.executable})
    assert (run.returncode, run.stdout) == (2, "")
    assert re.fullmatch(r"nvidia-smi lists GPUs, but PyTorch \S+, for CUDA \S+, finds none: "
                        "update the driver, install a PyTorch for its CUDA version, or set CUDA_VISIBLE_DEVICES=-1 for "
                        "the CPU\n", run.stderr)


def setup(project, **env):
    """Run runtime/venv.sh in a folder with a copy of it and without a package index. Prints PYTHON."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "VENV_REQUIREMENTS")}
    return subprocess.run(["bash", "-euo", "pipefail", "-c", "source runtime/venv.sh; echo $PYTHON"], cwd=project,
                          env={**kept, "PIP_NO_INDEX": "1", **env}, capture_output=True, text=True)


@pytest.fixture
def project(tmp_path):
    """A folder with runtime/ and the two files of requirements, empty. Their environments seem to be ready."""
    shutil.copytree(ROOT / "runtime", tmp_path / "runtime", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for file, folder in (("requirements.txt", ".venv"), ("requirements-volta.txt", ".venv-volta")):
        (tmp_path / file).write_text("")
        (tmp_path / folder / "bin").mkdir(parents=True)
        (tmp_path / folder / "bin" / "python").write_text("#!/bin/sh\necho Python, called with \"$@\"\n")
        (tmp_path / folder / "bin" / "python").chmod(0o755)
        (tmp_path / folder / "ready").write_text("4294967295 0 Python, called with -V\n")  # cksum of an empty file
    return tmp_path


@pytest.mark.parametrize("capabilities, suffix", [
    (["7.0"] * 4, "-volta"), (["6.0"], "-volta"), (["6.1"], "-volta"), (["8.6", "7.0"], "-volta"),  # V100, P100
    (["9.0"] * 8, ""), (["7.5"], ""), (["8.0"], ""), (["10.0"], ""), (["12.0"], ""), ([], ""),  # H100, T4, A100, B200
    (["[N/A]"], ""), (["NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."], "")])
def test_setup_chooses_the_requirements_by_the_cards(project, capabilities, suffix):
    """Neither environment is built, since both seem to be ready."""
    path = f"{nvidia_smi(project, *capabilities).parent}:{os.environ['PATH']}"
    chosen = setup(project, PATH=path)
    assert (chosen.stdout, chosen.stderr) == (f"{project}/.venv{suffix}/bin/python\n", "")
    named = setup(project, PATH=path, VENV_REQUIREMENTS="requirements-volta.txt")
    assert (named.stdout, named.stderr) == (f"{project}/.venv-volta/bin/python\n", "")


def test_an_environment_of_the_user_is_taken_as_it_is(project):
    """PYTHON= by its path, relative to the folder that the command was called from, or by name. Nothing is made."""
    shutil.rmtree(project / ".venv")
    (project / "own").symlink_to(sys.executable)
    path = f"{project}:{os.environ['PATH']}"
    for given, taken in ((f"{project}/own", f"{project}/own"), ("./own", f"{project}/./own"), ("own", "own")):
        found = setup(project, PYTHON=given, OLDPWD=str(project), PATH=path)
        assert (found.stdout, found.stderr) == (f"{taken}\n", "")
    (project / "old").write_text("#!/bin/sh\nexit 1\n")
    (project / "old").chmod(0o755)
    refused = setup(project, PYTHON=f"{project}/old")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == (f"setup: PYTHON={project}/old is not Python 3.11 or newer: change it, or unset it to "
                              "create .venv\n")
    assert not (project / ".venv").exists()


@pytest.mark.long
def test_an_environment_whose_python_has_gone_is_made_anew(project):
    """As after an upgrade of the system. Nothing else of the old one stays."""
    (project / ".venv" / "bin" / "python").unlink()
    (project / ".venv" / "bin" / "python").symlink_to("/usr/bin/python3.2")
    made = setup(project)
    assert made.returncode == 0 and made.stdout.endswith(f"{project}/.venv/bin/python\n"), made.stderr
    ready = (project / ".venv" / "ready").read_text()
    assert ready.startswith("4294967295 0 Python 3.") and setup(project).stdout == f"{project}/.venv/bin/python\n"


def test_requirements_that_do_not_exist_are_refused(project):
    refused = setup(project, VENV_REQUIREMENTS="requirements-v100.txt")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == ("setup: VENV_REQUIREMENTS=requirements-v100.txt doesn't exist: set it to "
                              "requirements-volta.txt, or unset it\n")


def fake_pythons(project, script):
    """A path with nothing but these Pythons, and without uv: shell scripts, which see the version range in $*."""
    (project / "bin").mkdir()
    for tool in ("bash", "sed", "awk", "cksum", "flock", "mkdir", "find", "rm", "grep"):
        (project / "bin" / tool).symlink_to(shutil.which(tool))
    for name in ("python3", *(f"python3.{minor}" for minor in range(11, 16))):
        (project / "bin" / name).write_text(f"#!{shutil.which('bash')}\n{script}\n")
        (project / "bin" / name).chmod(0o755)
    return str(project / "bin")


@pytest.mark.parametrize("script, message", [
    ("[[ $* == -V ]] && echo Python 3.10.13; exit 1",
     "found no Python 3.11 to 3.14, only Python 3.10.13: install uv, which brings one (curl "),
    ("exit 127", "found no Python 3.11 to 3.14: install uv, which brings one (curl "),
    ("[[ $* == -V ]] && echo Python 3.13.5; [[ $* != *ensurepip* ]]",
     "Python 3.13.5 is here, but can't create a virtual environment: apt install python3-venv, or install uv (curl ")],
    ids=["too old", "none", "without ensurepip"])
def test_where_no_python_fits_the_set_up_says_what_would(project, script, message):
    shutil.rmtree(project / ".venv")
    refused = setup(project, PATH=fake_pythons(project, script))
    assert (refused.returncode, refused.stdout) == (2, "") and refused.stderr.count("\n") == 1
    assert refused.stderr.startswith(f"setup: {message}")


def test_a_pytorch_for_cpus_is_ready_without_a_gpu_alone(project):
    """Where there is one, the set-up begins anew."""
    ready = project / ".venv" / "ready"
    ready.write_text(ready.read_text().removesuffix("\n") + " cpu\n")
    assert setup(project).stdout == f"{project}/.venv/bin/python\n" and ready.exists()
    assert "runtime/install.py requirements.txt" in setup(project, VENV_TORCH="cuda").stdout and not ready.exists()
    ready.write_text("4294967295 0 Python, called with -V cpu\n")
    path = f"{nvidia_smi(project, '9.0').parent}:{os.environ['PATH']}"
    assert "runtime/install.py requirements.txt" in setup(project, PATH=path).stdout and not ready.exists()


def test_a_second_setup_waits_for_the_first(project, tmp_path_factory):
    """The first is this test, which holds the lock. Then the second finds the environment ready."""
    ready, stderr = project / ".venv" / "ready", tmp_path_factory.mktemp("second") / "stderr"
    ready.rename(project / "later")
    with open(project / ".venv.lock", "w") as lock, open(stderr, "w") as to:
        fcntl.flock(lock, fcntl.LOCK_EX)
        env = {name: value for name, value in os.environ.items() if name != "PYTHON"}
        second = subprocess.Popen(["bash", "-euo", "pipefail", "-c", "source runtime/venv.sh; echo $PYTHON"], env=env,
                                  cwd=project, stdout=subprocess.PIPE, stderr=to, text=True)
        assert wait_until(lambda: stderr.read_text() == "setup: another setup is running here; waiting for it\n")
        assert second.poll() is None
        (project / "later").rename(ready)
    assert second.communicate()[0] == f"{project}/.venv/bin/python\n" and second.returncode == 0


@pytest.mark.parametrize("args, pytest_args", [
    (["--volta"], "-k train or resume or float16 or fp16"), (["--volta", "tests/plan", "-x"], "tests/plan -x")])
def test_the_tests_run_in_the_environment_for_v100(project, args, pytest_args):
    shutil.copy(ROOT / "run_tests.sh", project)
    env = {name: value for name, value in os.environ.items() if name != "PYTHON"}
    run = subprocess.run([project / "run_tests.sh", *args], env=env, capture_output=True, text=True)
    assert (run.stdout, run.stderr) == (f"Python, called with -m pytest --durations=10 {pytest_args}\n", "")


@pytest.mark.long
def test_setup_creates_venv_once_and_again_after_a_failure(project):
    shutil.rmtree(project / ".venv-volta")
    path = f"{nvidia_smi(project, '7.0').parent}:{os.environ['PATH']}"
    requirements = project / "requirements-volta.txt"
    requirements.write_text("no-package-of-this-name\n")
    missing = setup(project, PATH=path)
    assert missing.returncode == 2 and "No matching distribution found for no-package-of-this-name" in missing.stderr
    assert missing.stderr.splitlines()[-1].startswith(
        "setup: pip failed (log: .venv-volta/pip.log): without a package index, set PIP_INDEX_URL")
    python = f"{project}/.venv-volta/bin/python\n"
    requirements.write_text("")
    first, second = setup(project, PATH=path), setup(project, PATH=path)
    assert first.returncode == 0 and first.stdout.endswith(python)
    assert first.stdout.startswith("setup: installing requirements-volta.txt into .venv-volta ")
    assert (second.returncode, second.stdout, second.stderr) == (0, python, "")
