"""Wake-ups over Unix datagram sockets, one for each process, in a private directory next to the database.

The directory exists as long as a process uses it.
"""

import asyncio
import logging
import os
import secrets
import socket
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from tinsmith.errors import ServerError
from tinsmith.socket_paths import SocketDirectory
from tinsmith.sql_store.databases.database import Channel

_log = logging.getLogger(__name__)

_MAX_MESSAGE_BYTES = 16_384
_MAX_BINDS = 5
_SETTLED_NS = 1_000_000_000
_SUFFIX = ".sock"
_SEPARATOR = "\n"


class SocketWakeUps(Channel):
    """Each process binds `<directory>/<pid>-<random>.sock`, and sends to all other sockets in the directory."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory
        self._socket: socket.socket | None = None
        self._sockets: SocketDirectory | None = None
        self._own = ""
        self._sending = threading.Lock()  # guards what follows
        self._others: list[str] = []
        self._listed_at = -1
        self._has_complained = False

    async def open(self) -> None:
        own = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            own.setblocking(False)  # noqa: FBT003 - the library's signature
            own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
            self._own = f"{os.getpid()}-{secrets.token_hex(4)}{_SUFFIX}"
            self._bind(own)
        except BaseException:
            own.close()
            raise
        self._socket = own
        asyncio.get_running_loop().add_reader(own.fileno(), self._receive, own)

    def _bind(self, own: socket.socket) -> None:
        for again in reversed(range(_MAX_BINDS)):
            try:
                make_private(self.directory)
                sockets = SocketDirectory(self.directory)
                try:
                    own.bind(sockets.address(self._own))
                except BaseException:
                    sockets.close()
                    raise
                self._sockets = sockets
            except FileNotFoundError as error:  # another process was the last to leave, and has just removed it
                if again:
                    continue
                msg = f"cannot keep a socket in {self.directory}, tried {_MAX_BINDS} times: {error}"
                raise ServerError(msg) from error
            except OSError as error:
                msg = f"cannot keep a socket in {self.directory}: {error}"
                raise ServerError(msg) from error
            return

    async def close(self) -> None:
        if self._socket is None:
            return
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
        self._socket = None
        (self.directory / self._own).unlink(missing_ok=True)
        with self._sending:
            if self._sockets is not None:
                self._sockets.close()
            self._sockets = None
        with suppress(OSError):  # other processes have sockets there
            self.directory.rmdir()

    def _receive(self, own: socket.socket) -> None:
        for _ in range(64):  # then other tasks run; the loop calls again if there is more
            try:
                message = own.recv(2 * _MAX_MESSAGE_BYTES)
            except BlockingIOError:
                return
            self.wake(message.decode().split(_SEPARATOR))

    def send(self, topics: Sequence[str]) -> None:
        own = self._socket  # once closed, it sends nothing
        if own is None or not topics:
            return
        messages = list(_messages(topics))
        with self._sending:
            if self._sockets is None:
                return
            for name in self._peers():
                address = self._sockets.address(name)
                try:
                    for message in messages:
                        own.sendto(message, address)
                except (ConnectionRefusedError, FileNotFoundError):  # its process is gone
                    self._forget(name)
                except OSError:  # its buffer is full, perhaps of messages: it finds what it misses by itself
                    continue

    def _peers(self) -> list[str]:
        """Return the other sockets. The directory is read again only if it has changed."""
        now = time.time_ns()  # before the listing: this thread may stop for long after it
        try:
            changed_at = self.directory.stat().st_mtime_ns
            if changed_at != self._listed_at:
                names = os.listdir(self.directory)  # noqa: PTH208 - only names are needed, on a hot path
                self._others = [name for name in names if name.endswith(_SUFFIX) and name != self._own]
                # The kernel's time goes in steps of milliseconds, so another socket may come without a change to it.
                self._listed_at = changed_at if now - changed_at > _SETTLED_NS else -1
                self._has_complained = False
        except OSError as error:  # the commit stands, whether or not others are told
            self._complain(error)
        return self._others

    def _complain(self, error: OSError) -> None:
        if self._has_complained:
            return
        self._has_complained = True
        _log.warning(
            "processes that share the database may not be woken: %s; each notices the others' work when it next reads "
            "the database by itself (every safety_poll_s); if %s is gone, restart them",
            error,
            self.directory,
        )

    def _forget(self, name: str) -> None:
        with suppress(OSError):  # what was committed stays so; this is tried again next time
            (self.directory / name).unlink(missing_ok=True)
        self._listed_at = -1


def _messages(topics: Sequence[str]) -> Iterator[bytes]:
    chunk: list[bytes] = []
    size = 0
    for topic in (topic.encode() for topic in topics):
        if chunk and size + len(topic) >= _MAX_MESSAGE_BYTES:
            yield _SEPARATOR.encode().join(chunk)
            chunk, size = [], 0
        chunk.append(topic)
        size += len(topic) + 1
    yield _SEPARATOR.encode().join(chunk)


def make_private(directory: Path) -> None:
    directory.mkdir(mode=0o700, exist_ok=True)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        msg = f"{directory} must be a directory of this user that nobody else can open (mode 0700); remove or chmod it"
        raise ServerError(msg)
