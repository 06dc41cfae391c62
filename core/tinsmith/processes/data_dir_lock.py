"""A lock file that keeps other servers out of the data directory, unless all of them share it."""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path
from typing import IO, Final, Self

from tinsmith.errors import ConfigError
from tinsmith.settings import DataDir

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW  # it is written: never what a link points to

_TRIES: Final = 3
_PAUSE_S: Final = 0.05


class DataDirLock:
    """Use with `with`. The kernel releases the lock when the process dies, however it dies.

    The file contains the process id and URL of the server that holds the lock; of several servers, the last one's.
    """

    def __init__(self, data_dir: DataDir, *, shared: bool = False) -> None:
        self._path = data_dir.server_lock
        self._shared = shared
        self._file: IO[str] | None = None

    def __enter__(self) -> Self:
        """Raise ConfigError if another process holds the lock, or the directory cannot be written."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            file = os.fdopen(os.open(self._path, _FLAGS, 0o600), "r+", encoding="utf-8")
        except OSError as error:
            msg = f"server.data_dir: cannot write to {str(self._path.parent)!r}: {error.strerror}; choose another"
            raise ConfigError(msg) from error
        try:
            _lock(file, self._path, shared=self._shared)
        except BaseException:
            file.close()
            raise
        self._file = file
        self.describe(url=None)
        return self

    def describe(self, *, url: str | None) -> None:
        """Write for others who holds the lock."""
        assert self._file is not None
        self._file.seek(0)
        self._file.truncate()
        json.dump({"pid": os.getpid(), "url": url}, self._file)
        self._file.flush()

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            if not self._shared:
                self._file.seek(0)
                self._file.truncate()
            self._file.close()
            self._file = None


def refuse_if_in_use(data_dir: DataDir, *, shared: bool) -> None:
    """Raise ConfigError if a server could not use the directory now. Make nothing."""
    path = data_dir.server_lock
    existing = next(each for each in (path.parent, *path.parents) if each.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        why = "Permission denied" if existing.is_dir() else "Not a directory"
        msg = f"server.data_dir: cannot write to {str(existing)!r}: {why}; choose another with --data-dir"
        raise ConfigError(msg)
    try:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW), "r+", encoding="utf-8")
    except FileNotFoundError:
        return
    except OSError as error:
        msg = f"server.data_dir: cannot write to {str(path)!r}: {error.strerror}; choose another with --data-dir"
        raise ConfigError(msg) from error
    with file:
        _lock(file, path, shared=shared)


def _lock(file: IO[str], path: Path, *, shared: bool) -> None:
    """Raise ConfigError if another server holds the lock. One that looks whether somebody does lets go at once."""
    for again in reversed(range(_TRIES)):
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if again:
                time.sleep(_PAUSE_S)
                continue
            msg = (
                f"server.data_dir: {str(path.parent)!r} is in use by another server{_described(file.read())}; stop it, "
                "choose another directory with --data-dir, or set server.share_data_dir for all of them"
            )
            raise ConfigError(msg) from error
        return


def _described(content: str) -> str:
    """Return the name that the holder of the lock wrote; empty if it has written none yet."""
    try:
        holder = json.loads(content)
    except ValueError:
        return ""
    at = f" at {holder['url']}" if holder["url"] else ""
    return f"{at} (process {holder['pid']})"


def read_server_url(data_dir: DataDir, *, pid: int) -> str | None:
    """Return the URL of the server with this process id, or None if it has not written one yet."""
    try:
        described = json.loads(data_dir.server_lock.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    url = described.get("url")
    return url if isinstance(url, str) and described.get("pid") == pid else None
