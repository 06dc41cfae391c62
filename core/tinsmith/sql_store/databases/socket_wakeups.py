"""Wake-ups over Unix datagram sockets, one for each process, in a private directory next to the database."""

import asyncio
import hashlib
import os
import secrets
import socket
import stat
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from tinsmith.errors import ServerError
from tinsmith.sql_store.databases.wakeups import WakeUps

_MAX_PATH_BYTES = 100  # the kernel's limit is 108 with the terminator
_MAX_MESSAGE_BYTES = 16_384
_SUFFIX = ".sock"
_SEPARATOR = "\n"


class SocketWakeUps(WakeUps):
    """Each process binds `<directory>/<pid>-<random>.sock`, and sends to all other sockets in the directory."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory if _fits(directory) else _short(directory)
        self._socket: socket.socket | None = None
        self._own = ""
        self._sending = threading.Lock()  # guards what follows
        self._others: list[str] = []
        self._listed_at = -1

    async def open(self) -> None:
        _make_private(self._directory)
        own = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        own.setblocking(False)  # noqa: FBT003 - the library's signature
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        self._own = f"{os.getpid()}-{secrets.token_hex(4)}{_SUFFIX}"
        own.bind(str(self._directory / self._own))
        self._socket = own
        asyncio.get_running_loop().add_reader(own.fileno(), self._receive, own)

    async def close(self) -> None:
        if self._socket is None:
            return
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
        self._socket = None
        (self._directory / self._own).unlink(missing_ok=True)

    def _receive(self, own: socket.socket) -> None:
        for _ in range(64):  # then other tasks run; the loop calls again if there is more
            try:
                message = own.recv(2 * _MAX_MESSAGE_BYTES)
            except BlockingIOError:
                return
            self.wake(message.decode().split(_SEPARATOR))

    def send(self, topics: Sequence[str]) -> None:
        if self._socket is None or not topics:
            return
        messages = list(_messages(topics))
        with self._sending:
            for name in self._peers():
                address = str(self._directory / name)
                try:
                    for message in messages:
                        self._socket.sendto(message, address)
                except (ConnectionRefusedError, FileNotFoundError):  # its process is gone
                    self._forget(name)
                except OSError:  # its buffer is full: it has enough wake-ups to read everything
                    continue

    def _peers(self) -> list[str]:
        """Return the other sockets. The directory is read again only if it has changed."""
        changed_at = self._directory.stat().st_mtime_ns
        if changed_at != self._listed_at:
            self._listed_at = changed_at
            names = os.listdir(self._directory)  # noqa: PTH208 - only names are needed, on a hot path
            self._others = [name for name in names if name.endswith(_SUFFIX) and name != self._own]
        return self._others

    def _forget(self, name: str) -> None:
        (self._directory / name).unlink(missing_ok=True)
        self._listed_at = -1


def _messages(topics: Sequence[str]) -> Iterator[bytes]:
    part: list[bytes] = []
    size = 0
    for topic in (topic.encode() for topic in topics):
        if part and size + len(topic) >= _MAX_MESSAGE_BYTES:
            yield _SEPARATOR.encode().join(part)
            part, size = [], 0
        part.append(topic)
        size += len(topic) + 1
    yield _SEPARATOR.encode().join(part)


def _fits(directory: Path) -> bool:
    return len(os.fsencode(directory)) + len(f"/4194304-01234567{_SUFFIX}") <= _MAX_PATH_BYTES


def _short(directory: Path) -> Path:
    """Return the directory that replaces one with a long path, the same for every process of this user."""
    digest = hashlib.sha256(os.fsencode(directory)).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"tinsmith-{os.getuid()}-{digest}"


def _make_private(directory: Path) -> None:
    directory.mkdir(mode=0o700, exist_ok=True)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        msg = f"{directory} must be a directory of this user that nobody else can open (mode 0700); remove or chmod it"
        raise ServerError(msg)
