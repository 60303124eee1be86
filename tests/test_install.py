"""runtime/install.py, which runtime/venv.sh installs the packages with: pip, uv, PyTorch for CPUs, and what goes wrong.

The packages are wheels that the tests write: one module each, in the place of PyTorch and DeepSpeed."""

import functools
import http.server
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import zipfile

import pytest
from conftest import ROOT, nvidia_smi, wait_until

from runtime import install

DISK_FULL = """Collecting torch==2.11.0
ERROR: Exception:
Traceback (most recent call last):
  File "urllib3/response.py", line 561, in read
OSError: [Errno 28] No space left on device
"""
PIP = """Collecting torch==2.11.0
  Downloading torch-2.11.0-cp311-cp311-manylinux_2_28_x86_64.whl.metadata (29 kB)
  Downloading https://files/torch-2.11.0-cp311-cp311-manylinux_2_28_x86_64.whl (530.6 MB)
  Using cached nvidia_cublas-13.1.0.3-py3-none-manylinux_2_27_x86_64.whl (423.1 MB)
  Downloading deepspeed-0.19.8.tar.gz (1.7 MB)
Installing collected packages: nvidia-cublas, torch, deepspeed
"""
UV = """Resolved 116 packages in 4.15s
Downloading torch (506.0MiB)
Downloading nvidia-cublas (403.5MiB)
   Building deepspeed==0.19.8
 Downloaded nvidia-cublas
 Downloaded torch
Prepared 116 packages in 54.22s
"""


def write_wheel(folder, name, version, code=""):
    """A wheel with one module of this code. Return its name."""
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    file = f"{name}-{version}-cp3{sys.version_info.minor}-none-any.whl"
    if "+cpu" in version:
        file = file.replace("-any", f"-linux_{install.platform.machine()}")
    with zipfile.ZipFile(folder / file, "w") as wheel:
        wheel.writestr(f"{name}.py", code)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        tag = file.removesuffix(".whl").split("-", 2)[2]
        wheel.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        wheel.writestr(f"{info}/RECORD", "")
    return file


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """An environment with pip alone."""
    folder = tmp_path_factory.mktemp("base")
    subprocess.run([sys.executable, "-m", "venv", folder / ".venv"], check=True)
    return folder


@pytest.fixture
def project(base):
    """A folder with .venv, which has pip alone, a folder wheels, and requirements.txt with PyTorch."""
    for path in base.iterdir():
        if path.name != ".venv":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in (*base.glob(".venv/lib/python*/site-packages/torch*"), *base.glob(".venv/ready")):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (base / "requirements.txt").write_text("torch==2.11.0\n")
    write_wheel(base / "wheels", "torch", "2.11.0")
    return base


def environment(project, uv=None, **env):
    """Variables for a set-up that has no index but `wheels`. uv: a script in its place, or it isn't on the path."""
    folders = [folder for folder in os.environ["PATH"].split(":") if not shutil.which("uv", path=folder)]
    if uv is not None:
        (project / "bin").mkdir()
        (project / "bin" / "uv").write_text(f"#!/bin/bash\n{uv}\n")
        (project / "bin" / "uv").chmod(0o755)
        folders.insert(0, f"{project}/bin")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_", "VENV_"))}
    return {**kept, "PATH": ":".join(folders), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": f"{project}/wheels",
            "PIP_CONFIG_FILE": os.devnull, **env}


def command(project):
    return [project / ".venv" / "bin" / "python", "-I", ROOT / "runtime" / "install.py", "requirements.txt", "stamp"]


def run(project, uv=None, **env):
    """Run install.py in the project."""
    done = subprocess.run(command(project), cwd=project, env=environment(project, uv, **env), capture_output=True,
                          text=True)
    assert "Traceback" not in done.stderr and not (project / ".venv" / "tmp").exists()
    return done


def modules(project, name="torch.py"):
    return [*project.glob(f".venv/lib/python*/site-packages/{name}")]


@pytest.mark.long
def test_pip_installs_into_venv_wherever_its_variables_point(project):
    done = run(project, PIP_TARGET=f"{project}/target", PIP_PREFIX=f"{project}/prefix", PIP_USER="1", PIP_DRY_RUN="1")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("setup: installing requirements.txt into .venv with pip (once; 2.9 GB to download")
    assert modules(project) and not (project / "target").exists() and not (project / "prefix").exists()
    assert (project / ".venv" / "ready").read_text() == "stamp\n"


@pytest.mark.long
@pytest.mark.parametrize("config", ["", "[global]\ntarget = elsewhere\n"], ids=["broken", "target in pip.conf"])
def test_what_does_not_import_is_not_ready(project, config):
    """A library that is missing, and a place that no variable names."""
    if not config:
        write_wheel(project / "wheels", "torch", "2.11.0", "raise ImportError('libcudnn.so.9: cannot open')\n")
    (project / "pip.conf").write_text(config)
    done = run(project, PIP_CONFIG_FILE=f"{project}/pip.conf")
    reason = "ModuleNotFoundError: No module named 'torch'" if config else "ImportError: libcudnn.so.9: cannot open"
    assert done.returncode == 2 and not (project / ".venv" / "ready").exists()
    place = "if pip config list names another place (target, prefix), remove that, and " if config else ""
    assert done.stderr == ("setup: torch was installed, but doesn't import (log: .venv/pip.log): "
                           f"{reason}: {place}start over with rm -rf .venv\n")


@pytest.mark.long
def test_uv_is_taken_with_pips_configuration(project):
    """A script in its place, which notes how it was called, and installs with pip."""
    links = f"{project}/wheels /folder/that/is/not/there https://links/"
    uv = (f'printf "%s\\n" "$@" >{project}/args; env | grep -E "^(UV_|TMPDIR|DS_BUILD|PIP_TARGET)" >{project}/env\n'
          f"{project}/.venv/bin/python -m pip install -q -r requirements.txt")
    done = run(project, uv, PIP_INDEX_URL="https://mirror/simple", PIP_EXTRA_INDEX_URL="https://a/ https://b/",
               PIP_CONSTRAINT="/c.txt", PIP_TARGET="/nowhere", UV_PYTHON="3.7", PIP_TIMEOUT="60", PIP_FIND_LINKS=links)
    assert done.returncode == 2  # /c.txt doesn't exist, so what pip does is refused in both
    args = (project / "args").read_text().split("\n")
    assert args[:3] == ["pip", "install", "--python"] and args[-4:] == ["-r", "requirements.txt", "pip", ""]
    assert args[4:7] == ["--no-index", f"--find-links={project}/wheels", "--find-links=https://links/"]
    assert set((project / "env").read_text().splitlines()) == {
        "UV_DEFAULT_INDEX=https://mirror/simple", "UV_EXTRA_INDEX_URL=https://a/ https://b/", "UV_CONSTRAINT=/c.txt",
        "UV_HTTP_TIMEOUT=60", "UV_INDEX_STRATEGY=unsafe-best-match", f"TMPDIR={project}/.venv/tmp", "DS_BUILD_OPS=0"}


@pytest.mark.long
def test_pip_takes_over_where_uv_fails(project):
    done = run(project, "echo 'error: no route'; echo '  Caused by: dns error'; exit 2")
    assert (done.returncode, done.stderr) == (0, "setup: uv failed (Caused by: dns error); now with pip\n")
    assert modules(project) and (project / ".venv" / "ready").exists()


@pytest.mark.long
@pytest.mark.skipif(shutil.which("uv") is None, reason="needs uv")
def test_uv_itself(project):
    (project / ".venv" / "torch.txt").write_text("torch==2.11.0\n")
    env = environment(project, PATH=os.environ["PATH"], PIP_CONSTRAINT=f"{project}/.venv/torch.txt")
    done = subprocess.run(command(project), cwd=project, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and "into .venv with uv" in done.stdout
    assert modules(project) and "torch==2.11.0" in (project / ".venv" / "pip.log").read_text()


@pytest.fixture
def mirror(project):
    """(Its address, what it was asked for): an index with the packages of the folder `wheels`, and nothing else."""
    asked = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            asked.append(self.path)

    (project / "simple").mkdir()
    (project / "wheels").rename(project / "simple" / "torch")
    serve = functools.partial(Handler, directory=project)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}/simple", asked
        server.shutdown()


@pytest.mark.long
@pytest.mark.parametrize("tool", [
    "pip", pytest.param("uv", marks=pytest.mark.skipif(shutil.which("uv") is None, reason="needs uv"))])
def test_a_mirror_that_pip_conf_alone_names(project, mirror, tool):
    address, asked = mirror
    (project / "home" / ".config" / "pip").mkdir(parents=True)
    (project / "home" / ".config" / "pip" / "pip.conf").write_text(f"[global]\nindex-url = {address}\n")
    env = environment(project, HOME=f"{project}/home")
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS", "PIP_CONFIG_FILE", "XDG_CONFIG_HOME"):
        env.pop(name, None)
    if tool == "uv":
        env["PATH"] = os.environ["PATH"]
    done = subprocess.run(command(project), cwd=project, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and f"into .venv with {tool} (once; 2.9 GB" in done.stdout
    assert modules(project) and asked


@pytest.mark.long
def test_an_interrupted_installation_leaves_no_stamp(project):
    """Ctrl-C, which all processes of a terminal get, while uv runs."""
    env = environment(project, f"touch {project}/started; sleep 1000")
    job = subprocess.Popen(command(project), cwd=project, env=env, stderr=subprocess.PIPE, text=True,
                           start_new_session=True)
    assert wait_until((project / "started").exists)
    os.killpg(job.pid, signal.SIGINT)
    assert job.communicate()[1] == "setup: interrupted: run this again\n" and job.returncode == -signal.SIGINT
    assert not (project / ".venv" / "ready").exists() and not (project / ".venv" / "tmp").exists()


@pytest.mark.long
def test_what_an_interrupted_pip_left_is_installed_again(project):
    run(project)
    (module,) = modules(project)
    (installer,) = project.glob(".venv/lib/python*/site-packages/torch-*/INSTALLER")
    module.unlink()
    installer.unlink()
    assert run(project).returncode == 0 and module.exists()


@pytest.fixture
def cpu_wheels(tmp_path, monkeypatch):
    """A page like PyTorch's with a build for CPUs, which notes what it was asked for."""
    write_wheel(tmp_path / "torch", "torch", "2.11.0+cpu")
    asked = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            asked.append(self.path)

    serve = functools.partial(Handler, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        threading.Thread(target=server.serve_forever).start()
        monkeypatch.setattr(install, "CPU_WHEELS", f"http://127.0.0.1:{server.server_port}/torch/")
        yield asked
        server.shutdown()


@pytest.fixture
def no_gpu(tmp_path, monkeypatch):
    """A machine with neither nvidia-smi nor Slurm. Nothing is installed."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("VENV_TORCH", raising=False)
    monkeypatch.setattr(install, "VENV", tmp_path / ".venv")


def chosen(config=(), text="torch==2.11.0   # tensors\n"):
    return install.cpu_wheels(text, dict(config))


def test_a_machine_without_gpu_takes_pytorch_for_cpus(cpu_wheels, no_gpu, tmp_path, monkeypatch):
    page, what = chosen()
    assert page == install.CPU_WHEELS and what == "about 0.6 GB to download for PyTorch without CUDA"
    nvidia_smi(tmp_path, "9.0")
    assert chosen()[0] is None
    monkeypatch.setenv("VENV_TORCH", "cpu")
    assert chosen()[0] == page
    monkeypatch.setenv("VENV_TORCH", "cuda")
    (tmp_path / "nvidia-smi").unlink()
    assert chosen() == (None, "2.9 GB to download and 5.8 GB on the disk for PyTorch with CUDA")
    monkeypatch.setenv("VENV_TORCH", "rocm")
    with pytest.raises(SystemExit) as stopped:
        chosen()
    assert stopped.value.code == 2


def test_pytorchs_index_is_not_asked_where_pip_or_slurm_says_so(cpu_wheels, no_gpu, tmp_path):
    for config in ({"index-url": "https://mirror/simple"}, {"no-index": "1"}):
        assert chosen(config)[0] is None
    (tmp_path / "sbatch").write_text("")
    (tmp_path / "sbatch").chmod(0o755)
    assert chosen()[0] is None
    (tmp_path / "sbatch").unlink()
    there = tmp_path / ".venv" / "lib" / "python3.11" / "site-packages" / "torch-2.11.0.dist-info"
    there.mkdir(parents=True)
    assert chosen() == (None, "PyTorch is there")
    assert not cpu_wheels


def test_an_index_without_this_pytorch_leaves_the_build_for_cuda(cpu_wheels, no_gpu, monkeypatch, capsys):
    page, what = chosen(text="torch==2.12.0\n")
    assert page is None and what.startswith("2.9 GB to download")
    assert what.endswith("builds for CPUs can't be used: it has no torch==2.12.0 for this Python and machine")
    monkeypatch.setattr(install, "CPU_WHEELS", "http://127.0.0.1:9/")
    page, what = chosen()
    assert page is None and what.startswith("2.9 GB to download") and "refused" in what
    monkeypatch.setenv("VENV_TORCH", "cpu")
    with pytest.raises(SystemExit) as stopped:
        chosen()
    assert stopped.value.code == 2 and capsys.readouterr().err.count("\n") == 1


@pytest.mark.long
def test_the_build_for_cpus_and_back(project, cpu_wheels, monkeypatch):
    """Each replaces the other, though pip takes 2.11.0+cpu for 2.11.0, and .venv/ready tells which it is."""
    (project / "install.py").write_text((ROOT / "runtime" / "install.py").read_text().replace(
        '"https://download.pytorch.org/whl/cpu/torch/"', repr(install.CPU_WHEELS)))
    for build, suffix in (("cuda", ""), ("cpu", "+cpu"), ("cuda", "")):
        python = project / ".venv" / "bin" / "python"
        done = subprocess.run([python, "-I", "install.py", "requirements.txt", "stamp"], cwd=project,
                              env=environment(project, VENV_TORCH=build), capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        assert [path.name for path in modules(project, "torch-*")] == [f"torch-2.11.0{suffix}.dist-info"]
        assert (project / ".venv" / "ready").read_text() == f"stamp{' cpu' if suffix else ''}\n"


def test_pips_files_and_variables(tmp_path, monkeypatch):
    """Later files win over earlier ones, [install] over [global], variables over both; "0" is as if unset."""
    monkeypatch.setattr(install, "VENV", tmp_path)
    (tmp_path / "xdg" / "pip").mkdir(parents=True)
    (tmp_path / "xdg" / "pip" / "pip.conf").write_text(
        "[global]\nindex-url = https://first\ntimeout = 9\nextra-index-url = https://a\n  https://b\n")
    (tmp_path / "named").write_text("[global]\nindex_url = https://second\nno-index = 0\n[install]\ntimeout = 10\n")
    env = {"HOME": str(tmp_path), "XDG_CONFIG_DIRS": f"{tmp_path}/none", "XDG_CONFIG_HOME": f"{tmp_path}/xdg",
           "PIP_CONFIG_FILE": f"{tmp_path}/named"}
    config = {"index-url": "https://second", "timeout": "10", "extra-index-url": "https://a\nhttps://b",
              "config-file": f"{tmp_path}/named"}
    found = install.pip_configuration(env)
    assert {name: found.get(name) for name in ("no-index", *config)} == {"no-index": None, **config}
    assert install.pip_configuration({**env, "PIP_INDEX_URL": "https://third"})["index-url"] == "https://third"
    assert "index-url" not in install.pip_configuration({**env, "PIP_CONFIG_FILE": os.devnull})
    variables = install.uv_variables(config, {"UV_HTTP_TIMEOUT": "5"})  # what is set for uv itself stays
    assert variables == {"UV_DEFAULT_INDEX": "https://second", "UV_EXTRA_INDEX_URL": "https://a https://b",
                         "UV_INDEX_STRATEGY": "unsafe-best-match"}
    assert "UV_DEFAULT_INDEX" not in install.uv_variables(config, {"UV_INDEX_URL": "https://own"})


def test_a_full_disk_is_named_with_its_fix(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(install, "VENV", tmp_path)
    monkeypatch.setattr(install, "LOG", tmp_path / "pip.log")
    install.LOG.write_text(DISK_FULL)
    with pytest.raises(SystemExit):
        install.explain_failure()
    cause, advice = capsys.readouterr().err.splitlines()
    assert cause == "OSError: [Errno 28] No space left on device"
    assert re.search(r"^setup: pip failed \(log: .*/pip.log\): free 12 GB here and in pip's cache, ", advice)
    install.LOG.write_text("ERROR: No matching distribution found for torch==2.11.0\nWARNING: there is a new pip\n")
    with pytest.raises(SystemExit):
        install.explain_failure()
    cause, advice = capsys.readouterr().err.splitlines()
    assert cause == "ERROR: No matching distribution found for torch==2.11.0"
    assert "): without a package index, set PIP_INDEX_URL to a mirror; then run this again, or start over" in advice


@pytest.mark.parametrize("output, lines", [
    (PIP, ["0 MB so far, now torch-2.11.0 (531 MB)", "531 MB so far, now nvidia_cublas-13.1.0.3 (423 MB)",
           "954 MB so far, now deepspeed-0.19.8.tar.gz (2 MB)", "955 MB, now unpacking"]),
    (UV, ["0 MB so far, now torch (531 MB)", "0 MB so far, now nvidia-cublas (423 MB)",
          "423 MB so far, nvidia-cublas is there", "954 MB so far, torch is there", "954 MB, now unpacking"])],
    ids=["pip", "uv"])
def test_the_progress(output, lines, capsys):
    """On a terminal, one line that is written again; elsewhere, a line for each large package."""
    for on_terminal in (True, False):
        progress = install.Progress()
        progress.on_terminal = on_terminal
        for line in output.splitlines():
            progress.read(line)
        progress.clear()
        printed = capsys.readouterr().out
        if on_terminal:
            shown = [text.removeprefix("\033[Ksetup: ") for text in printed.split("\r")]
            assert [text for text in shown if text not in ("", "\033[K") and "metadata" not in text] == lines
        else:
            assert printed.splitlines() == [f"setup: {text}" for text in lines if "deepspeed" not in text]
