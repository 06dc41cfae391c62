"""Routes that a plugin adds to a server: the documented example, and what the context gives besides."""

import re
from pathlib import Path
from types import ModuleType

import httpx
import pytest
import tinker
from fastapi import APIRouter, Request, Response, WebSocket
from fastapi.testclient import TestClient
from prometheus_client import Counter
from starlette.staticfiles import StaticFiles
from starlette.websockets import WebSocketDisconnect

import tinsmith
from tinsmith.hook_values import RoutesContext
from tinsmith.testing.harness import running_server

HOOKS_PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "hooks.md").read_text()


def documented() -> ModuleType:
    _, _, section = HOOKS_PAGE.partition("### `tinsmith_register_routes`")
    example = re.findall(r"^```python\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)[1]
    module = ModuleType("documented_routes")
    exec(compile(example, "documented_routes", "exec"), vars(module))
    return module


class Counting:
    @tinsmith.hookimpl
    def tinsmith_register_routes(self, context: RoutesContext) -> APIRouter:
        router, visits = APIRouter(), Counter("visits", "to this route", registry=context.registry)
        router.get("/visit")(context.public(visits.inc))
        return router


def test_the_documented_route_shows_callers_their_own_runs(tmp_path: Path) -> None:
    with running_server(tmp_path, extra_plugins=[documented()]) as server:
        client = tinker.ServiceClient(base_url=server.url, api_key="tml-ann")
        training = client.create_lora_training_client(base_model="toy", rank=4)
        model_id = training.result().get_info().model_id
        url = f"{server.url}/mine/runs"
        assert httpx.get(url, headers={"x-api-key": "tml-ann"}, timeout=300).json() == [model_id]
        assert httpx.get(url, headers={"x-api-key": "tml-bob"}, timeout=300).json() == []
        bearer = {"Authorization": "Bearer tml-ann"}
        assert httpx.get(url, headers=bearer, timeout=300).json() == [model_id]
        assert httpx.get(url, headers={**bearer, "x-api-key": "tml-bob"}, timeout=300).json() == [], "it says more"
        assert httpx.get(url, headers={"Authorization": "Basic tml-ann"}, timeout=300).status_code == 401
        assert httpx.get(url, timeout=300).status_code == 401
        assert httpx.get(f"{server.url}/mine/motto", timeout=300).json() == "this needs no key"
        client.close("success").result(timeout=300)


class Careless:
    """Asks for no caller anywhere. `files` are mounted, and from FastAPI 0.140 on, served as a frontend as well."""

    def __init__(self, files: Path) -> None:
        self.files = files

    @tinsmith.hookimpl
    def tinsmith_register_routes(self, context: RoutesContext) -> list[APIRouter]:
        router, others = APIRouter(prefix="/careless"), APIRouter(prefix="/open")
        inner, innermost = APIRouter(prefix="/inner"), APIRouter()

        @router.get("/secret")
        @router.post("/secret")
        def secret() -> str:
            return "of a tenant"

        async def plain(request: Request) -> Response:
            del request
            return Response("of a tenant")

        router.add_route("/careless/plain", plain, methods=["GET"])  # for which a router has no prefix
        router.websocket("/live")(self.talk)
        others.get("/health")(context.public(self.health))
        innermost.get("/secret")(secret)
        innermost.get("/health")(context.public(self.health))
        innermost.post("/health")(secret)
        innermost.websocket("/live")(self.talk)
        for each in (router, innermost):
            if offer := getattr(each, "frontend", None):  # new in FastAPI 0.138
                offer("/site", directory=self.files)
        inner.include_router(innermost)
        router.include_router(inner)
        router.mount("/careless/files", StaticFiles(directory=self.files))
        return [router, others]

    def health(self) -> str:
        return "fine"

    async def talk(self, websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.close()


@pytest.mark.parametrize("keys", [[], [{"key": "tml-ann", "tenant": "ann"}]])
def test_routes_of_plugins_are_closed_unless_they_are_marked(tmp_path: Path, keys: list[dict[str, str]]) -> None:
    ann, files = {"x-api-key": "tml-ann"}, tmp_path / "files"
    files.mkdir()
    (files / "page").write_text("of a tenant")
    closed = [
        *(("GET", path) for path in ("secret", "plain", "inner/secret", "files/page")),
        *(("POST", path) for path in ("secret", "inner/health")),
    ]
    with running_server(tmp_path, extra_plugins=[Careless(files)], engines=False, server={"api_keys": keys}) as server:
        with httpx.Client(base_url=server.url, timeout=300) as http:
            for method, path in closed:
                assert http.request(method, f"/careless/{path}").status_code == 401, path
                assert http.request(method, f"/careless/{path}", headers=ann).text.strip('"') == "of a tenant"
            assert http.get("/careless/secret", headers={"x-api-key": "bad"}).status_code == 401
            for path in ("/open/health", "/careless/inner/health"):
                assert http.get(path).json() == "fine"
            for path in ("/careless/site/page", "/careless/inner/site/page"):
                assert http.get(path).status_code == 404, "a frontend of a plugin is not offered"
            described = http.get("/openapi.json").json()["paths"]
            assert described["/careless/inner/health"].keys() == {"get", "post"}
        sockets = TestClient(server.app)
        for path in ("/careless/live", "/careless/inner/live"):
            with sockets.websocket_connect(path, headers=ann):
                pass
            with pytest.raises(WebSocketDisconnect), sockets.websocket_connect(path):
                pass


def test_a_plugins_numbers_are_shown_with_the_servers(tmp_path: Path) -> None:
    with running_server(tmp_path, extra_plugins=[Counting()], engines=False) as server:
        assert httpx.get(f"{server.url}/visit", timeout=300).status_code == 200
        shown = httpx.get(f"{server.url}/metrics", timeout=300).text.splitlines()
        assert "visits_total 1.0" in shown
