"""Health probes are always answered: an orchestrator that gets no answer, or a refusal, restarts the server.

Beyond a rate they are answered late, with the last answer, so that a flood of them costs little. Probes of an
address that sends many wait longest: an orchestrator has an address of its own, and sends few.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tinsmith.server.context import API_PREFIX
from tinsmith.server.limits.bounded_http import connection_of
from tinsmith.server.limits.counts import TokenBuckets
from tinsmith.server.limits.edge import Incoming
from tinsmith.server.limits.strangers import spread

PROBES: Final = frozenset(f"{prefix}/{name}" for prefix in ("", API_PREFIX) for name in ("healthz", "readyz"))

PER_S: Final = 20.0  # of one address
ALL_PER_S: Final = 200.0
LATE_S: Final = 5.0
"""On average, for an address that sends more."""
ALL_LATE_S: Final = 0.4
"""If all addresses together send more: less than the second that Kubernetes waits for an answer by default."""
KEPT_S: Final = 1.0


@dataclass(slots=True)
class _Kept:
    messages: list[Message] = field(default_factory=list)
    route: Any = None
    at_s: float = -1e9
    is_asked: bool = False

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        del receive
        scope["route"] = self.route
        for message in self.messages:
            await send(message)


class Probes:
    """One per app."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._clock = clock
        self._pause = pause
        self._buckets = TokenBuckets(clock)
        self._all = TokenBuckets(clock)
        self._kept: dict[str, _Kept] = {path: _Kept() for path in PROBES}

    async def admit(self, request: Incoming) -> ASGIApp | None:
        """Answer every probe here, since no other limit is for them."""
        if not is_probe(request.scope):
            return None
        kept = self._kept[request.path]
        if (late_s := self._late_s(request.scope)) > 0:
            if (connection := connection_of(request.scope)) is not None:
                connection.delays()
            await self._pause(spread(late_s))
            if kept.messages and (self._clock() - kept.at_s <= KEPT_S or kept.is_asked):
                return kept.answer
        return partial(self._ask, kept, request.app)

    def _late_s(self, scope: Scope) -> float:
        if self._buckets.take(_address(scope), per_s=PER_S) > 0:
            return LATE_S
        return ALL_LATE_S if self._all.take("", per_s=ALL_PER_S) > 0 else 0.0

    async def _ask(self, kept: _Kept, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        messages: list[Message] = []

        async def keeping(message: Message) -> None:
            messages.append(message)
            await send(message)

        kept.is_asked = True
        try:
            await app(scope, receive, keeping)
        finally:
            kept.is_asked = False
        kept.messages, kept.route, kept.at_s = messages, scope.get("route"), self._clock()


def _address(scope: Scope) -> str:
    """Return the sender's address. One customer may have 2^64 of IPv6."""
    host = scope["client"][0] if scope.get("client") else ""
    return ":".join(host.split(":")[:4]) if ":" in host else host


def is_probe(scope: Scope) -> bool:
    """Return whether a request is a probe. `readyz` with a key is not: its answer may say more."""
    path = scope["path"]
    if path not in PROBES or scope["method"] != "GET":
        return False
    return path.endswith("healthz") or not any(name in (b"x-api-key", b"authorization") for name, _ in scope["headers"])
