"""How much memory can still be allocated, by the limits of the machine and of this process's control group.

A group's memory includes its page cache; the part that the kernel would reclaim first counts as free.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MACHINE = Path("/proc/meminfo")
# The files of limit and use, and memory.stat's name for the inactive page cache: cgroup version 2, then version 1.
_CGROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def free_bytes(machine: Path = MACHINE, cgroup: Path | None = None) -> int | None:
    """Bytes that can be allocated before the kernel has to kill something; None if unknown.

    cgroup   directory of our control group; None: this process's
    """
    known = [found for found in (_of_machine(machine), _of_cgroup(cgroup or own_cgroup())) if found is not None]
    return min(known, default=None)


def _of_machine(meminfo: Path) -> int | None:
    with contextlib.suppress(OSError):
        found = re.search(r"^MemAvailable: +(\d+) kB$", meminfo.read_text(), re.M)
        return int(found[1]) << 10 if found else None
    return None


def _of_cgroup(cgroup: Path | None) -> int | None:
    """The least over the group and its parents, whose limits hold too."""
    if cgroup is None:
        return None
    known = []
    for group in (cgroup, *cgroup.parents):
        for limit_name, used_name, cache_name in _CGROUP_FILES:
            with contextlib.suppress(OSError, ValueError):  # "max" is not a number: no limit
                limit, used = (int((group / name).read_text()) for name in (limit_name, used_name))
                cache = re.search(rf"^{cache_name} (\d+)$", (group / "memory.stat").read_text(), re.M)
                known.append(max(0, limit - used + (int(cache[1]) if cache else 0)))
    return min(known, default=None)


def own_cgroup(listing: Path = Path("/proc/self/cgroup")) -> Path | None:
    """The directory of this process's (memory) control group, None if it has none."""
    with contextlib.suppress(OSError):
        for line in listing.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                place = CGROUPS / path.lstrip("/")
            elif "memory" in controllers.split(","):
                place = CGROUPS / "memory" / path.lstrip("/")
            else:
                continue
            # In a container the path may be that of the host, and the mount is our own group.
            return place if place.is_dir() else (CGROUPS / "memory" if controllers else CGROUPS)
    return None
