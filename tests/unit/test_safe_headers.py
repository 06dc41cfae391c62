"""No answer is kept, framed or guessed at by a browser: of any route, core's or a plugin's, whatever its status."""

import re
from pathlib import Path

import httpx
from fastapi import APIRouter, FastAPI, Response
from starlette.routing import BaseRoute

import tinsmith
from tinsmith.plugins.loading import Plugins
from tinsmith.server.app import create_app
from tinsmith.server.plugin_routes import Branch
from tinsmith.settings import ApiKey, Settings
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import StoreContext

KEY = ApiKey.model_validate({"key": "tml-ann", "tenant": "ann"})
FILES = ("/page/", "/docs/", "/chat")
"""Public and the same for everybody: a browser may keep them, and asks whether they are still good."""


class Careless:
    """A plugin that thinks of no header."""

    @tinsmith.hookimpl
    def tinsmith_register_routes(self) -> APIRouter:
        router = APIRouter()

        @router.get("/careless/page")
        async def page() -> Response:
            return Response("<script>1</script>", media_type="text/html")

        @router.get("/careless/fault")
        async def fault() -> None:
            raise RuntimeError("a fault")

        return router


async def the_app(directory: Path) -> tuple[FastAPI, SqlStore]:
    settings = Settings.model_validate(
        {
            "server": {"data_dir": directory, "api_keys": [KEY]},
            "login": {"plugin": "oidc", "issuer": "http://127.0.0.1:9", "client_id": "a"},
            "models": [{"name": "toy", "backend": {"plugin": "toy"}}],
        }
    )
    store = SqlStore(SqlStoreConfig(synchronous="off"), StoreContext(data_dir=directory))
    await store.open()
    plugins = Plugins.load()
    plugins.add(Careless(), "careless")
    return await create_app(settings, store=store, plugins=plugins), store


def calls(routes: list[BaseRoute]) -> set[tuple[str, str]]:
    """Return the method and the path of every route, with something in place of ids."""
    single = [each for route in routes for each in (route.routes() if isinstance(route, Branch) else (route,))]
    found = {(method, route.path) for route in single for method in getattr(route, "methods", None) or ()}
    return {(method, re.sub(r"\{[^}]*\}", "1", path)) for method, path in found}


async def test_every_answer_has_the_headers(tmp_path: Path) -> None:
    app, store = await the_app(tmp_path)
    asked = calls(app.routes) | {("GET", "/nothing"), ("PATCH", "/api/v1/runs"), ("GET", "/page/page.js")}
    asked |= {("GET", f"/docs/{name}") for name in ("swagger-ui.css", "nothing")}
    assert {("GET", "/careless/fault"), ("GET", "/login"), ("GET", "/v1/models"), ("GET", "/docs")} <= asked
    transport, statuses = httpx.ASGITransport(app=app, raise_app_exceptions=False), set[int]()
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=300) as http:
        for headers in ({}, {"x-api-key": "tml-ann"}):
            for method, path in sorted(asked):
                answer = await http.request(method, path, headers=headers, json={} if method == "POST" else None)
                about = f"{method} {path} {answer.status_code}"
                statuses.add(answer.status_code)
                assert answer.headers.get_list("x-content-type-options") == ["nosniff"], about
                assert "frame-ancestors 'none'" in answer.headers["content-security-policy"], about
                assert answer.headers["referrer-policy"] == "no-referrer", about
                assert answer.headers.get_list("cache-control") == [expected(path, answer)], about
    assert {200, 401, 404, 405, 422, 500} <= statuses
    await store.close()


def expected(path: str, answer: httpx.Response) -> str:
    is_file = answer.is_success and not answer.headers.get("content-type", "").startswith("application/json")
    return "no-cache" if is_file and (path == "/" or path.startswith(FILES)) else "no-store"
