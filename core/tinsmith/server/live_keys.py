"""The configured API keys as they are now: read again when the configuration file changes.

Every request asks here, so a key that is removed from the file is refused from the next request on.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from tinsmith.errors import AuthenticationError, ConfigError
from tinsmith.settings import ApiKey

_log = logging.getLogger(__name__)

_UNSETTLED_S: Final = 3.0
"""A file system may give two changes in a row the same time stamp. The content is compared for this long after one."""

_Stamp = tuple[int, ...]


class LiveKeys:
    """Thread-safe. A file that cannot be read, or that is wrong, changes nothing and is logged once."""

    def __init__(
        self,
        keys: Sequence[ApiKey],
        *,
        file: Path | None = None,
        read: Callable[[], Sequence[ApiKey]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`read` returns the keys that apply now that `file` has changed. It raises ConfigError if the file is wrong.

        Without a file, the keys never change.
        """
        self._keys = tuple(keys)
        self._had_keys = bool(keys)
        self._file = file
        self._read = read
        self._clock = clock
        self._lock = threading.Lock()
        self._stamp: _Stamp | None = None  # unlike any file's: it may have changed since `keys` were read
        self._content: bytes | None = None
        self._changed_at_s = clock()
        self._is_settled = False

    def now(self) -> tuple[ApiKey, ...]:
        """Return the keys; none means that the server has been without keys since it started.

        Raise AuthenticationError if all of them have been removed: the server must not become open to everybody.
        """
        if self._file is not None and self._read is not None:
            with self._lock:
                self._follow(self._file, self._read)
        if self._had_keys and not self._keys:
            msg = "this server accepts no API key: all of them were removed from `server.api_keys`"
            raise AuthenticationError(msg)
        return self._keys

    def _follow(self, file: Path, read: Callable[[], Sequence[ApiKey]]) -> None:
        stamp = _stamp(file)
        if stamp != self._stamp:
            self._stamp, self._changed_at_s, self._is_settled = stamp, self._clock(), False
        elif self._is_settled:
            return
        else:  # this may be the last time that the content is compared
            self._is_settled = self._clock() - self._changed_at_s > _UNSETTLED_S
        content = _content(file)
        if content != self._content:
            self._content = content
            self._take(read)

    def _take(self, read: Callable[[], Sequence[ApiKey]]) -> None:
        try:
            keys = tuple(read())
        except ConfigError as error:
            _log.error("the API keys stay as they are, because the changed configuration cannot be used: %s", error)
            return
        if keys == self._keys:
            return
        before, after = set(self._keys), set(keys)
        _log.warning(
            "the API keys have changed: %d added, %d removed, %d now%s",
            len(after - before),
            len(before - after),
            len(keys),
            "" if keys else "; every request is refused until keys are added, or until the server restarts",
        )
        self._keys, self._had_keys = keys, self._had_keys or bool(keys)


def _stamp(file: Path) -> _Stamp | None:
    """Return what changes with the file's content, as far as its file system records it."""
    try:
        found = file.stat()
    except OSError:
        return None
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _content(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except OSError:
        return None
