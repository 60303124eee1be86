"""Count the CPU cores that this process may use."""

import os
from pathlib import Path

PROC_CGROUP = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use, at least 1.

    It is the number of cores that it may run on (`taskset`, Slurm), or a container's CPU quota
    (`docker run --cpus=2`), whichever is lower. Of a quota of 2.5 cores, 2 count: more threads than
    that would be stopped for a part of each period.
    """
    cores = allowed_cores()
    quota = cpu_quota()
    if quota is None:
        return cores
    return max(1, min(cores, int(quota)))


def allowed_cores() -> int:
    """Return the number of CPU cores that this process may run on, whatever its quota."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS


def cpu_quota() -> float | None:
    """Return the lowest CPU quota of this process's control groups, in cores, or None."""
    quotas = []
    for folder in control_groups():
        quota = quota_of(folder)
        if quota is not None:
            quotas.append(quota)
    return min(quotas, default=None)


def control_groups() -> list[Path]:
    """Return the folders of the control groups that limit this process, of version 1 and 2.

    A line of /proc/self/cgroup is NUMBER:CONTROLLERS:PATH. Version 2 has one line, without
    controllers. In a container, PATH may be that of the host, which isn't mounted: then the
    container's own group is at the mount point itself.
    """
    try:
        lines = PROC_CGROUP.read_text().splitlines()
    except OSError:  # not Linux
        return []
    folders = []
    for line in lines:
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        controllers = parts[1].split(",")
        path = parts[2].strip("/")
        for mount in mount_points(controllers):
            group = mount / path
            folders.append(group)
            # A group is also limited by those that it is in
            folders += [parent for parent in group.parents if parent.is_relative_to(mount)]
    return folders


def mount_points(controllers: list[str]) -> list[Path]:
    """Return where the hierarchy of these controllers is mounted, if it limits CPU time."""
    if controllers == [""]:  # version 2; beside version 1, it is in a folder of its own
        return [CGROUPS, CGROUPS / "unified"]
    if "cpu" in controllers:  # the folder is named after all of them, or is a link
        return [CGROUPS / ",".join(controllers), CGROUPS / "cpu"]
    return []


def quota_of(folder: Path) -> float | None:
    """Return the CPU quota of one control group, in cores, or None if it has none."""
    # Version 2 has both numbers in one file, "200000 100000"; version 1 has two files
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
        except OSError:
            return None

    # Without a quota, version 2 says "max", and version 1 says "-1"
    try:
        cores = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        return None
    if cores <= 0:
        return None
    return cores
