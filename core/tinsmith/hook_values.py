"""Arguments and results of hooks: the sender of a request, the context of plugin routes, the events for observers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from tinsmith.operations import Consistency, Failed
from tinsmith.store import RequestStore

if TYPE_CHECKING:
    from fastapi import Request
    from prometheus_client import CollectorRegistry

E = TypeVar("E")


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """The sender of a request. `tenant` owns whatever the request creates; tenants never see each other's objects."""

    tenant: str
    name: str = ""  # shown to people
    admin: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutesContext:
    """Parts of the server that the routes are added to."""

    store: RequestStore  # open while requests are answered; not yet open when the hook is called
    registry: CollectorRegistry  # `/metrics` shows it; a plugin may register its own collectors
    caller: Callable[[Request], Principal]
    """Identifies the sender of a request, as core's routes do: use it as `Depends(context.caller)`."""
    _public: list[object] = field(default_factory=list, init=False, repr=False)

    def public(self, endpoint: E) -> E:
        """Mark the endpoint of a route that needs no key. All others answer an unknown sender with a 401."""
        self._public.append(endpoint)
        return endpoint

    def is_public(self, endpoint: object) -> bool:
        return endpoint in self._public


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
    consistency: Consistency | None = None  # set for a save for sampling, even if it is refused
    seq_id: int | None = None  # of an operation of a model
    step: int | None = None  # optimizer steps that the model had made before it
    metrics: Mapping[str, float] = field(default_factory=dict)  # of a pass or an optimizer step
