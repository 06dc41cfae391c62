"""Refuses requests before any other check: foreign host names for a server without keys, and unreadable paths.

Without configured keys, every caller may use the server, so it listens on loopback only. A web page on the same
machine's browser reaches loopback, too: by a name of its own that resolves to 127.0.0.1 (so `Host` is foreign), or from
another site (so `Origin` is).
"""

import ipaddress
from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from tinsmith.protocol import bounds
from tinsmith.server.limits.edge import Incoming, closing, note_route
from tinsmith.server.limits.strangers import Strangers
from tinsmith.settings import Settings

MAX_PATH_CHARS: Final = 4096

_REMEDY: Final = (
    "use 'localhost', set server.public_url to the URL that clients use, or configure server.api_keys, which lifts this"
)


class Gate:
    """It refuses strangers' requests."""

    def __init__(self, *, names: frozenset[str] | None, strangers: Strangers) -> None:
        """`names` are those that the server goes by; None allows every name and origin."""
        self._names = names
        self._strangers = strangers

    async def admit(self, request: Incoming) -> Response | None:
        refused = self._refusal(request.scope)
        if refused is None:
            return None
        if (late := await self._strangers.take(request)) is not None:
            return late
        note_route(request.scope)
        status, detail = refused
        return closing(JSONResponse({"detail": detail}, status))

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Return status and detail of a refusal, or None."""
        headers = Headers(scope=scope)
        if self._names is not None:
            for header, values in (("Host", headers.getlist("host")), ("Origin", headers.getlist("origin"))):
                foreign = self._foreign(values, self._names)
                if foreign is not None:
                    return 403, f"{header} {foreign[:200]!r} is not allowed on a server without API keys; {_REMEDY}"
        if len(scope["path"]) > MAX_PATH_CHARS:
            return 400, f"the path has {len(scope['path'])} characters; allowed: {MAX_PATH_CHARS}"
        try:
            bounds.plain(scope["path"])
        except ValueError as error:
            return 400, f"the path {error}"
        return None

    def _foreign(self, values: Iterable[str], names: frozenset[str]) -> str | None:
        return next((value for value in values if not _is_local(_name_in(value), names)), None)


def names_of(settings: Settings) -> frozenset[str] | None:
    """Return the names of a server that is open to everybody, in addition to loopback's; None for any other."""
    server = settings.server
    if server.api_keys or settings.login is not None:
        return None
    return frozenset({server.host.lower(), _name_in(server.public_url or "")}) - {""}


def _name_in(value: str) -> str:
    """Return the host's name in `HOST`, `HOST:PORT` or a URL; "" if there is none."""
    try:
        found = urlsplit(value if "//" in value else f"//{value}").hostname
    except ValueError:
        return ""
    return (found or "").removesuffix(".")


def _is_local(name: str, names: frozenset[str]) -> bool:
    if name in names or name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
