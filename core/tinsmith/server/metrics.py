"""The server's own counters, for `/metrics`: answers, accepted operations, fields that it does not know."""

import re
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from datetime import UTC, datetime, timedelta
from functools import partial
from http import HTTPStatus
from importlib.metadata import version
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tinsmith import log_fields
from tinsmith.protocol.unknown_fields import UnknownField
from tinsmith.server.refusal_log import RefusalLog
from tinsmith.server.request_trace import RequestTrace, begin
from tinsmith.settings import Settings
from tinsmith.store.disk_room import reserve_bytes, space_at
from tinsmith.tracer import RequestFinished, Tracer, tell

MOST_NAMES: Final = 100
"""That are shown; clients make them up, and each takes memory here and wherever metrics are kept."""

OTHER: Final = "(other)"

_SHOWN: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,39}|[0-9]{1,9}")
_STILL_PENDING: Final = 408  # of a long poll
_REQUEST_ID: Final = b"x-request-id"
_TRACEPARENT: Final = b"traceparent"
_SOUND_ID: Final = re.compile(rb"[\x21-\x7e]{1,128}")


class UnknownFieldCounts:
    """Counts by message and field. Names come in the order in which they were first seen; later ones are `(other)`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._counter = Counter(
            "tinsmith_unknown_fields",
            "requests refused because of a field that this server does not know",
            ["message", "field"],
            registry=registry,
        )
        self._named: set[UnknownField] = set()
        self._lock = threading.Lock()

    def count(self, fields: Iterable[UnknownField]) -> None:
        for field in fields:
            self._counter.labels(message=field.message, field=field.name if self._shows(field) else OTHER).inc()

    def _shows(self, field: UnknownField) -> bool:
        with self._lock:
            if field not in self._named and len(self._named) < MOST_NAMES and _SHOWN.fullmatch(field.name):
                self._named.add(field)
            return field in self._named


class Metrics:
    """The server's own metrics."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        Gauge("tinsmith_build_info", "1", ["version"], registry=registry).labels(version("tinsmith")).set(1)
        counter, of = partial(Counter, registry=registry), ("base_model", "kind")
        self.requests = counter("tinsmith_http_requests", "answers by route and status", ["route", "status"])
        self.submitted = counter("tinsmith_operations_submitted", "operations accepted", of)
        self.tokens = counter("tinsmith_tokens_submitted", "tokens of accepted operations", of)
        self.seconds = Histogram(
            "tinsmith_http_seconds", "time to answer, long polls included", ["route"], registry=registry
        )
        self.stand_ins = counter(
            "tinsmith_stand_in_passes",
            "accepted passes for which another loss stands in, by the loss that was asked for and the other one",
            ["base_model", "loss_fn", "stand_in"],
        )
        self.routing_replay = counter(
            "tinsmith_routing_replay_sequences",
            "sequences of accepted passes, by whether their experts are those of a sample or the trainer's choice",
            [*of, "outcome"],
        )
        self.unknown_fields = UnknownFieldCounts(registry)


def show_space(metrics: Metrics, settings: Settings) -> None:
    """Let `/metrics` ask the disk."""
    read, quotas = partial(space_at, settings.data_dir.root), settings.quotas
    free = Gauge("tinsmith_disk_free_bytes", "free bytes of the data directory's disk", registry=metrics.registry)
    free.set_function(lambda: read().free_bytes)
    reserve = Gauge(
        "tinsmith_disk_reserve_bytes",
        "of these, bytes that only heartbeats, results and deletions may use",
        registry=metrics.registry,
    )
    reserve.set_function(lambda: reserve_bytes(quotas, read()))


Audit = Callable[[str], Awaitable[None]]
"""Takes the method and the route of a request."""


class Measured:
    """ASGI middleware that counts and times the answers of each route, logs refusals, and repeats requests' ids.

    It tells the tracer of each.
    """

    def __init__(
        self, app: ASGIApp, *, metrics: Metrics, refusal_log: RefusalLog, audit: Audit, tracer: Tracer | None
    ) -> None:
        """`audit` records some of the requests that were refused for their key: as many as the log has lines for."""
        self._app = app
        self._metrics = metrics
        self._refusal_log = refusal_log
        self._audit = audit
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), 500
        given = next((value for name, value in scope["headers"] if name == _REQUEST_ID), b"")
        x_request_id = given.decode() if _SOUND_ID.fullmatch(given) else None
        log_fields.begin_request(x_request_id)
        trace = begin(next((value for name, value in scope["headers"] if name == _TRACEPARENT), None))

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if x_request_id is not None:
                    message["headers"] = [*message.get("headers", ()), (_REQUEST_ID, given)]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            route = getattr(scope.get("route"), "path", "(none)")
            self._metrics.requests.labels(route=route, status=status).inc()
            took_s = time.perf_counter() - started
            self._metrics.seconds.labels(route=route).observe(took_s)
            if self._tracer is not None:
                self._trace(self._tracer, trace, scope["method"], route, status, took_s)
            if 400 <= status < 500 and status != _STILL_PENDING:
                why = f"{status} {HTTPStatus(status).phrase}"
                what = f"{scope['method']} {route}"
                told = self._refusal_log.tell(what, why, log_fields.of_request().get("tenant"))
                if told and status == HTTPStatus.UNAUTHORIZED:
                    await self._audit(what)

    def _trace(self, tracer: Tracer, trace: RequestTrace, method: str, route: str, status: int, took_s: float) -> None:
        event = RequestFinished(
            method=method,
            route=route,
            status=status,
            arrived_at=datetime.now(UTC) - timedelta(seconds=took_s),
            took_s=took_s,
            traceparent=trace.traceparent,
            tenant=log_fields.of_request().get("tenant"),
            request_id=trace.request_id,
            submitted=trace.submitted,
            submitted_with=trace.submitted_with,
        )
        tell(tracer.request_finished, event)
