"""What a request has to do with an operation, for tracers: noted while the request is answered."""

import re
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Final

from tinsmith.store import NewOperation, OperationRecord

_TRACEPARENT: Final = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
"""Later versions may be longer; the first four fields are of the same form."""


@dataclass(slots=True)
class RequestTrace:
    traceparent: str | None = None
    request_id: str | None = None
    submitted: bool = False
    submitted_with: str | None = None


_of_request: ContextVar[RequestTrace | None] = ContextVar("tinsmith.request_trace", default=None)


def begin(header: bytes | None) -> RequestTrace:
    """Note for the rest of this task that a request is answered. A header of another form is ignored, as W3C says."""
    match = None if header is None else _TRACEPARENT.match(header)
    trace = RequestTrace(traceparent=None if match is None else match[0].decode())
    _of_request.set(trace)
    return trace


def traced(operation: NewOperation) -> NewOperation:
    """Return the operation with the `traceparent` of its request."""
    trace = _of_request.get()
    given = None if trace is None else trace.traceparent
    return operation if given is None else replace(operation, traceparent=given)


def note_submitted(operation: NewOperation, request_id: str) -> None:
    if (trace := _of_request.get()) is not None:
        trace.request_id, trace.submitted, trace.submitted_with = request_id, True, operation.traceparent


def note_answered(operation: OperationRecord) -> None:
    if (trace := _of_request.get()) is not None:
        trace.request_id, trace.submitted_with = operation.request_id, operation.traceparent
