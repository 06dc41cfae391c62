"""A connection between the engine and a worker. Messages are pickled; the arrays in them travel as raw buffers.

Between processes of one host, large buffers lie in memory that both map: they are written once, however many workers
receive them, and vanish with their last reader, however it ends.

A message is a header, the lengths of the buffers, the pickle and the buffers, which start at multiples of 64 bytes.
If the buffers are shared, a file descriptor comes with the header in their place.
"""

import hmac
import mmap
import os
import pickle
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait
from typing import Any, Final, Literal

_HEADER: Final = struct.Struct("!QQ?")  # bytes of the pickle, number of buffers, whether they are shared
_LENGTH: Final = struct.Struct("!Q")
_ALIGNMENT: Final = 64
_SHARED_FROM: Final = 1 << 20  # bytes; below, a copy through the socket is as fast
_MAX_BUFFERS: Final = 1 << 24

_KEEPALIVE: Final = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 6, "TCP_USER_TIMEOUT": 40_000}
"""A host that loses power closes nothing. Seconds, but for the last, which is in milliseconds."""

Side = Literal["engine", "worker"]


@dataclass(slots=True)
class Encoded:
    """A message as bytes, for any number of channels."""

    pickled: bytes
    buffers: Sequence[memoryview]
    _shared: int | None = field(default=None, init=False)

    @property
    def num_bytes(self) -> int:
        """Of all buffers with their padding."""
        return sum(_padded(buffer.nbytes) for buffer in self.buffers)

    def shared(self) -> int:
        """Return a descriptor of memory that holds the buffers. It is written at the first call."""
        if self._shared is None:
            self._shared = os.memfd_create("tinsmith")
            for start, buffer in zip(_starts(buffer.nbytes for buffer in self.buffers), self.buffers, strict=True):
                _write_at(self._shared, buffer, start)
            os.ftruncate(self._shared, self.num_bytes)
        return self._shared

    def close(self) -> None:
        if self._shared is not None:
            os.close(self._shared)
            self._shared = None


def encode(message: object) -> Encoded:
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    return Encoded(pickled, [buffer.raw() for buffer in buffers])


@contextmanager
def encoded(message: object) -> Iterator[Encoded]:
    made = encode(message)
    try:
        yield made
    finally:
        made.close()


class Channel:
    """One end. Sending and receiving block; each may be done by one thread at a time."""

    def __init__(self, peer: socket.socket) -> None:
        self._peer = peer
        self._local = peer.family == socket.AF_UNIX
        if not self._local:
            _keep_alive(peer)

    @property
    def descriptor(self) -> int:
        return self._peer.fileno()

    def prove(self, key: bytes, side: Side) -> None:
        """Prove to the other end that both have the key. Raises AuthenticationError, or OSError or EOFError.

        Nothing that the other end sends is unpickled before. Each side proves itself with a key of its own, so that
        nobody can pass for an engine by passing on what another worker answers.
        """
        of_engine, of_worker = (hmac.digest(key, b"tinsmith " + who, "sha256") for who in (b"engine", b"worker"))
        with Connection(os.dup(self.descriptor)) as connection:
            if side == "engine":
                deliver_challenge(connection, of_worker)
                answer_challenge(connection, of_engine)
            else:
                answer_challenge(connection, of_worker)
                deliver_challenge(connection, of_engine)

    def send(self, message: object) -> None:
        with encoded(message) as made:
            self.send_encoded(made)

    def send_encoded(self, message: Encoded) -> None:
        """Raises OSError if the other end is gone."""
        lengths = b"".join(_LENGTH.pack(buffer.nbytes) for buffer in message.buffers)
        shared = self._local and message.num_bytes >= _SHARED_FROM and hasattr(os, "memfd_create")
        head = _HEADER.pack(len(message.pickled), len(message.buffers), shared) + lengths + message.pickled
        if shared:
            sent = socket.send_fds(self._peer, [head], [message.shared()])
            self._peer.sendall(memoryview(head)[sent:])
            return
        self._peer.sendall(head)
        for buffer in message.buffers:
            self._peer.sendall(buffer)
            self._peer.sendall(bytes(_padded(buffer.nbytes) - buffer.nbytes))

    def receive(self) -> Any:
        """Raises EOFError or OSError if the other end is gone. Arrays in the message can be written to."""
        head = bytearray(_HEADER.size)
        count, descriptors = self._receive_start(head)
        try:
            self._fill(memoryview(head)[count:])
            num_pickled, num_buffers, shared = _HEADER.unpack(head)
            if num_buffers > _MAX_BUFFERS or len(descriptors) != shared:
                msg = "the other end of the connection does not speak this protocol"
                raise OSError(msg)
            lengths = [each for (each,) in _LENGTH.iter_unpack(self._read(num_buffers * _LENGTH.size))]
            pickled = self._read(num_pickled)
            num_bytes = sum(map(_padded, lengths))
            memory = _mapped(descriptors[0], num_bytes) if shared else memoryview(self._read(num_bytes))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        buffers = [memory[start : start + size] for start, size in zip(_starts(lengths), lengths, strict=True)]
        return pickle.loads(pickled, buffers=buffers)  # the other end has proved that it has the key

    def _receive_start(self, head: bytearray) -> tuple[int, list[int]]:
        """Descriptors come with the first bytes of a message, so those are read apart."""
        if self._local:
            start, descriptors, _, _ = socket.recv_fds(self._peer, len(head), 1)
        else:
            start, descriptors = self._peer.recv(len(head)), []
        if not start:
            raise EOFError
        head[: len(start)] = start
        return len(start), descriptors

    def _read(self, num_bytes: int) -> bytearray:
        found = bytearray(num_bytes)
        self._fill(memoryview(found))
        return found

    def _fill(self, left: memoryview) -> None:
        while left:
            count = self._peer.recv_into(left)
            if not count:
                raise EOFError
            left = left[count:]

    def hang_up(self) -> None:
        """Wake every thread that waits for this connection, at both ends."""
        with suppress(OSError):
            self._peer.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._peer.close()


def ready(channels: Sequence[Channel], timeout_s: float | None = None) -> list[int]:
    """Wait until a channel has something to receive, if only its end. Returns the places of those that have."""
    found = wait([channel.descriptor for channel in channels], timeout_s)
    return [place for place, channel in enumerate(channels) if channel.descriptor in found]


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _starts(lengths: Iterator[int] | Sequence[int]) -> Iterator[int]:
    start = 0
    for length in lengths:
        yield start
        start += _padded(length)


def _mapped(descriptor: int, num_bytes: int) -> memoryview:
    """Map the memory for ourselves: what we write is copied, and not seen by others."""
    return memoryview(mmap.mmap(descriptor, num_bytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE))


def _write_at(descriptor: int, left: memoryview, start: int) -> None:
    while left:
        count = os.pwrite(descriptor, left, start)
        left, start = left[count:], start + count


def _keep_alive(peer: socket.socket) -> None:
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # not every system has them
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
