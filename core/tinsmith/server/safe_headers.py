"""Headers that keep browsers from misusing an answer, on all answers of core and plugins, errors included."""

from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_DEFAULTS: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"content-security-policy", b"frame-ancestors 'none'"),
    (b"cache-control", b"no-store"),
    (b"referrer-policy", b"no-referrer"),
)
"""An answer may say otherwise: pages have stricter policies, and their files may be kept."""


class SafeHeaders:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def completed(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = message.get("headers", ())
                given = {name.lower() for name, _ in headers}
                message["headers"] = [*headers, *(each for each in _DEFAULTS if each[0] not in given)]
            await send(message)

        await self._app(scope, receive, completed)
