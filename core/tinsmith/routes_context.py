"""What the HTTP routes of plugins work with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinsmith.principal import Principal
from tinsmith.store import RequestStore

if TYPE_CHECKING:
    from fastapi import Request
    from prometheus_client import CollectorRegistry


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutesContext:
    """Of the server that the routes are added to."""

    store: RequestStore  # open while requests are answered, not yet when routes are asked for
    registry: CollectorRegistry  # what `/metrics` shows; a plugin may register collectors of its own
    caller: Callable[[Request], Principal]
    """Says who sent a request, as for core's routes: use it as `Depends(context.caller)`. The answer is 401 where
    nobody knows."""
