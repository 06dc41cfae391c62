"""The configured API keys as they are now: read again when a file changes that holds them.

Every request asks here, so a key that is removed from the file is refused from the next request on.
"""

import logging
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tinsmith.errors import AuthenticationError, ConfigError
from tinsmith.settings import ApiKey, KeySource
from tinsmith.settings.schema import repeated_keys

_log = logging.getLogger(__name__)

_UNSETTLED_S: Final = 3.0
"""A file system may give two changes in a row the same time stamp. The content is compared for this long after one."""

_Stamps = tuple[tuple[int, ...] | None, ...]


class LiveKeys:
    """Thread-safe. A file that cannot be read, or that is wrong, changes nothing and is logged once."""

    def __init__(
        self,
        source: KeySource,
        *,
        read: Callable[[], KeySource] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`read` returns the keys that apply now that a file has changed. It raises ConfigError if a file is wrong.

        Without it, the keys never change. Raises ConfigError if one key is given twice.
        """
        for before, index in repeated_keys(source.keys):
            msg = f"server.api_keys.{index} has the same key as server.api_keys.{before}; remove one, or change its key"
            raise ConfigError(msg)
        self._source = source
        self._keys = source.keys
        self._had_keys = bool(source.keys)
        self._files = source.files
        self._read = read
        self._clock = clock
        self._lock = threading.Lock()
        self._stamps: _Stamps = ()  # unlike any files': they may have changed since the keys were read
        self._contents: tuple[bytes | None, ...] = ()
        self._changed_at_s = clock()
        self._is_settled = False

    def now(self) -> tuple[ApiKey, ...]:
        """Return the keys; none means that the server has been without keys since it started.

        Raise AuthenticationError if all of them have been removed: the server must not become open to everybody.
        """
        if self._files and self._read is not None:
            with self._lock:
                self._follow(self._read)
        if self._had_keys and not self._keys:
            msg = "this server accepts no API key: all of them were removed from `server.api_keys`"
            raise AuthenticationError(msg)
        return self._keys

    def warn_of_readers(self) -> None:
        """Log which files with keys, and not only their hashes, every user of the machine may read."""
        for file in self._source.plain_in:
            if file.exists() and file.stat().st_mode & stat.S_IROTH:
                _log.warning(
                    "every user of this machine can read the API keys in %s; take that right away (chmod o-r), or give "
                    "each key as 'sha256:' and its hash",
                    file,
                )

    def _follow(self, read: Callable[[], KeySource]) -> None:
        stamps = tuple(map(stamp_of, self._files))
        if stamps != self._stamps:
            self._stamps, self._changed_at_s, self._is_settled = stamps, self._clock(), False
        elif self._is_settled:
            return
        else:  # this may be the last time that the content is compared
            self._is_settled = self._clock() - self._changed_at_s > _UNSETTLED_S
        contents = tuple(map(_content, self._files))
        if contents != self._contents:
            self._contents = contents
            self._take(read)

    def _take(self, read: Callable[[], KeySource]) -> None:
        try:
            source = read()
        except ConfigError as error:
            _log.error("the API keys stay as they are, because the changed configuration cannot be used: %s", error)
            return
        keys = source.keys
        if source.files != self._files:  # which are read again at the next request
            self._files, self._stamps, self._contents = source.files, (), ()
        if keys == self._keys:
            return
        self._source = source
        self.warn_of_readers()
        before, after = set(self._keys), set(keys)
        _log.warning(
            "the API keys have changed: %d added, %d removed, %d now%s",
            len(after - before),
            len(before - after),
            len(keys),
            "" if keys else "; every request is refused until keys are added, or until the server restarts",
        )
        self._keys, self._had_keys = keys, self._had_keys or bool(keys)


def stamp_of(file: Path) -> tuple[int, ...] | None:
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
