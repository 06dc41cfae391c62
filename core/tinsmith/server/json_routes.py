"""Routes that read JSON strictly: without NaN, which no answer can repeat, and lone surrogates, which are not text."""

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import orjson
from fastapi import Request, Response
from fastapi.routing import APIRoute

Handler = Callable[[Request], Awaitable[Response]]


class _StrictRequest(Request):
    async def json(self) -> Any:  # Any: what the client sent; the route's model checks it
        return orjson.loads(await self.body())


class JsonRoute(APIRoute):
    """For `APIRouter(route_class=...)`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def read_strictly(request: Request) -> Response:
            return await self.answer(_StrictRequest(request.scope, request.receive), handle)

        return read_strictly

    async def answer(self, request: Request, handle: Handler) -> Response:
        return await handle(request)
