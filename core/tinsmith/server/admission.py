"""Decides at the head of a request whether it may go on, before its body is read or decoded.

A tenant that sends too many requests, or has too many in progress, is refused here, so a refusal costs next to nothing.
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
from tinsmith.server.bodies import STRANGER_BYTES, closing, note_route
from tinsmith.server.context import API_PREFIX
from tinsmith.server.error_answers import tinsmith_error
from tinsmith.server.quotas import Quotas

LONG_POLLS: Final = frozenset({f"{API_PREFIX}/retrieve_future", f"{API_PREFIX}/retrieve_futures"})

OPEN: Final = frozenset({f"{API_PREFIX}/healthz"})
"""Routes that need no key, and answer everybody at any time."""

Identify = Callable[[Scope], Principal]
"""Raises TinsmithError if the caller is unknown."""

KeyId = Callable[[Principal, Mapping[str, str]], str | None]
"""Takes a caller and headers. Returns the id of the caller's API key, or None if another credential was used."""


class Admission:
    """ASGI middleware. A request whose sender is unknown goes on: its route refuses it, unless it needs no key."""

    def __init__(
        self, app: ASGIApp, *, quotas: Quotas, identify: Identify, key_id: KeyId, in_thread: bool = True
    ) -> None:
        """`in_thread`: whether `identify` may block, as a plugin does that asks elsewhere."""
        self._app = app
        self._quotas = quotas
        self._identify = identify
        self._in_thread = in_thread
        self._key_id = key_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = await self._caller(scope)
        if caller is None:
            await self._app(scope, receive, send)
            return
        with ExitStack() as held:
            try:
                self._quotas.admit_request(caller.tenant, lambda: self._key_id(caller, Headers(scope=scope)))
                held.enter_context(self._quotas.in_progress(caller.tenant, polls=scope["path"] in LONG_POLLS))
            except CapacityError as error:
                await _refuse(error, scope, receive, send)
                return
            await self._app(scope, receive, send)

    async def _caller(self, scope: Scope) -> Principal | None:
        if scope["type"] != "http" or not scope["path"].startswith(f"{API_PREFIX}/") or scope["path"] in OPEN:
            return None
        try:
            return await run_in_threadpool(self._identify, scope) if self._in_thread else self._identify(scope)
        except TinsmithError:
            return None


async def _refuse(error: CapacityError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer without reading the body. The connection stays, unless what would have to be dropped is large."""
    note_route(scope)
    answer = await tinsmith_error(Request(scope, receive), error)
    headers = Headers(scope=scope)
    is_small = "transfer-encoding" not in headers and int(headers.get("content-length", "0")) <= STRANGER_BYTES
    await answer(scope, receive, send if is_small else closing(send))
