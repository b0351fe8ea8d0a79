"""How much host memory this process may take."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

_LOCAL_RANKS = (  # how many processes of a job run on this machine, as launchers say it
    "LOCAL_WORLD_SIZE",  # torchrun, accelerate, Lightning
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_NTASKS_PER_NODE",
)
_CGROUP_ROOT = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 62  # what version 1 says where there is none is somewhat above


def default_host_limit() -> int:
    """Half of what the machine has available, shared with the job's other processes on it."""
    return available_host_bytes() // 2 // local_ranks()


def local_ranks(environment: Mapping[str, str] = os.environ) -> int:
    """How many processes of this job share the machine, by the launcher's word; 1 without any."""
    for name in _LOCAL_RANKS:
        found = environment.get(name, "")
        if found.isdecimal() and int(found) > 0:
            return int(found)
    return 1


def available_host_bytes(
    meminfo: Path = Path("/proc/meminfo"),
    cgroup: Path = Path("/proc/self/cgroup"),
    root: Path = _CGROUP_ROOT,
) -> int:
    """Bytes the machine has available, or what the process's control groups leave, if less."""
    return max(0, min([_machine_available(meminfo), *_cgroup_headrooms(cgroup, root)]))


def _machine_available(meminfo: Path) -> int:
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def cgroup_limit(cgroup: Path = Path("/proc/self/cgroup"), root: Path = _CGROUP_ROOT) -> int | None:
    """The least memory limit of the process's control groups in bytes; None without any."""
    limits = [limit for limit, _ in _cgroup_limits(cgroup, root)]
    return min((limit for limit in limits if limit < _NO_LIMIT), default=None)


def _cgroup_headrooms(cgroup: Path, root: Path) -> list[int]:
    """What is left under each memory limit from the process's group up to the root."""
    return [limit - used for limit, used in _cgroup_limits(cgroup, root)]


def _cgroup_limits(cgroup: Path, root: Path) -> list[tuple[int, int]]:
    """Each memory limit from the process's group up to the root, and what is in use under it."""
    try:
        lines = cgroup.read_text().splitlines()
    except OSError:
        return []
    limits = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit_name, used_name = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base = root / "memory"
            limit_name, used_name = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        relative = Path(path.lstrip("/"))
        for group in (base / relative, *(base / parent for parent in relative.parents)):
            limit = _read_int(group / limit_name)
            if limit is not None:
                used = _read_int(group / used_name) or 0
                limits.append((limit, max(0, used - _reclaimable(group))))
    return limits


def _reclaimable(group: Path) -> int:
    """File cache the kernel drops before it refuses memory: counted as used, but not in the way."""
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None
