"""What hooks are called with and return: who sent a request, what routes of plugins work with, what observers learn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinsmith.operations import Consistency, Failed
from tinsmith.store import RequestStore

if TYPE_CHECKING:
    from fastapi import Request
    from prometheus_client import CollectorRegistry


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """`tenant` owns what the request makes; one tenant never sees another's."""

    tenant: str
    name: str = ""  # shown to people
    admin: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutesContext:
    """Of the server that the routes are added to."""

    store: RequestStore  # open while requests are answered, not yet when routes are asked for
    registry: CollectorRegistry  # what `/metrics` shows; a plugin may register collectors of its own
    caller: Callable[[Request], Principal]
    """Says who sent a request, as for core's routes: use it as `Depends(context.caller)`. The answer is 401 where
    nobody knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStarted:
    url: str
    base_models: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStopping:
    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationFinished:
    request_id: str
    base_model: str
    kind: str
    tenant: str
    model_id: str | None
    num_tokens: int
    queued_s: float  # from submit to claim
    run_s: float  # in the backend, shared by the whole batch
    batch_size: int
    failed: Failed | None = None
    consistency: Consistency | None = None  # of a save for sampling, also where it was refused
