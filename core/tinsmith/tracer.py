"""The seam of tracers, which record where requests and operations spend their time. Core knows no format of traces.

A client may send the header `traceparent` of W3C Trace Context. The log keeps it with the operation, so an engine tells
it as well, in another process and after a restart.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, TypeVar

from tinsmith.backend import BackendConfig
from tinsmith.figures import WorkerCall
from tinsmith.hook_values import OperationFinished

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFinished:
    """An HTTP request that has been answered. It holds nothing of its body, its query, or its headers but one."""

    method: str
    route: str  # with its parameters by name: no id, key or signature of a path
    status: int
    arrived_at: datetime
    took_s: float
    traceparent: str | None = None  # as the request came with it
    tenant: str | None = None
    request_id: str | None = None  # the operation that it submitted, or whose result it got
    submitted: bool = False
    submitted_with: str | None = None  # the `traceparent` with which that operation was submitted


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFinished:
    """Operations that a backend ran in one call, or one operation that ran by itself; their results are durable."""

    ran_at: datetime
    run_s: float
    operations: tuple[OperationFinished, ...]
    calls: tuple[WorkerCall, ...] = ()  # of the backend's workers, if it has any


class Tracer(ABC):
    """Belongs to one process. It is called on the event loop, so it must not block; what it raises is logged."""

    @abstractmethod
    def request_finished(self, event: RequestFinished) -> None:
        """Record a request. Called in a server."""

    @abstractmethod
    def batch_finished(self, event: BatchFinished) -> None:
        """Record a batch, and each of its operations. Called in an engine."""

    @abstractmethod
    def close(self) -> None:
        """Send what is left, within seconds. May block: the process ends afterwards."""


C = TypeVar("C", bound=BackendConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracerSpec(Generic[C]):
    name: str
    config: type[C]
    create: Callable[[C, str], Tracer]
    """Takes the config, and what the process is: `server`, or `engine`."""
    description: str = ""


AnyTracerSpec = TracerSpec[Any]  # Any: specs of different configs live in one registry

E = TypeVar("E")


def tell(record: Callable[[E], None], event: E) -> None:
    """Call a method of a tracer, which must not disturb what it observes."""
    try:
        record(event)
    except Exception:
        _log.exception("the tracer failed")
