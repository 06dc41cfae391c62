"""Reads request bodies within a limit and unpacks zstd. No route ever sees more than `max_bytes`.

Bodies are read before any route checks the key, so an unknown caller may send only a little, and nothing packed.
"""

import io
from collections.abc import Callable, Mapping
from typing import Final

import zstandard
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tinsmith.errors import TinsmithError, UserError
from tinsmith.server.error_answers import tinsmith_error
from tinsmith.server.refusals import record_refusal

STRANGER_BYTES: Final = 1 << 16
"""How much is read before the caller is authenticated here. The routes authenticate every caller in any case."""

Authenticate = Callable[[Mapping[str, str]], object]
"""Takes headers by lower-case name. Raises AuthenticationError if the caller is unknown."""


_START_BYTES: Final = 1 << 12


class UnreadableBodyError(UserError):
    """The body cannot be read. `start` is its beginning, unpacked, as far as there is one."""

    def __init__(self, message: str, start: bytes = b"") -> None:
        super().__init__(message)
        self.start = start


class BodyTooLargeError(UnreadableBodyError):
    """The body, packed or unpacked, is over the limit."""

    http_status = 413


class BodyLimit:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, *, max_bytes: int, authenticate: Authenticate) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._authenticate = authenticate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in {"GET", "HEAD", "OPTIONS"}:
            await self._app(scope, receive, send)
            return
        try:
            body = await self._read(Headers(scope=scope), receive)
        except UserError as error:
            await _refuse(error, scope, receive, send)
            return
        except ConnectionAbortedError:  # the client disconnected while sending
            return
        await self._app(scope, _replay(body, receive), send)

    async def _read(self, headers: Headers, receive: Receive) -> bytes:
        announced, encoding = int(headers.get("content-length", "0")), headers.get("content-encoding", "identity")
        known = False
        if announced > STRANGER_BYTES or encoding not in {"identity", ""}:
            self._authenticate(headers)
            known = True
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ConnectionAbortedError
            size += len(message.get("body", b""))
            if size > STRANGER_BYTES and not known:
                self._authenticate(headers)
                known = True
            parts.append(message.get("body", b""))
            if max(size, announced) > self._max_bytes and size > 0:
                raise BodyTooLargeError(self._too_large(), _start(encoding, b"".join(parts[:2])))
            if not message.get("more_body", False):
                break
        return await self._unpacked(encoding, b"".join(parts))

    async def _unpacked(self, encoding: str, body: bytes) -> bytes:
        match encoding.lower():
            case "identity" | "":
                return body
            case "zstd":
                return await run_in_threadpool(self._unzstd, body)
            case other:
                msg = f"content-encoding {other!r} is not offered; send zstd or none"
                raise UserError(msg)

    def _unzstd(self, body: bytes) -> bytes:
        """Unpack as a stream, because a frame may claim any size."""
        with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(body), read_across_frames=True) as reader:
            try:
                unpacked = reader.read(self._max_bytes + 1)
            except zstandard.ZstdError as error:
                msg = f"the body is not valid zstd: {error}"
                raise UnreadableBodyError(msg, _start("zstd", body)) from error
        if len(unpacked) > self._max_bytes:
            raise BodyTooLargeError(self._too_large(), unpacked[:_START_BYTES])
        return unpacked

    def _too_large(self) -> str:
        return (
            f"the request body is over the limit of {self._max_bytes} bytes; send less at a time, or raise "
            "server.max_request_bytes"
        )


def _start(encoding: str, packed: bytes) -> bytes:
    """Unpack the beginning of a body whose rest has not been read."""
    if encoding.lower() != "zstd":
        return packed[:_START_BYTES]
    with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(packed)) as reader:
        try:
            return reader.read(_START_BYTES)
        except zstandard.ZstdError:
            return b""


async def _refuse(error: UserError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer in place of the route. A training request keeps its number if the beginning of its body states it."""
    request = Request(scope, receive)
    start = error.start if isinstance(error, UnreadableBodyError) else b""
    try:
        answer = await record_refusal(request, start, str(error)) or await tinsmith_error(request, error)
    except TinsmithError as other:  # a wrong key, or a number that is in use
        answer = await tinsmith_error(request, other)
    await answer(scope, receive, _closing(send))


def _closing(send: Send) -> Send:
    """Close the connection after the answer: the rest of the body is not read, so no other request can follow."""

    async def closing(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
        await send(message)

    return closing


def _replay(body: bytes, receive: Receive) -> Receive:
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return pending.pop() if pending else await receive()

    return replayed
