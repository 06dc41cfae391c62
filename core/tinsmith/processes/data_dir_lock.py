"""One server per data directory, or several that say so: a lock file, held as long as the process lives."""

from __future__ import annotations

import fcntl
import json
import os
from typing import IO, Self

from tinsmith.errors import ConfigError
from tinsmith.settings import DataDir


class DataDirLock:
    """Hold with `with`. The kernel frees it when the process dies, however it dies.

    Its content says who holds it and where; of several servers, which came last.
    """

    def __init__(self, data_dir: DataDir, *, shared: bool = False) -> None:
        self._path = data_dir.server_lock
        self._shared = shared
        self._file: IO[str] | None = None

    def __enter__(self) -> Self:
        """Raise ConfigError where another process holds it, or the directory cannot be written."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            file = os.fdopen(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+")
        except OSError as error:
            msg = f"server.data_dir: cannot write to {str(self._path.parent)!r}: {error.strerror}; choose another"
            raise ConfigError(msg) from error
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if self._shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = file.read().strip() or "unknown"
            file.close()
            msg = (
                f"server.data_dir: {str(self._path.parent)!r} is in use by another server ({holder}); stop it, or "
                "choose another directory with --data-dir, or have all of them set server.share_data_dir"
            )
            raise ConfigError(msg) from error
        self._file = file
        self.describe(url=None)
        return self

    def describe(self, *, url: str | None) -> None:
        """Write who holds the lock, for others to read."""
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


def read_server_url(data_dir: DataDir, *, pid: int) -> str | None:
    """Return where the server with this process id answers, or None while it does not say."""
    try:
        described = json.loads(data_dir.server_lock.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    url = described.get("url")
    return url if isinstance(url, str) and described.get("pid") == pid else None
