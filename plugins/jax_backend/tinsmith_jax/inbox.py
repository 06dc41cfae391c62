"""Requests on their way from the event loop to the sampler's thread, and their results on the way back."""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tinsmith import Failed, SampleOutput
from tinsmith_jax.requests import Request

logger = logging.getLogger(__name__)

CLOSED = "the sampler is closing; send the request again once the engine is back"


@dataclass(slots=True, kw_only=True)
class _Waiting:
    """A request and the future that waits for it."""

    request: Request
    future: asyncio.Future[SampleOutput | Failed]
    loop: asyncio.AbstractEventLoop

    def answer(self, result: SampleOutput | Failed) -> None:
        self._settle(lambda: self.future.set_result(result))

    def fail(self, error: Exception) -> None:
        if isinstance(error, StopIteration):  # which a future cannot hold
            error = RuntimeError(f"StopIteration: {error}")
        self._settle(lambda: self.future.set_exception(error))

    def tell(self, sequence: int, first: int, tokens: Sequence[int]) -> None:
        on_tokens = self.request.on_tokens
        assert on_tokens is not None, "only a sample that is streamed is told"
        self._settle(lambda: on_tokens(sequence, first, tokens))

    def _settle(self, settle: Callable[[], None]) -> None:
        """Called from the sampler's thread. The loop may already be closed when the process ends."""

        def put() -> None:
            if not self.future.done():
                settle()

        try:
            self.loop.call_soon_threadsafe(put)
        except RuntimeError:
            logger.debug("the event loop closed before a sample's answer")


class Inbox:
    """Thread-safe. The event loop asks, drops snapshots and closes; the sampler's thread does the rest."""

    def __init__(self) -> None:
        self._wake = threading.Condition()  # guards what follows
        self._arrived: deque[_Waiting] = deque()
        self._closing = False
        self._broken: Exception | None = None  # why nothing can be sampled any more
        self._dropped: deque[int] = deque()  # serials of snapshots; needs no guard
        self._waiting: dict[Request, _Waiting] = {}  # the thread has taken them; it alone uses this

    # The event loop's side ----------------------------------------------------------------------------------------

    async def ask(self, request: Request, begin: Callable[[], None]) -> SampleOutput | Failed:
        """Return the result. `begin` starts the thread, unless it runs."""
        loop = asyncio.get_running_loop()
        waiting = _Waiting(request=request, future=loop.create_future(), loop=loop)
        with self._wake:
            if self._broken is not None:
                raise self._broken
            if self._closing:
                return Failed(message=CLOSED, category="server")
            self._arrived.append(waiting)
            self._wake.notify()
            begin()
        try:
            return await waiting.future
        except asyncio.CancelledError:
            request.cancelled = True  # checked before the next dispatch
            with self._wake:
                self._wake.notify()
            raise

    def drop(self, serial: int) -> None:
        """Make the thread drop an adapter, at the latest before it draws for the next request."""
        self._dropped.append(serial)

    def close(self) -> None:
        """Make the thread end after its current dispatch."""
        with self._wake:
            self._closing = True
            self._wake.notify()

    # The thread's side --------------------------------------------------------------------------------------------

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until there is something to do. Return False if there was nothing in that time."""
        with self._wake:
            return self._wake.wait_for(self._is_wanted, timeout_s)

    def take(self) -> list[Request] | None:
        """Wait likewise, and return the requests that have come. None: the thread must end."""
        with self._wake:
            self._wake.wait_for(self._is_wanted)
            arrived = {waiting.request: waiting for waiting in self._arrived}
            self._arrived.clear()
            self._waiting.update(arrived)
            return None if self._closing else list(arrived)

    def dropped(self) -> Iterator[int]:
        """Return each dropped adapter once."""
        while self._dropped:
            yield self._dropped.popleft()

    def note_newest(self) -> None:
        """Let each request go on with its newest snapshot, which stays the same until the next call."""
        for request in self._waiting:
            request.snapshot = request.newest

    def __contains__(self, request: Request) -> bool:
        return request in self._waiting

    def cancelled(self) -> list[Request]:
        return [request for request in self._waiting if request.cancelled]

    def tell(self, request: Request, sequence: int, first: int, tokens: Sequence[int]) -> None:
        """Tell tokens of a request that is streamed, unless nobody waits for them any more."""
        self._waiting[request].tell(sequence, first, tokens)

    def answer(self, request: Request, result: SampleOutput | Failed) -> None:
        self._waiting.pop(request).answer(result)

    def forget(self, request: Request) -> None:
        """Give up a request, whether answered or abandoned."""
        self._waiting.pop(request, None)

    def end(self) -> None:
        """Answer all who wait that the sampler is closing, and all who come."""
        for waiting in self._all():
            waiting.answer(Failed(message=CLOSED, category="server"))

    def end_with(self, error: BaseException) -> None:
        """Raise the error to all who wait, and to all who come."""
        if isinstance(error, StopIteration) or not isinstance(error, Exception):  # which no future can hold
            error = RuntimeError(f"{type(error).__name__}: {error}")
        for waiting in self._all(error):
            waiting.fail(error)

    def _all(self, broken: Exception | None = None) -> list[_Waiting]:
        """Let nobody come any more, and take all who wait."""
        with self._wake:
            self._closing, self._broken = True, self._broken or broken
            everyone = [*self._waiting.values(), *self._arrived]
            self._arrived.clear()
            self._waiting.clear()
        return everyone

    def _is_wanted(self) -> bool:
        return bool(self._closing or self._arrived or self._waiting)
