"""How much memory this machine has, or this container of it."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")
_CGROUPS: Final = Path("/sys/fs/cgroup")


def host_memory(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """Return bytes: the machine's memory, or the lowest limit of the control groups that this process is in."""
    return min(machine_memory(), *_limits(proc, cgroups))


def machine_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _limits(proc: Path, cgroups: Path) -> Iterator[int]:
    """Yield the limits of the process's groups, of either version, and of those that they lie in.

    A container may see its own group as the root, and be told the path that the group has outside.
    """
    for controllers, path in _groups(proc):
        root, name = (cgroups, "memory.max") if not controllers else (cgroups / "memory", "memory.limit_in_bytes")
        if not controllers or "memory" in controllers.split(","):
            parts = Path(path).parts[1:]
            for depth in range(len(parts) + 1):
                yield _limit(root.joinpath(*parts[:depth], name))


def _groups(proc: Path) -> Iterator[tuple[str, str]]:
    """Yield the controllers of each of the process's groups, none for version 2, and its path."""
    try:
        lines = (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = ["0::/", "1:memory:/"]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        yield controllers, path


def _limit(path: Path) -> int:
    """Without a limit there is no such file, or it holds the word `max` or a huge number."""
    try:
        found = path.read_text(encoding="ascii").strip()
    except OSError:
        return machine_memory()
    return int(found) if found.isdigit() else machine_memory()
