"""The public pages for browsers: `/docs` and `/openapi.json`. The description is rendered once, and kept.

Nothing is loaded from other hosts: Swagger UI comes from a package.
"""

import math
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import fastapi_swagger
from fastapi import FastAPI, Request
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from fastapi.responses import FileResponse, Response
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse

from tinsmith.server.kept import Reading
from tinsmith.server.plugin_routes import Branch

OPENAPI: Final = "/openapi.json"
DESCRIPTIONS: Final = frozenset({OPENAPI, "/docs"})
"""Large, and the same for everybody: whoever asks for them counts as a stranger."""
_UI: Final = Path(fastapi_swagger.__file__).parent / "resources"
_ASSETS: Final = ("swagger-ui-bundle.js", "swagger-ui.css", "favicon-32x32.png")


def add_descriptions(app: FastAPI, public_url: str | None) -> None:
    """Add the routes. The app must have been made without `openapi_url` and `docs_url`."""
    app.openapi = partial(_described, app, urlsplit(public_url or "").path.rstrip("/"))  # type: ignore[method-assign]  # FastAPI's way to describe more
    description = Reading(partial(run_in_threadpool, _rendered, app), lambda _found, _took_s: math.inf)
    javascript, css, icon = (f"docs/{name}" for name in _ASSETS)
    docs = get_swagger_ui_html(
        openapi_url=OPENAPI.removeprefix("/"),  # relative: a proxy may serve all of this below a path
        title=f"{app.title} - Swagger UI",
        swagger_js_url=javascript,
        swagger_css_url=css,
        swagger_favicon_url=icon,
    ).body

    async def describe(request: Request) -> Response:
        del request
        return Response(await description.get(), media_type="application/json")

    async def show(request: Request) -> Response:
        del request
        return Response(docs, media_type="text/html")

    async def send(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in _ASSETS:
            return Response(status_code=404)
        headers = {"Cache-Control": "no-cache"}  # a newer server has newer files
        # in small parts: a slow reader keeps no copy of a megabyte here
        return FileResponse(_UI / name, headers=headers)

    app.add_route(OPENAPI, describe, include_in_schema=False)
    app.add_route("/docs", show, include_in_schema=False)
    app.add_route("/docs/{name}", send, include_in_schema=False)


def _rendered(app: FastAPI) -> bytes:
    return bytes(JSONResponse(app.openapi()).body)


def _described(app: FastAPI, prefix: str) -> dict[str, Any]:
    """`prefix`: the path below which a proxy serves the app."""
    routes = [each for route in app.routes for each in (route.routes() if isinstance(route, Branch) else (route,))]
    servers = [{"url": prefix}] if prefix else None
    return get_openapi(title=app.title, version=app.version, routes=routes, servers=servers)
