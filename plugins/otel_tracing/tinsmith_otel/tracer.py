"""Makes spans of what has ended, with the times that core measured, and sends them by OTLP over HTTP.

A request is the parent of the operation that it submitted, and the operation of its phases. A batch has a span of its
own, inside the first of its operations, with links to all of them; the phases that it ran link to it.
"""

import socket
import threading
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from typing import Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import Decision, ParentBasedTraceIdRatio
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    set_span_in_context,
)

import tinsmith
from tinsmith.tracing import PHASES, BatchFinished, Phase, RequestFinished, Tracer, WorkerCall
from tinsmith_otel.config import OtelConfig
from tinsmith_otel.ids import PlannedIds, context_of, context_of_request

_CLOSE_S: Final = 2.0
_MOST_CALLS, _MOST_WORKERS = 32, 8  # of a batch, and of a call
_SERVER_ERROR: Final = 500
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_RECORDING: Final = "recording"
_WAITING: Final = "wait_"

Attributes = Mapping[str, str | int | float]


class OtelTracer(Tracer):
    """The exporter has a thread of its own. If it cannot send, spans are dropped; nobody waits for it."""

    def __init__(self, config: OtelConfig, process: str) -> None:
        endpoint = None if config.endpoint is None else f"{config.endpoint.rstrip('/')}/v1/traces"
        sampler = None if config.sample_ratio is None else ParentBasedTraceIdRatio(config.sample_ratio)
        self._ids = PlannedIds()
        self._provider = TracerProvider(
            sampler=sampler, resource=_resource(process), shutdown_on_exit=False, id_generator=self._ids
        )
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("tinsmith", version("tinsmith"))

    def request_finished(self, event: RequestFinished) -> None:
        """Record a request that submitted an operation or got its result, or whose client sent a context."""
        client = None if event.traceparent is None else context_of(event.traceparent)
        if event.request_id is None:
            if client is not None:
                self._request(event, parent=client)
            return
        first = None if event.submitted_with is None else context_of(event.submitted_with)
        if (submitted := self._submitted(event.request_id, first)) is None:
            if client is not None and not event.submitted:
                self._request(event, parent=client)
        elif event.submitted:
            self._request(event, parent=first, own=submitted)
        elif client is None:
            self._request(event, parent=submitted)
        else:
            self._request(event, parent=client, links=[Link(submitted)])

    def batch_finished(self, event: BatchFinished) -> None:
        traced = [
            (each, self._start(each, parent))
            for each in event.operations
            if (parent := self._submitted(each.request_id, _client_of(each))) is not None
        ]
        if not traced:
            return
        batch = self._batch(event, [span for _, span in traced]) if traced[0][0].model_id is not None else None
        for operation, span in traced:
            for phase in operation.phases():
                self._phase(phase, span, batch)
            span.end(_ns(operation.recorded_at or event.ran_at))

    def close(self) -> None:
        closing = threading.Thread(target=self._provider.shutdown, name="close-traces", daemon=True)
        closing.start()
        closing.join(_CLOSE_S)  # by itself it waits half a minute for a collector that does not answer

    def _submitted(self, request_id: str, client: SpanContext | None) -> SpanContext | None:
        """Return the context of the request that submitted an operation; None if it is not traced.

        The samplers of OpenTelemetry decide by a trace's id and its parent alone, so all processes decide alike.
        """
        context = context_of_request(request_id, client)
        parent = None if client is None else set_span_in_context(NonRecordingSpan(client))
        decision = self._provider.sampler.should_sample(parent, context.trace_id, "", SpanKind.SERVER).decision
        return context if decision is Decision.RECORD_AND_SAMPLE else None

    def _request(
        self,
        event: RequestFinished,
        *,
        parent: SpanContext | None,
        own: SpanContext | None = None,
        links: Sequence[Link] = (),
    ) -> None:
        attributes: dict[str, str | int] = {
            "http.request.method": event.method,
            "http.route": event.route,
            "http.response.status_code": event.status,
        }
        if event.tenant is not None:
            attributes["tinsmith.tenant"] = event.tenant
        if event.request_id is not None:
            attributes["tinsmith.request_id"] = event.request_id
        if own is not None:
            self._ids.plan(own)
        span = self._tracer.start_span(
            f"{event.method} {event.route}",
            None if parent is None else set_span_in_context(NonRecordingSpan(parent)),
            SpanKind.SERVER,
            attributes,
            links,
            _ns(event.arrived_at),
        )
        self._ids.forget()
        if event.status >= _SERVER_ERROR:
            span.set_status(Status(StatusCode.ERROR))
        span.end(_ns(event.arrived_at + timedelta(seconds=event.took_s)))

    def _start(self, event: tinsmith.OperationFinished, parent: SpanContext) -> Span:
        """Start the span of an operation. It has only the kind of a failure, whose message may quote prompts."""
        span = self._tracer.start_span(
            event.kind,
            set_span_in_context(NonRecordingSpan(parent)),
            SpanKind.CONSUMER,
            _attributes(event),
            start_time=_ns(event.arrived_at or event.recorded_at or datetime.now(UTC)),
        )
        if event.failed is not None:
            span.set_attribute("error.type", event.failed.category)
            span.set_status(Status(StatusCode.ERROR))
        return span

    def _batch(self, event: BatchFinished, operations: Sequence[Span]) -> Span:
        first = event.operations[0]
        span = self._tracer.start_span(
            f"batch {first.kind}",
            set_span_in_context(operations[0]),
            attributes={
                "tinsmith.base_model": first.base_model,
                "tinsmith.batch.operations": len(event.operations),
                "tinsmith.batch.models": len({each.model_id for each in event.operations}),
                "tinsmith.batch.tokens": sum(each.num_tokens for each in event.operations),
            },
            links=[Link(each.get_span_context()) for each in operations],
            start_time=_ns(event.ran_at),
        )
        for call in event.calls[:_MOST_CALLS]:
            self._call(call, span)
        span.end(_ns(event.ran_at + timedelta(seconds=event.run_s)))
        return span

    def _call(self, call: WorkerCall, batch: Span) -> None:
        """Record what the slowest workers did. Clocks of other machines are not asked."""
        slowest = sorted(call.workers, key=lambda each: each.took_s, reverse=True)[:_MOST_WORKERS]
        for rank, host, took_s in slowest:
            span = self._tracer.start_span(
                f"worker {call.method}",
                set_span_in_context(batch),
                attributes={
                    "tinsmith.worker.rank": rank,
                    "tinsmith.worker.host": host,
                    "tinsmith.worker.of": len(call.workers),
                },
                start_time=_ns(call.began_at),
            )
            span.end(_ns(call.began_at + timedelta(seconds=took_s)))

    def _phase(self, phase: Phase, operation: Span, batch: Span | None) -> None:
        waits = phase.phase.startswith(_WAITING)
        ran = batch is not None and not waits and phase.phase != _RECORDING
        span = self._tracer.start_span(
            phase.phase,
            set_span_in_context(operation),
            attributes={"tinsmith.reason": PHASES[phase.phase]} if waits else None,
            links=[Link(batch.get_span_context())] if ran and batch is not None else None,
            start_time=_ns(phase.start),
        )
        span.end(_ns(phase.end))


def _resource(process: str) -> Resource:
    """Server and engines are services of their own, unless the environment names them."""
    named = SERVICE_NAME in OTELResourceDetector().detect().attributes
    own = {} if named else {SERVICE_NAME: f"tinsmith-{process}"}
    return Resource.create({**own, "service.version": version("tinsmith"), "host.name": socket.gethostname()})


def _client_of(event: tinsmith.OperationFinished) -> SpanContext | None:
    return None if event.traceparent is None else context_of(event.traceparent)


def _attributes(event: tinsmith.OperationFinished) -> Attributes:
    known = {
        "request_id": event.request_id,
        "base_model": event.base_model,
        "tenant": event.tenant,
        "session": event.session_id,
        "run": event.model_id,
        "seq_id": event.seq_id,
        "step": event.step,
        "tokens": event.num_tokens,
    }
    return {f"tinsmith.{name}": value for name, value in known.items() if value is not None}


def _ns(moment: datetime) -> int:
    return (moment - _EPOCH) // timedelta(microseconds=1) * 1000
