"""Messages over a stream socket: a length of four bytes, then msgpack. Imported by both processes."""

import socket
import struct
import threading
from typing import Final, Generic, TypeVar

import msgspec

M = TypeVar("M")

_LENGTH: Final = struct.Struct("<I")
_CHUNK: Final = 1 << 20


class Channel(Generic[M]):
    """One end of the channel. `send` may be called from any thread, `receive` from only one."""

    def __init__(self, connection: socket.socket, incoming: object) -> None:
        """`incoming` is the union of the message types that arrive at this end."""
        self._socket = connection
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(incoming)
        self._buffer = bytearray()
        self._sending = threading.Lock()

    def send(self, message: msgspec.Struct) -> None:
        """Send a message. Raise OSError if the other end is gone."""
        body = self._encoder.encode(message)
        with self._sending:
            self._socket.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self) -> M | None:
        """Wait for and return the next message, or None if the other end is gone.

        Raise TimeoutError if the socket has a timeout and it expires. No data are lost then.
        """
        while True:
            if len(self._buffer) >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._buffer)
                end = _LENGTH.size + length
                if len(self._buffer) >= end:
                    body = bytes(self._buffer[_LENGTH.size : end])
                    del self._buffer[:end]
                    return self._decoder.decode(body)
            try:
                chunk = self._socket.recv(_CHUNK)
            except ConnectionError:
                return None
            if not chunk:
                return None
            self._buffer += chunk

    def close(self) -> None:
        self._socket.close()
