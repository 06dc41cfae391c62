"""`/openapi.json` and `/docs`, which everybody may read: each is rendered once, and kept as bytes."""

import asyncio
from typing import Final

from fastapi import FastAPI, Request
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import Response
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse

OPENAPI: Final = "/openapi.json"


def add_descriptions(app: FastAPI) -> None:
    """Add the routes. The app must have been made without `openapi_url` and `docs_url`."""
    rendering: dict[str, asyncio.Future[bytes]] = {}
    docs = bytes(get_swagger_ui_html(openapi_url=OPENAPI, title=f"{app.title} - Swagger UI").body)

    async def describe(request: Request) -> Response:
        del request
        if "" not in rendering or (rendering[""].done() and rendering[""].exception() is not None):
            rendering[""] = asyncio.ensure_future(run_in_threadpool(_rendered, app))
        return Response(await asyncio.shield(rendering[""]), media_type="application/json")

    async def show(request: Request) -> Response:
        del request
        return Response(docs, media_type="text/html")

    app.add_route(OPENAPI, describe, include_in_schema=False)
    app.add_route("/docs", show, include_in_schema=False)


def _rendered(app: FastAPI) -> bytes:
    return bytes(JSONResponse(app.openapi()).body)
