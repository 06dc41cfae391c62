"""The routes of plugins, and a table of routes by path.

Each route of a plugin is closed to callers without a valid key, unless its plugin has marked it public.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import Any, Final

from fastapi import APIRouter, routing
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool
from starlette.routing import BaseRoute, Match, Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from tinsmith.errors import AuthenticationError
from tinsmith.server.limits.edge import Identify

_POLICY_VIOLATION = 1008

# Any: a route, or what FastAPI 0.137 and later have for one of a router that another one includes: a RouteContext.
RouteLike = Any
IsPublic = Callable[[object], bool]
"""Takes an endpoint."""

_NONE: Final[tuple[Match, Scope]] = (Match.NONE, {})


def plugin_routes(router: APIRouter, is_public: IsPublic, identify: Identify) -> Iterator[BaseRoute]:
    """Return the router's routes, of which each is open or closed. The router itself stays as it is."""
    for route in router.routes:
        if not isinstance(route, Route | WebSocketRoute):
            yield Branch(route, is_public, identify)
        elif is_public(route.endpoint):
            yield route
        else:
            closed = copy(route)
            closed.app = _Closed(route.app, identify)
            yield closed


class Branch(BaseRoute):
    """A route to several endpoints: a router that another one includes, or a mounted app.

    A request passes without a key if every endpoint that it may be meant for is public. FastAPI must not see that a
    router is behind it: it would look for frontends there by itself, and serve them to everybody.
    """

    def __init__(self, route: BaseRoute, is_public: IsPublic, identify: Identify) -> None:
        self._route = route
        self._is_public = is_public
        self._closed = _Closed(route.handle, identify)

    def routes(self) -> Sequence[RouteLike]:
        """Return the routes to single endpoints, with their whole paths."""
        listed = getattr(routing, "iter_route_contexts", iter)  # before 0.137.2: a router in it stays closed as a whole
        return list(listed([self._route]))

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return self._route.matches(scope)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._route.handle if self._is_open(scope) else self._closed
        await answer(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        found = [(route, route.matches(scope)[0]) for route in self.routes()]
        best = max((match.value for _, match in found), default=Match.NONE.value)
        meant = [route for route, match in found if match.value == best]
        return best != Match.NONE.value and all(self._is_public(getattr(each, "endpoint", None)) for each in meant)


class _Closed:
    """ASGI app that asks who sent a request before the route does anything."""

    def __init__(self, app: ASGIApp, identify: Identify) -> None:
        self._app = app
        self._identify = identify

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_in_threadpool(self._identify, scope)
        except AuthenticationError:
            if scope["type"] != "websocket":
                raise
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
            return
        await self._app(scope, receive, send)


class StaticPaths(BaseRoute):
    """Stands before all routes, and takes requests for those that would be found anyway."""

    def __init__(self, routes: Sequence[BaseRoute]) -> None:
        self._found: dict[tuple[str, str], APIRoute] = {}
        for route in (each for each in routes if isinstance(each, APIRoute) and "{" not in each.path):
            for method in route.methods:
                first = _first(routes, method, route.path)
                if isinstance(first, APIRoute):
                    self._found[method, route.path] = first

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if scope["type"] != "http" or scope.get("root_path"):
            return _NONE
        route = self._found.get((scope["method"], scope["path"]))
        return _NONE if route is None else route.matches(scope)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await scope["route"].handle(scope, receive, send)


def _first(routes: Sequence[BaseRoute], method: str, path: str) -> BaseRoute | None:
    scope = {"type": "http", "method": method, "path": path, "headers": []}
    return next((route for route in routes if route.matches(scope)[0] is Match.FULL), None)
