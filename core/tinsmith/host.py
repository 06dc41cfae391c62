"""This machine's resources, found without a framework: memory, GPUs, a C++ compiler, and file systems."""

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Final

from tinsmith.errors import ConfigError

_PROC: Final = Path("/proc")
_CGROUPS: Final = Path("/sys/fs/cgroup")
_MOUNTS: Final = Path("/proc/self/mounts")
_OCTAL: Final = re.compile(r"\\([0-7]{3})")
_COMPILERS: Final = ("c++", "g++", "clang++")

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"

NETWORK: Final = frozenset(
    {
        *("afs", "beegfs", "ceph", "cifs", "coda", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4"),
        *("orangefs", "panfs", "pvfs2", "smb3", "smbfs", "vboxsf", "wekafs"),
        *("fuse.afp", "fuse.blobfuse", "fuse.blobfuse2", "fuse.ceph", "fuse.ceph-fuse", "fuse.davfs", "fuse.gcsfuse"),
        *("fuse.glusterfs", "fuse.goofys", "fuse.juicefs", "fuse.mount-s3", "fuse.rclone", "fuse.s3fs", "fuse.sshfs"),
        *("fuse.vmhgfs-fuse",),
    }
)
"""Types of file systems on other machines, as Linux names them."""


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


def count_gpus(environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> int:
    """Return the number of NVIDIA GPUs that CUDA will see."""
    visible = environment.get(VISIBLE)
    if visible is not None:  # CUDA ignores what follows an invalid entry
        return len(list(takewhile(lambda each: each.strip() not in {"", "-1", "NoDevFiles"}, visible.split(","))))
    return sum(re.fullmatch(r"nvidia\d+", device.name) is not None for device in devices.glob("nvidia*"))


def lacks_gpus(who: str, reason: str, remedy: str) -> ConfigError:
    """Return the error of a framework that sees none of the GPUs, which are there or were asked for.

    It is refused, because the CPU would take their place in silence.

    Args:
        who: the framework, with its version.
        reason: in its own words.
        remedy: what to install, or which setting asks for the CPU.
    """
    visible, number = os.environ.get(VISIBLE), count_gpus()
    if visible:
        offered = f"{VISIBLE} is {visible!r}"
    else:
        offered = f"this machine has {number or 'no'} NVIDIA GPU{'' if number == 1 else 's'}"
    return ConfigError(f"{who} sees no GPU ({reason}), and {offered}: {remedy}")


def find_compiler() -> str | None:
    """Return the path of a C++ compiler: the one that CXX names, or the first that is installed."""
    chosen = os.environ.get("CXX")
    return next((found for found in map(shutil.which, (chosen,) if chosen else _COMPILERS) if found), None)


def file_system_of(path: Path) -> str | None:
    """Return the type of the file system that holds a path; None if the system does not say (other than Linux)."""
    if not _MOUNTS.exists():
        return None
    return find_in(_MOUNTS.read_text(encoding="utf-8", errors="surrogateescape"), path.resolve())


def find_in(mounts: str, path: Path) -> str | None:
    """Return the type of the mount that holds an absolute path: the longest mount point, and the last of several."""
    found: tuple[int, str] | None = None
    for line in mounts.splitlines():
        _, point, kind, *_ = line.split(" ")
        point = _OCTAL.sub(lambda code: chr(int(code[1], 8)), point)
        if path.is_relative_to(point) and (found is None or len(point) >= found[0]):
            found = len(point), kind
    return None if found is None else found[1]
