"""How an engine knows that another one is dead without waiting until its lease expires.

Every engine locks a file of its own in the data directory, and the kernel releases the lock when the process dies,
however it dies. A free lock proves death only to processes under the same kernel, so the file names the boot of its
kernel. An engine on another machine, or after a reboot, waits for the lease.
"""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO, Self

_SUFFIX = ".alive"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class LifeSign:
    """Use with `with`, from before the engine asks for its lease until the process ends."""

    def __init__(self, directory: Path, engine_id: str) -> None:
        self._path = directory / f"{engine_id}{_SUFFIX}"
        self._file: IO[str] | None = None

    def __enter__(self) -> Self:
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fresh = self._path.with_suffix(".new")
        self._file = fresh.open("w")
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._file.write(_kernel())
        self._file.flush()
        fresh.rename(self._path)  # a file of this name is always locked by a living process
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def has_ended(directory: Path, engine_id: str) -> bool:
    """Return whether that engine is certainly dead. False if it lives or nothing is known."""
    kernel = _kernel()
    try:
        with (directory / f"{engine_id}{_SUFFIX}").open() as file:
            if not kernel or file.read() != kernel:
                return False
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return True
    except OSError:  # there is no file, or it is locked
        return False


def forget(directory: Path, engine_id: str) -> None:
    """Remove the file of an engine that has released its lease."""
    (directory / f"{engine_id}{_SUFFIX}").unlink(missing_ok=True)


def forget_ended(directory: Path) -> None:
    """Remove the files of dead engines."""
    for path in directory.glob(f"*{_SUFFIX}"):
        if has_ended(directory, path.stem):
            path.unlink(missing_ok=True)


def _kernel() -> str:
    """Return an id of this boot of this machine, empty if it is unknown."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""
