"""The CPU cores that a process may use: control groups of both versions, as files."""

import os

import pytest

from runtime import cores


@pytest.fixture
def groups(monkeypatch, tmp_path):
    """groups(text of /proc/self/cgroup, {file: content}): a machine with 16 cores and these control groups."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(16), raising=False)
    monkeypatch.setattr(cores, "PROC_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(cores, "CGROUPS", tmp_path / "fs")

    def write(text, files):
        (tmp_path / "cgroup").write_text(text)
        for name, content in files.items():
            path = tmp_path / "fs" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)

    return write


V1 = "12:memory:/docker/a1\n4:cpu,cpuacct:/docker/a1\n1:name=systemd:/docker/a1\n"


@pytest.mark.parametrize("text, files, expected", [
    ("0::/\n", {"cpu.max": "max 100000\n"}, 16),
    ("0::/\n", {"cpu.max": "200000 100000\n"}, 2),
    ("0::/\n", {"cpu.max": "250000 100000\n"}, 2),
    ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
    ("0::/\n", {"cpu.max": "9900000 100000\n"}, 16),
    ("0::/user/run\n", {"user/run/cpu.max": "max 100000\n", "user/cpu.max": "300000 100000\n"}, 3),
    ("0::/not/mounted\n", {"cpu.max": "400000 100000\n"}, 4),
    ("0::/\n", {}, 16),
    (V1, {"cpu,cpuacct/cpu.cfs_quota_us": "150000\n", "cpu,cpuacct/cpu.cfs_period_us": "50000\n"}, 3),
    (V1, {"cpu/docker/a1/cpu.cfs_quota_us": "200000\n", "cpu/docker/a1/cpu.cfs_period_us": "100000\n"}, 2),
    (V1, {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 16),
    (V1 + "0::/\n", {"unified/cpu.max": "max 100000\n", "cpu/cpu.cfs_quota_us": "500000\n",
                     "cpu/cpu.cfs_period_us": "100000\n"}, 5),
    ("0::/\n", {"cpu.max": "0 0\n"}, 16), ("nonsense\n", {"cpu.max": "200000 100000\n"}, 16)],
    ids=["v2, no quota", "v2", "v2, not whole", "v2, below one", "v2, above the machine", "v2, of a parent",
         "v2, the host's path", "v2, no file", "v1", "v1, by its path", "v1, no quota", "both", "zero", "nonsense"])
def test_usable_cores(groups, text, files, expected):
    groups(text, files)
    assert cores.usable_cores() == expected


def test_without_control_groups(groups, monkeypatch, tmp_path):
    """As on macOS."""
    monkeypatch.setattr(cores, "PROC_CGROUP", tmp_path / "none")
    assert cores.usable_cores() == 16
