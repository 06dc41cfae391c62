"""Limits callers without a valid key: one bucket of requests for all of them together.

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

from starlette.types import Scope, Send

from tinsmith.server.limits.bounded_http import connection_of
from tinsmith.server.limits.counts import TokenBuckets

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
    """One per app."""

    def __init__(
        self, *, per_s: float, clock: Callable[[], float] = time.monotonic, pause: Pause = asyncio.sleep
    ) -> None:
        self._per_s = per_s
        self._buckets = TokenBuckets(clock)
        self._pause = pause
        self._known: OrderedDict[bytes, None] = OrderedDict()  # headers of callers that were identified

    def take(self) -> float:
        """Count a request of a stranger. Return 0, or the seconds after which there is room for one."""
        return self._buckets.take("", per_s=self._per_s)

    async def refuse(self, wait_s: float, scope: Scope, send: Send) -> None:
        """Answer late, without reading the body, and close the connection if there may be one."""
        scope["route"] = _ROUTE
        if (connection := connection_of(scope)) is not None:
            connection.delays()
        await self._pause(spread(REFUSED_AFTER_S))
        detail = (
            f"callers without a valid API key send more than {self._per_s:g} requests per second together, which is "
            "their limit (server.limits.keyless_requests_per_s); send a key, or try again later"
        )
        headers = [(b"content-type", b"application/json"), (b"retry-after", b"%d" % max(1, math.ceil(wait_s)))]
        if scope["method"] not in ("GET", "HEAD"):
            headers.append((b"connection", b"close"))
        body = json.dumps({"detail": detail}).encode()
        headers.append((b"content-length", b"%d" % len(body)))
        await send({"type": "http.response.start", "status": 429, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    # While strangers come too fast, plugins are asked about none but those who were known before ---------------------

    def refuses_unasked(self, scope: Scope) -> float:
        """Return 0, or the seconds after which it may be asked who sent a request."""
        if _fingerprint(scope["headers"]) in self._known:
            return 0.0
        return self._buckets.wait("", per_s=self._per_s)

    def note_known(self, scope: Scope) -> None:
        fingerprint = _fingerprint(scope["headers"])
        self._known[fingerprint] = None
        self._known.move_to_end(fingerprint)
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
