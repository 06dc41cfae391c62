"""Decides at the head of a request whether it may go on, before its body is read or decoded.

A tenant that sends too many requests, or has too many in progress, is refused here, so a refusal costs next to nothing.
So are callers without a valid key, which share one limit.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Final

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from tinsmith.errors import CapacityError, TinsmithError
from tinsmith.hook_values import Principal
from tinsmith.server.context import API_PREFIX
from tinsmith.server.error_answers import tinsmith_error
from tinsmith.server.limits.bodies import STRANGER_BYTES, closing, note_route
from tinsmith.server.limits.bounded_http import connection_of
from tinsmith.server.limits.probes import Probes, is_probe
from tinsmith.server.limits.quotas import Quotas
from tinsmith.server.limits.strangers import Strangers

LONG_POLLS: Final = frozenset(f"{API_PREFIX}/{path}" for path in ("retrieve_future", "retrieve_futures", "run_events"))

Identify = Callable[[Scope], Principal]
"""Raises TinsmithError if the caller is unknown."""

KeyId = Callable[[Principal, Mapping[str, str]], str | None]
"""Takes a caller and headers. Returns the id of the caller's API key, or None if another credential was used."""


class Admission:
    """ASGI middleware. A request whose sender is unknown goes on: its route refuses it, unless it needs no key."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        quotas: Quotas,
        identify: Identify,
        key_id: KeyId,
        strangers: Strangers,
        has_link: Callable[[str], bool] = lambda _path: False,
        in_thread: bool = True,
    ) -> None:
        """Make it.

        has_link: whether a path is a signed download link, which stands for a key.
        in_thread: whether `identify` may block, as a plugin does that asks elsewhere.
        """
        self._app = app
        self._strangers = strangers
        self._probes = Probes(app)
        self._has_link = has_link
        self._quotas = quotas
        self._identify = identify
        self._in_thread = in_thread
        self._key_id = key_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif is_probe(scope):
            await self._probes.answer(scope, receive, send)
        elif (caller := await self._caller(scope)) is not None:
            await self._admit(caller, scope, receive, send)
        elif not self._has_link(scope["path"]) and (wait_s := self._strangers.take()) > 0:
            await self._strangers.refuse(wait_s, scope, send)
        else:
            await self._app(scope, receive, send)

    async def _admit(self, caller: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request of a tenant, unless it is over a limit. Only requests of the API count as in progress."""
        path = scope["path"]
        with ExitStack() as held:
            try:
                self._quotas.admit_request(caller.tenant, lambda: self._key_id(caller, Headers(scope=scope)))
                if path.startswith(f"{API_PREFIX}/"):
                    held.enter_context(self._quotas.in_progress(caller.tenant, polls=path in LONG_POLLS))
            except CapacityError as error:
                await _refuse(error, scope, receive, send)
                return
            await self._app(scope, receive, send)

    async def _caller(self, scope: Scope) -> Principal | None:
        """Return who sent a request; None if that is unknown, or is not asked because strangers come too fast."""
        if self._in_thread and self._strangers.refuses_unasked(scope) > 0:
            return None
        try:
            caller = await run_in_threadpool(self._identify, scope) if self._in_thread else self._identify(scope)
        except TinsmithError:
            return None
        if (connection := connection_of(scope)) is not None:
            connection.is_known = True
        if self._in_thread:
            self._strangers.note_known(scope)
        return caller


async def _refuse(error: CapacityError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer without reading the body. The connection stays, unless what would have to be dropped is large."""
    note_route(scope)
    answer = await tinsmith_error(Request(scope, receive), error)
    headers = Headers(scope=scope)
    is_small = "transfer-encoding" not in headers and int(headers.get("content-length", "0")) <= STRANGER_BYTES
    await answer(scope, receive, send if is_small else closing(send))
