"""Temporary directories of one process: gone when the process is, however it ends."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path
from typing import IO, Final, Self

_LOCK: Final = "owner.lock"
_TRIES: Final = 100

_all: Final[weakref.WeakSet[Scratch]] = weakref.WeakSet()  # of this process


class Scratch:
    """A directory that only this user can open. Removed by `close`, at the end of a `with` block, or with this object.

    A killed process leaves it behind, unlocked: the maker of the next one in the same place removes it.
    """

    def __init__(self, prefix: str, parent: Path | None = None) -> None:
        """Make it in `parent`, by default in the system's directory for temporary files; remove what was left there.

        All that begins with `prefix` there must have been made by this class.
        """
        parent = Path(tempfile.gettempdir()) if parent is None else parent
        with suppress(FileExistsError):
            parent.mkdir(parents=True, mode=0o700)
        _sweep(parent, prefix)
        self.path, lock = _make(parent, prefix)
        self._remove = weakref.finalize(self, _remove, self.path, lock)
        _all.add(self)

    def close(self) -> None:
        self._remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def remove_all() -> None:
    """Remove all scratch of this process, which is about to end."""
    for each in list(_all):
        each.close()


def _make(parent: Path, prefix: str) -> tuple[Path, IO[bytes]]:
    for _ in range(_TRIES):
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        with suppress(FileNotFoundError):  # somebody swept before it was locked
            lock = _locked(path)
            if lock is not None and path.exists():
                return path, lock
    msg = f"directories in {str(parent)!r} keep being removed by another process; try again"
    raise OSError(msg)


def _remove(path: Path, lock: IO[bytes]) -> None:
    shutil.rmtree(path, ignore_errors=True)
    lock.close()


def _sweep(parent: Path, prefix: str) -> None:
    for directory in parent.glob(f"{prefix}*"):
        with suppress(OSError):  # another user's, or just removed by another process
            if (lock := _locked(directory)) is not None:
                _remove(directory, lock)


def _locked(directory: Path) -> IO[bytes] | None:
    """Return the lock file of a directory, locked while it is open, or None if another process holds the lock.

    Anybody may write to the parent, so follow no links, and open nothing in a directory that others may write to. Raise
    OSError if it is not this user's alone.
    """
    place = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        found = os.fstat(place)
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            msg = f"{directory} is not a directory of this user that nobody else can open"
            raise PermissionError(msg)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        lock = os.fdopen(os.open(_LOCK, flags, 0o600, dir_fd=place), "r+b", buffering=0)
    finally:
        os.close(place)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return lock
