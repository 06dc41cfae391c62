"""The ids of traces and spans that a server and an engine must agree on without telling each other.

What an operation's request is called in a trace follows from its request_id, which is random. Only the context that a
client sends has to be kept, and core keeps it with the operation.
"""

import hashlib

from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import SpanContext, TraceFlags

_SPAN_BYTES = 8


class PlannedIds(RandomIdGenerator):
    """Random ids, except where the next ones are planned. For use in one thread."""

    def __init__(self) -> None:
        self._trace_id: int | None = None
        self._span_id: int | None = None

    def plan(self, context: SpanContext) -> None:
        """Give the next span these ids. If it has a parent, it takes the trace's id from there."""
        self._trace_id, self._span_id = context.trace_id, context.span_id

    def forget(self) -> None:
        self._trace_id = self._span_id = None

    def generate_trace_id(self) -> int:
        return super().generate_trace_id() if self._trace_id is None else self._trace_id

    def generate_span_id(self) -> int:
        return super().generate_span_id() if self._span_id is None else self._span_id


def context_of(traceparent: str) -> SpanContext:
    """Return the client's context. Core has checked the form."""
    _, trace_id, span_id, flags = traceparent.split("-")
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16)))


def context_of_request(request_id: str, client: SpanContext | None) -> SpanContext:
    """Return the context of the request that submitted an operation, as a remote parent that is sampled.

    A client that repeats the request gets the same operation, and the same id.
    """
    digest = hashlib.sha256(request_id.encode()).digest()
    trace_id = int.from_bytes(digest[_SPAN_BYTES : 3 * _SPAN_BYTES]) if client is None else client.trace_id
    span_id = int.from_bytes(digest[:_SPAN_BYTES])
    return SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
