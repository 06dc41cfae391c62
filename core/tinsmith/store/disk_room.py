"""Room on the disk of the data directory: each tenant's share of it, and a reserve for writes that must happen."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tinsmith.settings import QuotaSettings
from tinsmith.store.records.usage import KeptBytes

_RESERVE_BYTES: Final = 1 << 30
_RESERVE_SHARE: Final = 20  # the reserve of a small file system is 1/20 of it
_LEFT_BYTES: Final = 4 << 30  # that one tenant leaves for others, unless configured otherwise
_LEFT_SHARE: Final = 5  # or 1/5 of the available space, if that is less
_UNITS: Final = ("bytes", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """The space of a file system. `free_bytes`: what this user may still write."""

    total_bytes: int
    free_bytes: int


ReadSpace = Callable[[], DiskSpace]


def space_at(directory: Path) -> DiskSpace:
    """Ask the file system that holds a directory, or will hold it."""
    found = os.statvfs(next(each for each in (directory, *directory.parents) if each.exists()))
    return DiskSpace(total_bytes=found.f_blocks * found.f_frsize, free_bytes=found.f_bavail * found.f_frsize)


def reserve_bytes(quotas: QuotaSettings, space: DiskSpace) -> int:
    if quotas.disk_reserve_bytes is not None:
        return quotas.disk_reserve_bytes
    return min(_RESERVE_BYTES, space.total_bytes // _RESERVE_SHARE)


def allowed_bytes(quotas: QuotaSettings, kept: KeptBytes, space: DiskSpace) -> int:
    """Return how much the tenant may keep: its share if one is set, else the free space less a part for others.

    That part has a fixed maximum: otherwise a lone tenant on a large disk could not use much of it.
    """
    limits = quotas.of(kept.tenant)
    if limits.disk_bytes is not None:
        return limits.disk_bytes
    available = kept.total + max(0, space.free_bytes - reserve_bytes(quotas, space))
    if limits.disk_share is not None:
        return int(limits.disk_share * available)
    return available - min(_LEFT_BYTES, available // _LEFT_SHARE)


def why_over_share(quotas: QuotaSettings, kept: KeptBytes, space: DiskSpace, *, more: int) -> str | None:
    """Return why the tenant may not keep that many more bytes, or None if it may."""
    allowed = allowed_bytes(quotas, kept, space)
    if kept.total + more <= allowed:
        return None
    fixed = quotas.of(kept.tenant).disk_bytes is not None
    setting = "quotas.disk_bytes" if fixed else "quotas.disk_share: the rest is left for other tenants"
    wanted = f", and this needs {readable(more)}" if more else ""
    return (
        f"you keep {readable(kept.total)} on this server ({_parts(kept)}), and one tenant may keep {readable(allowed)} "
        f"({setting}){wanted}; delete checkpoints, end sessions, wait until old results expire, or ask the operator to "
        "raise the limit"
    )


def why_in_reserve(quotas: QuotaSettings, space: DiskSpace, *, more: int, share: float = 1.0) -> str | None:
    """Return why that many more bytes would use the reserve, or `share` of it; None if they would not."""
    reserve = int(share * reserve_bytes(quotas, space))
    if space.free_bytes - more >= reserve:
        return None
    wanted = f" this needs {readable(more)}," if more else ""
    return (
        f"the server's disk has {readable(space.free_bytes)} free,{wanted} and the last {readable(reserve)} are for "
        "heartbeats, results and deletions alone (quotas.disk_reserve_bytes); delete checkpoints that you no longer "
        "need, or ask the operator to free space"
    )


def readable(num_bytes: int) -> str:
    size, unit = float(num_bytes), 0
    while size >= 1024 and unit + 1 < len(_UNITS):
        size, unit = size / 1024, unit + 1
    return f"{size:.1f} {_UNITS[unit]}" if unit else f"{num_bytes} bytes"


def _parts(kept: KeptBytes) -> str:
    by_use = {
        "log and results": kept.log,
        "checkpoints": kept.checkpoints,
        "sampling snapshots": kept.snapshots,
        "recovery points": kept.recovery_points,
        "routed experts": kept.routed_experts,
    }
    return ", ".join(f"{name} {readable(size)}" for name, size in by_use.items() if size) or "nothing yet"
