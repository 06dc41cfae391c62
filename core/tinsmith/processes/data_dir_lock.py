"""A lock file that keeps other servers out of the data directory, unless all of them share it."""

from __future__ import annotations

import fcntl
import json
import os
from typing import IO, Self

from tinsmith.errors import ConfigError
from tinsmith.settings import DataDir

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW  # it is written: never what a link points to


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
            file = os.fdopen(os.open(self._path, _FLAGS, 0o600), "r+")
        except OSError as error:
            msg = f"server.data_dir: cannot write to {str(self._path.parent)!r}: {error.strerror}; choose another"
            raise ConfigError(msg) from error
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if self._shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = _described(file.read())
            file.close()
            msg = (
                f"server.data_dir: {str(self._path.parent)!r} is in use by another server{holder}; stop it, choose "
                "another directory with --data-dir, or set server.share_data_dir for all of them"
            )
            raise ConfigError(msg) from error
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


def _described(content: str) -> str:
    """Return which server holds the lock, from what it wrote; empty if it has not written anything yet."""
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
