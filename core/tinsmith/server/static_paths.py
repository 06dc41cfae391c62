"""Finds routes without parameters by their paths, before any pattern is tried: there are ninety."""

from collections.abc import Sequence
from typing import Final

from fastapi.routing import APIRoute
from starlette.routing import BaseRoute, Match
from starlette.types import Receive, Scope, Send

_NONE: Final[tuple[Match, Scope]] = (Match.NONE, {})


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
