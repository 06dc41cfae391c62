"""Reads request bodies within limits and unpacks zstd. No route ever sees more than its limit.

An unknown caller may send only a small body, uncompressed. Larger bodies take memory from their tenant's budget before
they are read or unpacked.
"""

import io
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import zstandard
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tinsmith.errors import CapacityError, TinsmithError, UserError
from tinsmith.server.auth import forget_caller
from tinsmith.server.context import API_PREFIX
from tinsmith.server.error_answers import MediaTypeError
from tinsmith.server.limits.body_budget import LEASE, STRANGER_BYTES, BodyBudget, Lease
from tinsmith.server.limits.edge import Identify, Incoming, LookUp, closing, note_route, refusal
from tinsmith.server.limits.heavy_work import HeavyWork
from tinsmith.server.refusals import record_refusal

UNPACKED_FREELY: Final = 8 << 20
"""Any packed body may unpack to this much, however small it is: a small honest body may consist of zeros."""

LARGE_ROUTES: Final = frozenset({f"{API_PREFIX}/forward_backward", f"{API_PREFIX}/asample"})
"""Routes whose bodies hold data. Plugins' routes, which are outside of `API_PREFIX`, may have such bodies, too."""

UPLOADS: Final = f"{API_PREFIX}/uploads/"

_START_BYTES: Final = 1 << 12
_STEP_BYTES: Final = 1 << 20
STALE_S: Final = 1.0
"""How long a body may take until its sender is asked for again."""

_MAX_WINDOW_BYTES: Final = 32 << 20  # zstd's own limit lets a frame of a few bytes ask for 128 MiB


class UnreadableBodyError(UserError):
    """The body cannot be read. `start` is its unpacked beginning, or empty."""

    def __init__(self, message: str, start: bytes = b"") -> None:
        super().__init__(message)
        self.start = start


class BodyTooLargeError(UnreadableBodyError):
    """The body, packed or unpacked, is over the limit."""

    http_status = 413


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyLimits:
    data_bytes: int
    json_bytes: int = 1 << 20  # of requests without training data or prompts
    unpack_ratio: int = 256  # times its own size that a body of zstd may unpack to, or UNPACKED_FREELY if that is more

    def of(self, path: str) -> int:
        small = path.startswith(f"{API_PREFIX}/") and path not in LARGE_ROUTES
        return min(self.json_bytes, self.data_bytes) if small else self.data_bytes

    def check(self, path: str, num_bytes: int, start: Callable[[], bytes]) -> None:
        """Raises BodyTooLargeError if a body for that path is too large."""
        limit = self.of(path)
        if num_bytes > limit:
            remedy = ", or raise server.max_request_bytes" if limit == self.data_bytes else ""
            msg = f"the request body is over the limit of {limit} bytes; send less at a time{remedy}"
            raise BodyTooLargeError(msg, start())

    def check_ratio(self, num_packed: int, num_bytes: int, start: Callable[[], bytes]) -> None:
        """Raises BodyTooLargeError if a body unpacks to suspiciously much."""
        if num_bytes > max(UNPACKED_FREELY, self.unpack_ratio * num_packed):
            msg = (
                f"the request body of {num_packed} bytes unpacks to over {self.unpack_ratio} times as many; send it "
                "without content-encoding"
            )
            raise BodyTooLargeError(msg, start())


class Bodies:
    """Reads the body before the route does, and holds its memory until the request is answered."""

    def __init__(
        self,
        *,
        limits: BodyLimits,
        budget: BodyBudget,
        heavy: HeavyWork,
        identify: Identify,
        look_up: LookUp | None = None,
    ) -> None:
        self._limits = limits
        self._budget = budget
        self._heavy = heavy
        self._identify = identify
        self._look_up = look_up

    async def admit(self, request: Incoming) -> ASGIApp | None:
        if request.scope["method"] in {"GET", "HEAD", "OPTIONS"} or _is_upload(request):
            return None
        lease = request.scope[LEASE] = request.held.enter_context(self._budget.lease())
        started = time.monotonic()
        try:
            body = await self._read(request.scope, request.receive, lease)
        except UserError as error:
            return await _refusal(request, error)
        except ConnectionAbortedError:  # the client disconnected while sending
            return _nothing
        if time.monotonic() - started > STALE_S:
            forget_caller(request.scope)
            if self._look_up is not None:
                await self._look_up(Headers(scope=request.scope))
        request.receive = _replay(body, request.receive)
        return None

    async def _read(self, scope: Scope, receive: Receive, lease: Lease) -> bytes:
        headers, path = Headers(scope=scope), scope["path"]
        announced = int(headers.get("content-length", "0"))
        encoding = headers.get("content-encoding", "identity").lower()
        if announced > STRANGER_BYTES or encoding not in {"identity", ""}:
            lease.tenant = self._identify(scope).tenant
            if announced <= self._limits.of(path):
                await lease.wait_to_resize(announced)
        with io.BytesIO() as body:
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ConnectionAbortedError
                body.write(message.get("body", b""))
                more = message.get("more_body", False)
                size = body.tell()
                if size > 0:
                    self._limits.check(path, max(size, announced), lambda: _start(encoding, body.getvalue()))
                if size > STRANGER_BYTES and not lease.tenant:
                    lease.tenant = self._identify(scope).tenant
                if size > announced and lease.tenant:
                    lease.resize(size)
            whole = body.getvalue()
        return await self._unpacked(path, encoding, whole, lease)

    async def _unpacked(self, path: str, encoding: str, body: bytes, lease: Lease) -> bytes:
        if encoding in {"identity", ""}:
            return body
        if encoding != "zstd":
            msg = f"content-encoding {encoding[:100]!r} is not offered; send zstd or none"
            raise MediaTypeError(msg, header="accept-encoding", offered="zstd")
        claimed = _claimed_bytes(body)
        self._limits.check(path, claimed, partial(_start, encoding, body))
        await lease.wait_to_resize(len(body) + claimed)
        unpacked = await self._heavy.run_queued(lease.tenant, partial(self._unzstd, path, body, lease))
        lease.resize(len(unpacked))
        return unpacked

    def _unzstd(self, path: str, body: bytes, lease: Lease) -> bytes:
        """Unpack in steps, because a frame may claim any size. Each step first takes its memory from the budget.

        The buffer is closed on the way out; otherwise the traceback of an error would keep it alive.
        """
        with _unpacker(body) as reader, io.BytesIO() as unpacked:
            start = partial(_start_of, unpacked)
            try:
                while True:
                    lease.resize(max(lease.num_bytes, len(body) + unpacked.tell() + _STEP_BYTES))
                    step = reader.read(_STEP_BYTES)
                    if not step:
                        return unpacked.getvalue()
                    unpacked.write(step)
                    self._limits.check(path, unpacked.tell(), start)
                    self._limits.check_ratio(len(body), unpacked.tell(), start)
            except zstandard.ZstdError as error:
                msg = f"the body is not valid zstd: {error}"
                raise UnreadableBodyError(msg, _start("zstd", body)) from error


def _is_upload(request: Incoming) -> bool:
    """Return whether the route reads the body itself: it checks the link first, and what it reads goes to the disk."""
    return request.scope["method"] == "PUT" and request.path.startswith(UPLOADS)


def _start_of(body: io.BytesIO) -> bytes:
    return body.getvalue()[:_START_BYTES]


def _unpacker(body: bytes) -> zstandard.ZstdDecompressionReader:
    unpacker = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
    return unpacker.stream_reader(io.BytesIO(body), read_across_frames=True)


def _claimed_bytes(body: bytes) -> int:
    """Return the unpacked size that the first frame claims; 0 if it claims none."""
    try:
        return max(0, zstandard.frame_content_size(body))
    except zstandard.ZstdError:
        return 0


def _start(encoding: str, packed: bytes) -> bytes:
    """Return the unpacked beginning of a body of which no more is needed."""
    if encoding != "zstd":
        return packed[:_START_BYTES]
    with _unpacker(packed[:STRANGER_BYTES]) as reader:
        try:
            return reader.read(_START_BYTES)
        except zstandard.ZstdError:
            return b""


async def _refusal(request: Incoming, error: UserError) -> ASGIApp:
    """Answer in place of the route. If the beginning of the body states the number of a training request, record it."""
    start = error.start if isinstance(error, UnreadableBodyError) else b""
    try:
        if not isinstance(error, CapacityError):
            refused = Request(request.scope, request.receive)
            if (recorded := await record_refusal(refused, start, str(error))) is not None:
                note_route(request.scope)
                return closing(recorded)
    except TinsmithError as other:  # a wrong key, or a number that is in use
        return await refusal(request, other, closes=True)
    return await refusal(request, error, closes=True)


async def _nothing(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a client that is gone."""


def _replay(body: bytes, receive: Receive) -> Receive:
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return pending.pop() if pending else await receive()

    return replayed
