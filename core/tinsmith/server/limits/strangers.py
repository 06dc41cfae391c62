"""Asks who sends a request, and limits callers without a valid key: one bucket of requests for all of them together.

A refusal takes a tenth of a millisecond, which is too much for somebody who sends again at once over a thousand
connections. So a refusal comes late: until then the connection waits, and costs nothing.
"""

import asyncio
import hashlib
import json
import math
import random
import re
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from types import SimpleNamespace
from typing import Final

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Scope

from tinsmith.errors import TinsmithError
from tinsmith.hook_values import Principal
from tinsmith.server.limits.bounded_http import connection_of
from tinsmith.server.limits.counts import TokenBuckets
from tinsmith.server.limits.edge import Identify, Incoming, LookUp, closing

REFUSED_AFTER_S: Final = 5.0
"""On average. It differs, or a thousand that were refused together would send again together."""

_ROUTE: Final = SimpleNamespace(path="(without a key)")  # under which `/metrics` counts refusals
_KNOWN: Final = 10_000
_CHANGING: Final = (
    # of the client
    *(b"accept", b"cache-control", b"connection", b"content-", b"date", b"expect", b"host", b"if-", b"pragma"),
    *(b"priority", b"range", b"sec-", b"user-agent", b"x-stainless-", b"x-idempotency-key"),
    # of proxies: on which way a request came, and when
    *(b"cdn-loop", b"cf-connecting-", b"cf-ew-", b"cf-ip", b"cf-visitor", b"cf-worker", b"fastly-", b"forwarded"),
    *(b"true-client-ip", b"via", b"x-amz-cf-id", b"x-azure-", b"x-envoy-", b"x-forwarded-for", b"x-forwarded-host"),
    *(b"x-forwarded-port", b"x-forwarded-prefix", b"x-forwarded-proto", b"x-forwarded-scheme", b"x-forwarded-server"),
    *(
        b"x-original-forwarded-",
        b"x-original-u",
        b"x-queue-start",
        b"x-real-ip",
        b"x-request-start",
        b"x-scheme",
        b"x-vercel-id",
    ),
    # of tracers; the names of most others have one of the words below
    *(b"b3", b"baggage", b"newrelic", b"x-b3-", b"x-datadog-", b"x-instana-", b"x-newrelic-", b"x-ot-"),
)
_CHANGING_WORDS: Final = re.compile(rb"trace|span|request-?id|correlation|transaction|log-?id|-ray$")
"""Headers that begin so, or have such a word in their name, say nothing about who sent a request, and may change with
each. Every other may be what a plugin knows a caller by: proxies and gateways name a user in `x-forwarded-user`,
`x-amzn-oidc-identity` or `cf-access-jwt-assertion`.
"""

Pause = Callable[[float], Awaitable[object]]


class Strangers:
    """One per app. A stranger's request goes on while there is room: its route refuses it, unless it needs no key."""

    def __init__(
        self,
        *,
        per_s: float,
        identify: Identify,
        look_up: LookUp | None = None,
        in_thread: bool = True,
        opens: Callable[[str], bool | None] = lambda _path: None,
        clock: Callable[[], float] = time.monotonic,
        pause: Pause = asyncio.sleep,
    ) -> None:
        """Make it.

        look_up: prepares `identify`; see ApiKeys.
        in_thread: whether `identify` may block, as a plugin does that asks elsewhere.
        opens: whether a path is a signed link, which stands for a key. False: nobody is known there, whatever key comes
            with it: a wrong link, say. None: the key decides.
        """
        self._per_s = per_s
        detail = (
            f"callers without a valid API key send more than {per_s:g} requests per second together, which is "
            "their limit (server.limits.keyless_requests_per_s); send a key, or try again later"
        )
        self._refusal = json.dumps({"detail": detail}).encode()
        self._identify = identify
        self._look_up = look_up
        self._in_thread = in_thread
        self._opens = opens
        self._buckets = TokenBuckets(clock)
        self._pause = pause
        self._known: OrderedDict[bytes, None] = OrderedDict()  # headers of callers that were identified

    async def admit(self, request: Incoming) -> Response | None:
        request.caller = await self._caller(request.scope)
        opens = self._opens(request.path)
        known = request.caller is not None if opens is None else opens
        return None if known else await self.take(request)

    async def take(self, request: Incoming) -> Response | None:
        """Count a request of a stranger. If there is no room for it, return a late refusal."""
        wait_s = self._buckets.take("", per_s=self._per_s)
        if wait_s == 0:
            return None
        request.scope["route"] = _ROUTE
        if (connection := connection_of(request.scope)) is not None:
            connection.delays()
        await self._pause(spread(REFUSED_AFTER_S))
        headers = {"retry-after": str(max(1, math.ceil(wait_s)))}
        answer = Response(self._refusal, 429, headers, media_type="application/json")
        return answer if request.scope["method"] in ("GET", "HEAD") else closing(answer)

    async def _caller(self, scope: Scope) -> Principal | None:
        """Return who sent a request; None if that is unknown, or is not asked.

        While strangers come too fast, store and plugins are asked about none but those who were known before.
        """
        if self._look_up is not None:
            await self._look_up(Headers(scope=scope), unknown=self._buckets.wait("", per_s=self._per_s) == 0)
        if not self._in_thread:
            found = self._identified(scope)
        else:
            headers = _fingerprint(scope["headers"])
            if headers not in self._known and self._buckets.wait("", per_s=self._per_s) > 0:
                return None
            found = await run_in_threadpool(self._identified, scope)
            if found is not None:
                self._note_known(headers)
        if found is not None and (connection := connection_of(scope)) is not None:
            connection.is_known = True
        return found

    def _identified(self, scope: Scope) -> Principal | None:
        try:
            return self._identify(scope)
        except TinsmithError:
            return None

    def _note_known(self, headers: bytes) -> None:
        self._known[headers] = None
        self._known.move_to_end(headers)
        if len(self._known) > _KNOWN:
            self._known.popitem(last=False)


def spread(seconds: float) -> float:
    """Return a time of that average, from half of it to one and a half."""
    return seconds * random.uniform(0.5, 1.5)


def _fingerprint(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    found = hashlib.sha256()
    for name, value in sorted(headers):
        if not (name.startswith(_CHANGING) or _CHANGING_WORDS.search(name)):
            found.update(b"%d:%b%d:%b" % (len(name), name, len(value), value))
    return found.digest()
