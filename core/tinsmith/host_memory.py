"""How much memory this machine has, or this container of it."""

import os
from pathlib import Path

_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def host_memory() -> int:
    """Return bytes: the machine's memory, or the container's limit if that is lower."""
    return min(machine_memory(), *(_limit(path) for path in _CGROUP_LIMITS))


def machine_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _limit(path: Path) -> int:
    """Without a limit there is no such file, or it holds the word `max` or a huge number."""
    try:
        found = path.read_text(encoding="ascii").strip()
    except OSError:
        return machine_memory()
    return int(found) if found.isdigit() else machine_memory()
