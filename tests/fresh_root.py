"""Try README's two commands on a fresh Debian, as an ordinary user. By hand, and as root.

    python tests/fresh_root.py trixie --installer=pip --to=results/cpu_install_debian13_pip.json
    python tests/fresh_root.py trixie --memory=4
    python tests/fresh_root.py sid --installer=uv --root=/var/tmp/sid --cache=/var/tmp/cache --tests

It makes a minimal Debian in a folder by debootstrap, with Python and git alone, and clones the
commit that is checked out here. There it runs ./run_deepspeed_xl.sh, or with --tests
./run_tests.sh. The record has the seconds, the download, the disk and what was printed. /tmp there
is in memory, 2 GB. pip and uv get this machine's settings. Without root, or without debootstrap,
nothing is tried."""

import argparse
import contextlib
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
USER = "ada"
CLONE = f"home/{USER}/gpt2-deepspeed"  # in the root
PACKAGES = "python3,python3-venv,git,ca-certificates"
# variables of this machine that hold there, too
SETTINGS = ("PIP_", "UV_", "SSL_CERT_FILE", "VENV_")
FILES = ("/etc/resolv.conf", "/etc/hosts", "/etc/ssl/certs/ca-certificates.crt", "/etc/pip.conf")
CGROUPS = Path("/sys/fs/cgroup")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("suite", help="bookworm, trixie or sid")
    add("--installer", choices=["pip", "uv"], default="pip", help="uv: that of this machine's path")
    add("--root", help="the folder for the Debian, which stays; otherwise a temporary one")
    add("--cache", help="a folder for the caches of pip and uv, to share between roots")
    add("--tests", action="store_true", help="run ./run_tests.sh, not the demonstration")
    add("--memory", type=float, help="GB of RAM, by a control group without swap; otherwise all")
    add("--to", help="the record's file; otherwise it is printed")
    args = parser.parse_args()
    missing = missing_tool(args.installer)
    if missing:
        print(f"skipped: {missing}")
        return
    with contextlib.ExitStack() as stack:
        root = args.root
        if root is None:
            folder = tempfile.TemporaryDirectory(prefix="fresh-", dir="/var/tmp")
            root = stack.enter_context(folder)
        root = Path(root)
        make_debian(root, args.suite)
        stack.enter_context(mounted(root, args.cache))
        group = stack.enter_context(memory_group(args.memory)) if args.memory else None
        record = describe(root, args)
        record |= try_tests(root, group) if args.tests else try_demo(root, group)
    text = json.dumps(record, indent=1) + "\n"
    if args.to:
        Path(args.to).write_text(text)
    else:
        print(text)


def missing_tool(installer):
    """Return what is missing on this machine, or None."""
    if os.geteuid():
        return "needs root, for debootstrap and chroot"
    tools = ["debootstrap", "chroot", "mount"]
    if installer == "uv":
        tools.append("uv")
    for tool in tools:
        if shutil.which(tool) is None:
            return f"needs {tool}"


def make_debian(root, suite):
    """A minimal Debian in `root`, unless there is one, with a user and a clone of this commit."""
    if not (root / "etc" / "debian_version").exists():
        command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", suite, root]
        subprocess.run(command, check=True)
    for file in FILES:
        if Path(file).exists():
            shutil.copy(file, f"{root}{file}")
    if not (root / "home" / USER).exists():
        command = ["chroot", root, "useradd", "--create-home", "--shell=/bin/bash", USER]
        subprocess.run(command, check=True)
    shutil.rmtree(root / CLONE, ignore_errors=True)
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", ROOT, root / CLONE], check=True)
    give_to_user(root, f"/{CLONE}")


def give_to_user(root, folder):
    """Make the user of the root the owner of a folder there."""
    subprocess.run(["chroot", root, "chown", "-R", f"{USER}:{USER}", folder], check=True)


@contextlib.contextmanager
def mounted(root, cache):
    """Mount what a running system has, and the shared cache in place of the user's."""
    (root / "sys").mkdir(exist_ok=True)
    mounts = [
        ("proc", "-t", "proc", "proc"),
        ("dev", "--bind", "/dev"),
        ("dev/pts", "--bind", "/dev/pts"),  # a terminal for the tests of one
        ("dev/shm", "-t", "tmpfs", "tmpfs"),
        ("tmp", "-t", "tmpfs", "-o", "size=2g,mode=1777", "tmpfs"),
    ]
    if cache:
        Path(cache).mkdir(parents=True, exist_ok=True)
        (root / "home" / USER / ".cache").mkdir(exist_ok=True)
        mounts.append((f"home/{USER}/.cache", "--bind", cache))
    done = []
    try:
        for place, *how in mounts:
            subprocess.run(["mount", *how, root / place], check=True)
            done.append(root / place)
        if cache:
            give_to_user(root, f"/home/{USER}/.cache")
        yield
    finally:
        for place in reversed(done):
            subprocess.run(["umount", "--lazy", place], check=True)


@contextlib.contextmanager
def memory_group(gigabytes):
    """A control group with so much memory, files of /tmp included, and no swap."""
    size = int(gigabytes * 1e9)
    if (CGROUPS / "cgroup.controllers").exists():
        group = CGROUPS / "fresh_root"
        limits = {"memory.max": size, "memory.swap.max": 0}
    else:
        group = CGROUPS / "memory" / "fresh_root"
        limits = {"memory.limit_in_bytes": size, "memory.swappiness": 0}
    group.mkdir()
    try:
        for name, value in limits.items():
            (group / name).write_text(str(value))
        yield group
    finally:
        group.rmdir()


def describe(root, args):
    """The head of the record. It also puts uv into the root, or takes it out."""
    tool = root / "usr" / "local" / "bin" / "uv"
    tool.unlink(missing_ok=True)
    if args.installer == "uv":
        shutil.copy(os.path.realpath(shutil.which("uv")), tool)
    gigabytes = args.memory
    if gigabytes is None:
        gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    hardware = f"{os.cpu_count()} CPU cores, {gigabytes:.0f} GB, {os.uname().machine}"
    _, (version,), _ = in_root(root, "python3 -V")
    return {
        "what": f"a fresh Debian of packages {PACKAGES} in a folder, as an ordinary user, with "
                "/tmp in memory, 2 GB. Seconds of each part, and .venv in GB",
        "command": "./run_tests.sh" if args.tests else "./run_deepspeed_xl.sh",
        "commit": git("rev-parse", "HEAD"),
        "date": str(datetime.date.today()),
        "hardware": f"{hardware}, shared with other jobs",
        "memory_limit_gb": args.memory,
        "suite": args.suite,
        "debian": (root / "etc" / "debian_version").read_text().strip(),
        "python": version.removeprefix("Python "),
        "installer": args.installer,
        "cache": cache_of(args),
    }


def try_demo(root, group):
    """Run README's command as the user. Return what it printed, with its seconds and its loss."""
    code, lines, seconds = in_root(root, "./run_deepspeed_xl.sh", group)
    begins = [number for number, line in enumerate(lines) if line.startswith("No CUDA GPU")]
    losses = re.findall(r"^best validation loss ([\d.]+)", "\n".join(lines), re.M)
    install_s = seconds[begins[0] - 1] if begins else None
    return {
        "exit_code": code,
        "install_s": round(install_s, 1) if begins else None,
        "rest_s": round(seconds[-1] - (install_s or 0.0), 1),
        "console": lines,
        "venv_gb": round(folder_gb(root / CLONE / ".venv"), 2),
        "best_val_loss": float(losses[0]) if losses else None,
    }


def try_tests(root, group):
    """Install, and run the tests as the user. Return their last line and what failed."""
    in_root(root, "./install.sh", group)
    code, lines, seconds = in_root(root, "./run_tests.sh", group)
    noted = [line for line in lines if line.startswith(("FAILED", "ERROR", "SKIPPED"))]
    return {
        "exit_code": code,
        "tests_s": round(seconds[-1], 1),
        "tests": lines[-1],
        "noted": noted,
    }


def cache_of(args):
    """Say what the installer had in its cache before."""
    folder = Path(args.cache or "/nowhere") / args.installer
    if not folder.exists():
        return "empty"
    return f"shared with other roots, {folder_gb(folder):.1f} GB before"


def in_root(root, command, group=None):
    """Run a command in the clone as the user. Return its exit code, its lines, the second of each.

    group: the folder of a control group that it joins.
    """
    env = {name: value for name, value in os.environ.items() if name.startswith(SETTINGS)}
    env |= {"HOME": f"/home/{USER}", "PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
    env.pop("UV_CACHE_DIR", None)
    words = [shutil.which("chroot"), f"--userspec={USER}:{USER}", root, "bash", "-c"]
    words.append(f"cd /{CLONE} && {command}")
    if group:
        words = ["bash", "-c", 'echo $$ >"$0/cgroup.procs" && exec "$@"', group, *words]
    begin = time.monotonic()
    lines = []
    seconds = []
    with subprocess.Popen(
        words, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace",
    ) as job:
        for line in job.stdout:
            print(line, end="", file=sys.stderr, flush=True)
            lines.append(line.rstrip("\n"))
            seconds.append(time.monotonic() - begin)
    return job.returncode, lines, [*seconds, time.monotonic() - begin]


def git(*args):
    done = subprocess.run(["git", *args], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def folder_gb(folder):
    """The space of a folder's files on the disk, a file with several names once."""
    command = ["du", "--summarize", "--block-size=1", folder]
    done = subprocess.run(command, capture_output=True, text=True)
    return int(done.stdout.split()[0]) / 1e9


if __name__ == "__main__":
    main()
