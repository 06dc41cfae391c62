"""Reads request bodies within a limit, and unpacks zstd ones: no route ever sees more than `max_bytes`.

Bodies are read before any route looks at the key. Whoever is not known may therefore send little, and nothing packed.
"""

import io
from collections.abc import Callable, Mapping
from typing import Final

import zstandard
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tinsmith.errors import UserError

STRANGER_BYTES: Final = 1 << 16
"""What is read without asking who sends it; the routes ask again, and of everybody."""

Authenticate = Callable[[Mapping[str, str]], object]
"""Raises AuthenticationError, by lower-case header names, where nobody knows who sent them."""


class BodyTooLargeError(UserError):
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
            headers = {"connection": "close"}  # what is left of the body is not read
            await JSONResponse({"detail": str(error)}, error.http_status, headers)(scope, receive, send)
            return
        except ConnectionAbortedError:  # the client went away while sending: nobody to answer
            return
        await self._app(scope, _replay(body, receive), send)

    async def _read(self, headers: Headers, receive: Receive) -> bytes:
        announced, encoding = int(headers.get("content-length", "0")), headers.get("content-encoding", "identity")
        known = False
        if announced > STRANGER_BYTES or encoding not in {"identity", ""}:
            self._authenticate(headers)
            known = True
        if announced > self._max_bytes:
            raise BodyTooLargeError(self._too_large())
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ConnectionAbortedError
            size += len(message.get("body", b""))
            if size > STRANGER_BYTES and not known:
                self._authenticate(headers)
                known = True
            if size > self._max_bytes:
                raise BodyTooLargeError(self._too_large())
            parts.append(message.get("body", b""))
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
        """Unpack as a stream: a frame may claim any size."""
        with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(body), read_across_frames=True) as reader:
            try:
                unpacked = reader.read(self._max_bytes + 1)
            except zstandard.ZstdError as error:
                msg = f"the body is not valid zstd: {error}"
                raise UserError(msg) from error
        if len(unpacked) > self._max_bytes:
            raise BodyTooLargeError(self._too_large())
        return unpacked

    def _too_large(self) -> str:
        return (
            f"the request body is over the limit of {self._max_bytes} bytes; send less at a time, or raise "
            "server.max_request_bytes"
        )


def _replay(body: bytes, receive: Receive) -> Receive:
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return pending.pop() if pending else await receive()

    return replayed
