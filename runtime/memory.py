"""How much host memory may be taken."""

from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")  # version 2; a container sees its own here


def available():
    """Bytes of host memory that can be taken without killing anyone: what is free, or what a container's limit leaves;
    cached files can go at any time."""
    free = psutil.virtual_memory().available
    try:
        limit = int((CGROUP / "memory.max").read_text())
        used = int((CGROUP / "memory.current").read_text())
        cached = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())["inactive_file"]
    except (OSError, ValueError, KeyError):  # no such cgroup, or its limit is "max"
        return free
    return min(free, limit - used + int(cached))
