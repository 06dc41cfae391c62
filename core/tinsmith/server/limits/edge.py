"""Takes each request past the limits, in the order of a list, before its route.

To add a limit, write a class with `admit` and put an instance into the list in `create_app`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final, Protocol

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send

from tinsmith.errors import TinsmithError
from tinsmith.hook_values import Principal
from tinsmith.server.context import API_PREFIX
from tinsmith.server.error_answers import tinsmith_error
from tinsmith.server.limits.body_budget import STRANGER_BYTES
from tinsmith.server.limits.quotas import Quotas

LONG_POLLS: Final = frozenset(f"{API_PREFIX}/{path}" for path in ("retrieve_future", "retrieve_futures", "run_events"))

METRICS: Final = "/metrics"
"""By which operators see that a tenant has too much in progress: it never counts."""

Identify = Callable[[Scope], Principal]
"""Raises TinsmithError if the caller is unknown."""

KeyId = Callable[[Principal, Mapping[str, str]], str | None]
"""Takes a caller and headers. Returns the id of the caller's API key, or None if another credential was used."""


class LookUp(Protocol):
    async def __call__(self, headers: Mapping[str, str], *, unknown: bool = True) -> None:
        """Prepare for identifying the sender of these headers, without waiting there for the store.

        unknown: whether to ask the store for keys that were never seen before.
        """


@dataclass(slots=True)
class Incoming:
    """A request on its way. Limits may replace `receive`, and note the caller."""

    scope: Scope
    receive: Receive
    app: ASGIApp  # what answers if nothing stops the request
    held: ExitStack  # what is given back once it is answered
    caller: Principal | None = None

    @property
    def path(self) -> str:
        path: str = self.scope["path"]
        return path


class Limit(Protocol):
    async def admit(self, request: Incoming) -> ASGIApp | None:
        """Return what answers in place of the route, None if the request may go on.

        Raises TinsmithError to refuse it. `Response` is an ASGIApp.
        """


class Edge:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, *, limits: Sequence[Limit]) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with ExitStack() as held:
            request = Incoming(scope, receive, self._app, held)
            answer = await self._stopped(request) or self._app
            await answer(scope, request.receive, send)

    async def _stopped(self, request: Incoming) -> ASGIApp | None:
        for limit in self._limits:
            try:
                answer = await limit.admit(request)
            except TinsmithError as error:
                answer = await refusal(request, error, closes=_is_large(request))
            if answer is not None:
                return answer
        return None


class Rates:
    """A tenant that sends too many requests, or has too many in progress, is refused by the head alone.

    Requests to plugins' routes count as well: an answer that is streamed may stay open for long.
    """

    def __init__(self, quotas: Quotas, key_id: KeyId) -> None:
        self._quotas = quotas
        self._key_id = key_id

    async def admit(self, request: Incoming) -> None:
        if (caller := request.caller) is None:
            return
        self._quotas.admit_request(caller.tenant, lambda: self._key_id(caller, Headers(scope=request.scope)))
        if request.path != METRICS:
            counted = self._quotas.in_progress(caller.tenant, polls=request.path in LONG_POLLS)
            request.held.enter_context(counted)


async def refusal(request: Incoming, error: TinsmithError, *, closes: bool) -> Response:
    """Return the answer to an error. `closes`: no other request can follow, because the body is not read."""
    note_route(request.scope)
    answer = await tinsmith_error(Request(request.scope, request.receive), error)
    return closing(answer) if closes else answer


def closing(answer: Response) -> Response:
    answer.headers["connection"] = "close"
    return answer


def note_route(scope: Scope) -> None:
    """Set the route in the scope, as the router would, so that the answer is counted under it."""
    for route in scope["app"].routes if "app" in scope else ():
        match, found = route.matches(scope)
        if match is Match.FULL:
            scope["route"] = found.get("route", route)
            return


def _is_large(request: Incoming) -> bool:
    headers = Headers(scope=request.scope)
    return "transfer-encoding" in headers or int(headers.get("content-length", "0")) > STRANGER_BYTES
