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
        assert httpx.get(url, timeout=300).status_code == 401
        assert httpx.get(f"{server.url}/mine/motto", timeout=300).json() == "this needs no key"
        client.close("success").result(timeout=300)


class Careless:
    """Asks for no caller anywhere."""

    @tinsmith.hookimpl
    def tinsmith_register_routes(self, context: RoutesContext) -> list[APIRouter]:
        router, others = APIRouter(prefix="/careless"), APIRouter(prefix="/open")

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
        return [router, others]

    def health(self) -> str:
        return "fine"

    async def talk(self, websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.close()


@pytest.mark.parametrize("keys", [[], [{"key": "tml-ann", "tenant": "ann"}]])
def test_routes_of_plugins_are_closed_unless_they_are_marked(tmp_path: Path, keys: list[dict[str, str]]) -> None:
    ann = {"x-api-key": "tml-ann"}
    with running_server(tmp_path, extra_plugins=[Careless()], engines=False, server={"api_keys": keys}) as server:
        with httpx.Client(base_url=server.url, timeout=300) as http:
            for method, path in (("GET", "secret"), ("POST", "secret"), ("GET", "plain")):
                assert http.request(method, f"/careless/{path}").status_code == 401
                assert http.request(method, f"/careless/{path}", headers=ann).text.strip('"') == "of a tenant"
            assert http.get("/careless/secret", headers={"x-api-key": "bad"}).status_code == 401
            assert http.get("/open/health").json() == "fine"
        sockets = TestClient(server.app)
        with sockets.websocket_connect("/careless/live", headers=ann):
            pass
        with pytest.raises(WebSocketDisconnect), sockets.websocket_connect("/careless/live"):
            pass


def test_a_plugins_numbers_are_shown_with_the_servers(tmp_path: Path) -> None:
    with running_server(tmp_path, extra_plugins=[Counting()], engines=False) as server:
        assert httpx.get(f"{server.url}/visit", timeout=300).status_code == 200
        shown = httpx.get(f"{server.url}/metrics", timeout=300).text.splitlines()
        assert "visits_total 1.0" in shown
