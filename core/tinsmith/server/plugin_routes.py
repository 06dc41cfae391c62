"""Adds the routes of plugins. Each is closed to callers without a valid key, unless its plugin has marked it public."""

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute, APIWebSocketRoute
from starlette.concurrency import run_in_threadpool
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from tinsmith.errors import AuthenticationError
from tinsmith.hook_values import RoutesContext
from tinsmith.plugins.loading import Plugins
from tinsmith.server.auth import identified

_POLICY_VIOLATION = 1008


def add_plugin_routes(app: FastAPI, router: APIRouter, context: RoutesContext, plugins: Plugins) -> None:
    own = len(app.router.routes)
    app.include_router(router)
    for route in app.router.routes[own:]:
        assert isinstance(route, Route | APIRoute | WebSocketRoute | APIWebSocketRoute), route  # FastAPI adds no other
        if not context.is_public(route.endpoint):
            route.app = _Closed(route.app, plugins)


class _Closed:
    """ASGI app that asks who sent a request before the route does anything."""

    def __init__(self, app: ASGIApp, plugins: Plugins) -> None:
        self._app = app
        self._plugins = plugins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_in_threadpool(identified, scope, self._plugins)
        except AuthenticationError:
            if scope["type"] != "websocket":
                raise
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
            return
        await self._app(scope, receive, send)
