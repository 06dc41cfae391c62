"""Uvicorn's HTTP/1.1 with limits on connections: how many, how slow, and how large the head of a request may be.

Uvicorn waits forever for the rest of a request, and for a client to read its answer. Its parser, httptools, collects
request lines, headers and trailers of any size before any key is checked, and copies what it has at every read, so a
single connection could block the event loop.
"""

import asyncio
from collections.abc import Collection
from enum import Enum, auto
from itertools import chain
from typing import Any, Final, cast

from fastapi import FastAPI
from starlette.types import Scope
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from tinsmith.server.limits.body_budget import STRANGER_BYTES

MAX_HEADER_BYTES: Final = 1 << 16
"""How much may arrive, after the first packet, before the parser completes a part of the request."""
MAX_HEADERS: Final = 200
MAX_PIPELINED: Final = 16
"""How many requests may wait on a connection for earlier answers."""

_GROUPS: Final = 10  # of the connections, which are checked one after another

HEAD_S: Final = 30
"""How long a request line and headers may take to arrive."""
BODY_GRACE_S: Final = 30
MIN_BYTES_PER_S: Final = 1 << 10
"""The lowest rate at which a body may arrive after `BODY_GRACE_S`."""
LINGER_BYTES: Final = 256 << 20
"""How much of a refused body is read and dropped, so that the client finishes sending and reads the answer."""
UNREAD_S: Final = 60
"""A client that reads almost nothing of its answer for this long is cut off."""


_CONNECTION: Final = "tinsmith.connection"
"""Key of the scope."""


def _answer(status: str, detail: str) -> bytes:
    body = f'{{"detail":"{detail}"}}'
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    head += "cache-control: no-store\r\nx-content-type-options: nosniff\r\n"
    return f"{head}connection: close\r\n\r\n{body}".encode()


_TOO_LARGE: Final = _answer("431 Request Header Fields Too Large", "the request line and headers are too long")
_TOO_SLOW: Final = _answer("408 Request Timeout", "the request did not arrive in time; send it again")
_TOO_MANY: Final = _answer(
    "503 Service Unavailable",
    "all connections of this server are in use (server.limits.connections); try again later",
)


class Connections:
    """All connections of an app, checked once a second, a tenth of them at a time: ten thousand take 30 ms.

    Time is counted in checks, so a server that stalls for a minute does not cut off clients that waited for it.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._all: dict[BoundedHttp, None] = {}
        # Of strangers, from which no request with a valid key has come, and of others; the longest first.
        self._waiting: dict[bool, dict[BoundedHttp, None]] = {False: {}, True: {}}  # idle, by whether they are known
        self._delayed: dict[BoundedHttp, None] = {}  # strangers whose answer is withheld
        self._arriving: dict[BoundedHttp, None] = {}  # request still smaller than a stranger may send
        self._groups: list[dict[BoundedHttp, None]] = [{} for _ in range(_GROUPS)]
        self._admitted = 0
        self._next_group = 0  # which is checked next
        self._timer: asyncio.TimerHandle | None = None

    @property
    def all(self) -> Collection["BoundedHttp"]:
        return self._all.keys()

    def admit(self, connection: "BoundedHttp") -> bool:
        """Return whether there is room.

        A stranger makes room for a new connection: the one that has been idle longest, else the one whose answer has
        been withheld longest. Then the known one that has been idle longest does; then the one whose request began to
        arrive first, which may belong to a stranger and never be complete.
        """
        if len(self._all) >= self._most:
            strangers, known = self._waiting[False], self._waiting[True]
            oldest = next(chain(strangers, self._delayed, known, self._arriving), None)
            if oldest is None:
                return False
            oldest.transport.abort()
            self.forget(oldest)
        self._all[connection] = None
        self._admitted += 1
        self._groups[self._admitted % _GROUPS][connection] = None
        self.waits(connection)
        if self._timer is None:
            self._timer = connection.loop.call_later(1 / _GROUPS, self._check_again, connection.loop)
        return True

    def forget(self, connection: "BoundedHttp") -> None:
        self._all.pop(connection, None)
        for group in self._groups:
            group.pop(connection, None)
        self._is_busy(connection)
        self._arriving.pop(connection, None)

    def waits(self, connection: "BoundedHttp") -> None:
        self._is_busy(connection)
        if connection in self._all:
            self._waiting[connection.is_known][connection] = None

    def delays(self, connection: "BoundedHttp") -> None:
        self._is_busy(connection)
        if connection in self._all and not connection.is_known:
            self._delayed[connection] = None

    def arrives(self, connection: "BoundedHttp") -> None:
        self._is_busy(connection)
        if connection in self._all:
            self._arriving[connection] = None

    def _is_busy(self, connection: "BoundedHttp") -> None:
        for each in (*self._waiting.values(), self._delayed):
            each.pop(connection, None)

    def arrived(self, connection: "BoundedHttp") -> None:
        self._arriving.pop(connection, None)

    def check(self) -> None:
        for connection in list(self._all):
            connection.check()

    def _check_again(self, loop: asyncio.AbstractEventLoop) -> None:
        self._next_group = (self._next_group + 1) % _GROUPS
        try:
            for connection in list(self._groups[self._next_group]):
                connection.check()
        finally:
            self._timer = loop.call_later(1 / _GROUPS, self._check_again, loop) if self._all else None


def connection_of(scope: Scope) -> "BoundedHttp | None":
    """Return the connection on which a request came; None if it did not come through uvicorn."""
    found: BoundedHttp | None = scope.get(_CONNECTION)
    return found


class Phase(Enum):
    HEAD = auto()
    BODY = auto()
    ANSWER = auto()


class _AnswerTransport(asyncio.Transport):
    """The transport to which an answer is written. Closing it calls `BoundedHttp.end`.

    The head is sent together with the next bytes, since each write to a socket takes as long as a small route.
    """

    def __init__(self, connection: "BoundedHttp") -> None:
        super().__init__()
        self._connection = connection
        self._head: bytes | None = None  # written and not sent yet
        self._has_begun = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._has_begun:
            self._has_begun, self._head = True, bytes(data)
            self._connection.loop.call_soon(self.flush)
            return
        head, self._head = self._head, None
        self._connection.transport.write(data if head is None else b"".join((head, data)))

    def flush(self) -> None:
        """Send the head, if nothing has followed."""
        if self._head is not None:
            head, self._head = self._head, None
            if not self._connection.transport.is_closing():
                self._connection.transport.write(head)

    def is_closing(self) -> bool:
        return self._connection.transport.is_closing()

    def close(self) -> None:
        self.flush()
        self._connection.end()


class BoundedHttp(HttpToolsProtocol):
    """One per connection. The app must have `state.connections`."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._connections = cast("FastAPI", config.app).state.connections  # of create_app
        self.is_known = False  # a request with a valid key has come
        self.phase = Phase.HEAD
        self._head_begun = True  # the first request is due at once
        self._unfinished = 0  # bytes since the parser last completed a part of the request
        self._got_on = False
        self._checks = 0  # since the head or the body began
        self.body_bytes = 0
        self._unsent = 0
        self._drained = False
        self._unread_checks = 0
        self._is_lingering = False
        self._dropped = 0

    # Time -------------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Cut off a connection that is too slow. Called once a second."""
        self._unread_checks = self._unread_checks + 1 if self._is_unread() else 0
        if self._unread_checks > UNREAD_S:
            self.transport.abort()
            return
        self._checks = self._checks + 1 if self.is_awaited else 0
        if self._is_too_slow() and not self.transport.is_closing():
            self._cut_off()

    def _cut_off(self) -> None:
        if self._is_lingering:  # the answer is out
            self.transport.abort()
            return
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self.transport.write(_TOO_SLOW)
        self.transport.close()

    def _is_unread(self) -> bool:
        """Return whether the client has read almost nothing since the last check."""
        before, self._unsent = self._unsent, self.transport.get_write_buffer_size()
        drained, self._drained = self._drained, False
        return 0 < self._unsent <= before and before - self._unsent < MIN_BYTES_PER_S and not drained

    @property
    def is_awaited(self) -> bool:
        """Return whether the rest of a request is due from the client."""
        match self.phase:
            case Phase.HEAD:  # uvicorn's keep-alive timeout ends idle connections
                return self._head_begun or self._unfinished > 0
            case Phase.BODY:
                return not self.flow.read_paused  # else the server is the slow one
            case Phase.ANSWER:
                return False

    def _is_too_slow(self) -> bool:
        if self.phase is Phase.HEAD:
            return self._checks > HEAD_S
        return self.body_bytes < (self._checks - BODY_GRACE_S) * MIN_BYTES_PER_S

    def resume_writing(self) -> None:
        self._drained = True
        super().resume_writing()

    # End --------------------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Close the connection after an answer, but let the client finish sending its request first.

        Otherwise the client would often see a connection reset instead of the answer.
        """
        if self.phase is not Phase.BODY or self.transport.is_closing() or not self.transport.can_write_eof():
            self.transport.close()
            return
        self._is_lingering = True
        self._checks, self.body_bytes = 0, 0
        self.transport.write_eof()

    def _drop(self, data: bytes) -> None:
        self._dropped += len(data)
        if self._dropped > LINGER_BYTES:
            self.transport.abort()

    def delays(self) -> None:
        """Note that the answer is withheld from a stranger."""
        self._connections.delays(self)

    # Number -----------------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        if not self._connections.admit(self):
            transport.write(_TOO_MANY)
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.forget(self)
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        is_last = not self.pipeline
        if isinstance(self.cycle.transport, _AnswerTransport):
            self.cycle.transport.flush()
        super().on_response_complete()
        if is_last:
            self.phase = Phase.HEAD if self.phase is Phase.ANSWER else self.phase
            self._connections.waits(self)

    # Size -------------------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._is_lingering:
            self._drop(data)
            return
        self._got_on = False
        super().data_received(data)
        self._unfinished = 0 if self._got_on else self._unfinished + len(data)
        if self._unfinished > MAX_HEADER_BYTES and not self.transport.is_closing():
            self.transport.write(_TOO_LARGE)
            self.transport.close()

    def on_message_begin(self) -> None:
        self._got_on = True
        self._head_begun = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) >= MAX_HEADERS:
            msg = f"more than {MAX_HEADERS} headers"
            raise ValueError(msg)  # ends the parsing; uvicorn answers with a 400
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            msg = f"more than {MAX_PIPELINED} requests wait on this connection"
            raise ValueError(msg)  # as above
        self._got_on = True
        self._head_begun = False
        self.phase, self._checks, self.body_bytes = Phase.BODY, 0, 0
        self._connections.arrives(self)
        self.scope[_CONNECTION] = self  # type: ignore[typeddict-unknown-key]  # for `connection_of`
        super().on_headers_complete()
        self.cycle.transport = _AnswerTransport(self)

    def on_body(self, body: bytes) -> None:
        self._got_on = True
        self.body_bytes += len(body)
        if self.body_bytes > STRANGER_BYTES:
            self._connections.arrived(self)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._got_on = True
        self._connections.arrived(self)
        self.phase = Phase.ANSWER if self.cycle is None or not self.cycle.response_complete else Phase.HEAD
        super().on_message_complete()
