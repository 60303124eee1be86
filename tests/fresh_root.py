"""Try README's two commands on a fresh Debian, as an ordinary user: by hand, as root, with debootstrap installed.

    python tests/fresh_root.py trixie --installer=pip --to=results/cpu_debian13_pip.json
    python tests/fresh_root.py sid --installer=uv --root=/var/tmp/sid --cache=/var/tmp/cache --tests

It makes a minimal Debian in a folder, with Python and git alone, clones the commit that is checked out here, and runs
./run_deepspeed_xl.sh there, with --tests also ./run_tests.sh. The record has the seconds, the download, the disk and
what was printed. /tmp there is in memory, 2 GB. pip and uv get this machine's settings. Without root, or without
debootstrap, it says so, and nothing is tried."""

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
PACKAGES = "python3,python3-venv,git,ca-certificates"
SETTINGS = ("PIP_", "UV_", "SSL_CERT_FILE", "VENV_")  # variables of this machine that hold there, too
FILES = ("/etc/resolv.conf", "/etc/hosts", "/etc/ssl/certs/ca-certificates.crt", "/etc/pip.conf")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", help="bookworm, trixie or sid")
    parser.add_argument("--installer", choices=["pip", "uv"], default="pip", help="uv: that of this machine's path")
    parser.add_argument("--root", help="the folder for the Debian, which stays; otherwise a temporary one")
    parser.add_argument("--cache", help="a folder for the caches of pip and uv, to share between roots")
    parser.add_argument("--tests", action="store_true", help="also run ./run_tests.sh")
    parser.add_argument("--to", help="the record's file; otherwise it is printed")
    args = parser.parse_args()
    missing = missing_tool(args.installer)
    if missing:
        print(f"skipped: {missing}")
        return
    with contextlib.ExitStack() as stack:
        root = Path(args.root or stack.enter_context(tempfile.TemporaryDirectory(prefix="fresh-", dir="/var/tmp")))
        make_debian(root, args.suite)
        stack.enter_context(mounted(root, args.cache))
        record = try_commands(root, args)
    text = json.dumps(record, indent=1) + "\n"
    if args.to:
        Path(args.to).write_text(text)
    else:
        print(text)


def missing_tool(installer):
    """Return what this machine lacks, or None."""
    if os.geteuid():
        return "needs root, for debootstrap and chroot"
    for tool in ("debootstrap", "chroot", "mount", *(["uv"] if installer == "uv" else [])):
        if shutil.which(tool) is None:
            return f"needs {tool}"


def make_debian(root, suite):
    """A minimal Debian in `root`, unless there is one, with a user and a clone of this commit."""
    if not (root / "etc" / "debian_version").exists():
        subprocess.run(["debootstrap", "--variant=minbase", f"--include={PACKAGES}", suite, root], check=True)
    for file in FILES:
        if Path(file).exists():
            shutil.copy(file, f"{root}{file}")
    home = root / "home" / USER
    if not home.exists():
        subprocess.run(["chroot", root, "useradd", "--create-home", "--shell=/bin/bash", USER], check=True)
    shutil.rmtree(home / "gpt2-deepspeed", ignore_errors=True)
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", ROOT, home / "gpt2-deepspeed"], check=True)
    subprocess.run(["chroot", root, "chown", "-R", f"{USER}:{USER}", f"/home/{USER}/gpt2-deepspeed"], check=True)


@contextlib.contextmanager
def mounted(root, cache):
    """Mount what a running system has, and the shared cache in place of the user's, until the end."""
    (root / "sys").mkdir(exist_ok=True)
    mounts = [("proc", "-t", "proc", "proc"), ("dev", "--bind", "/dev"), ("dev/shm", "-t", "tmpfs", "tmpfs"),
              ("tmp", "-t", "tmpfs", "-o", "size=2g,mode=1777", "tmpfs")]
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
            subprocess.run(["chroot", root, "chown", "-R", f"{USER}:{USER}", f"/home/{USER}/.cache"], check=True)
        yield
    finally:
        for place in reversed(done):
            subprocess.run(["umount", "--lazy", place], check=True)


def try_commands(root, args):
    """Run the commands as the user. Return the record."""
    tool = root / "usr" / "local" / "bin" / "uv"
    tool.unlink(missing_ok=True)
    if args.installer == "uv":
        shutil.copy(os.path.realpath(shutil.which("uv")), tool)
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    record = {
        "what": "a fresh Debian of packages " + PACKAGES + " in a folder, as an ordinary user, /tmp in memory with "
                "2 GB: seconds of the installation and of the rest of the first ./run_deepspeed_xl.sh"
                + (", and of ./run_tests.sh" if args.tests else "") + "; GB of .venv. console: what it printed",
        "command": "./run_deepspeed_xl.sh" + (" && ./run_tests.sh" if args.tests else ""),
        "commit": git("rev-parse", "HEAD"), "date": str(datetime.date.today()),
        "hardware": f"{os.cpu_count()} CPU cores, {memory_gb:.0f} GB, {os.uname().machine}, shared with other jobs",
        "suite": args.suite, "debian": (root / "etc" / "debian_version").read_text().strip(),
        "python": in_root(root, "python3 -V")[1][0].removeprefix("Python "), "installer": args.installer,
        "cache": cache_of(args),
    }
    code, lines, seconds = in_root(root, "./run_deepspeed_xl.sh")
    started = next((i for i, line in enumerate(lines) if line.startswith("No CUDA GPU")), len(lines))
    record |= {"exit_code": code, "install_s": round(seconds[started - 1], 1) if started else None,
               "rest_s": round(seconds[-1] - seconds[started - 1], 1), "console": lines,
               "venv_gb": round(folder_gb(root / "home" / USER / "gpt2-deepspeed" / ".venv"), 2)}
    record["best_val_loss"] = next((float(found[1]) for line in lines
                                    if (found := re.match(r"best validation loss ([\d.]+)", line))), None)
    if args.tests:
        code, lines, seconds = in_root(root, "./run_tests.sh")
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        record |= {"tests_exit_code": code, "tests_s": round(seconds[-1], 1), "tests": lines[-1:], "failed": failed}
    return record


def cache_of(args):
    """Say what the installer had in its cache before."""
    folder = Path(args.cache or "/nowhere") / args.installer
    return f"shared with other roots, {folder_gb(folder):.1f} GB before" if folder.exists() else "empty"


def in_root(root, command):
    """Run a command in the clone as the user. Return its exit code, its lines, and the second of each."""
    kept = {name: value for name, value in os.environ.items() if name.startswith(SETTINGS)}
    env = {**kept, "HOME": f"/home/{USER}", "PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
    env.pop("UV_CACHE_DIR", None)
    here = f"cd ~/gpt2-deepspeed && {command}"
    words = [shutil.which("chroot"), f"--userspec={USER}:{USER}", root, "bash", "-c", here]
    begin, lines, seconds = time.monotonic(), [], []
    with subprocess.Popen(words, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True) as job:
        for line in job.stdout:
            print(line, end="", file=sys.stderr, flush=True)
            lines.append(line.rstrip("\n"))
            seconds.append(time.monotonic() - begin)
    return job.returncode, lines, [*seconds, time.monotonic() - begin]


def git(*args):
    return subprocess.run(["git", *args], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def folder_gb(folder):
    """The space of a folder's files on the disk, a file with several names once."""
    done = subprocess.run(["du", "--summarize", "--block-size=1", folder], capture_output=True, text=True)
    return int(done.stdout.split()[0]) / 1e9


if __name__ == "__main__":
    main()
