"""Callers without a valid key share one bucket. What they may ask is kept, and tenants and probes notice nothing."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import uvicorn
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.responses import Response
from starlette.types import Scope
from uvicorn.server import ServerState

import tinsmith
from tinsmith.errors import AuthenticationError
from tinsmith.hook_values import Principal
from tinsmith.plugins.loading import Plugins
from tinsmith.server.app import create_app
from tinsmith.server.limits import bounded_http, strangers
from tinsmith.server.limits.edge import Incoming
from tinsmith.server.limits.probes import PER_S, PROBES
from tinsmith.settings import Settings
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import StoreContext

KEY, BURST = {"x-api-key": "tml-mine"}, 5
PROBES_AT_ONCE = round(5 * PER_S)
MOST = 16  # connections, the fewest that are allowed
WRONG = {"x-api-key": "tml-wrong"}


class Server:
    """An app whose clock stands still, and whose pauses end once they may and are written down."""

    def __init__(self, store: SqlStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = store
        self.pauses: list[float] = []
        self.pauses_end = asyncio.Event()
        self.pauses_end.set()
        self._monkeypatch = monkeypatch

    async def start(self, *extra: object, keys: bool = True, burst: int = BURST) -> httpx.AsyncClient:
        async def pause(seconds: float) -> None:
            self.pauses.append(seconds)
            await self.pauses_end.wait()

        for module in ("strangers.Strangers", "probes.Probes"):
            path = f"tinsmith.server.limits.{module}.__init__.__kwdefaults__"
            self._monkeypatch.setitem(_defaults(path), "clock", lambda: 0.0)
            self._monkeypatch.setitem(_defaults(path), "pause", pause)
        limits = {"keyless_requests_per_s": burst / 5, "connections": MOST}
        server: dict[str, Any] = {"limits": limits}
        if keys:
            server["api_keys"] = [{"key": KEY["x-api-key"], "tenant": "ann"}]
        models = [{"name": "tiny", "backend": {"plugin": "toy"}}]
        settings = Settings.model_validate({"server": server, "models": models})
        self.app = await create_app(settings, store=self.store, plugins=Plugins.load(extra))
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")


def _defaults(path: str) -> dict[str, Any]:
    module, name = path.removesuffix(".__init__.__kwdefaults__").rsplit(".", 1)
    found: dict[str, Any] = getattr(__import__(module, fromlist=[name]), name).__init__.__kwdefaults__
    return found


@pytest_asyncio.fixture
async def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    store = SqlStore(SqlStoreConfig(synchronous="off"), StoreContext(data_dir=tmp_path))
    await store.open()
    yield Server(store, monkeypatch)
    await store.close()


async def spend(http: httpx.AsyncClient) -> None:
    """Take what strangers may have."""
    for _ in range(BURST):
        assert (await http.get("/nothing")).status_code == 404


# One bucket -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [True, False], ids=["with keys", "without keys"])
async def test_whoever_has_no_key_is_refused_on_every_route_once_the_bucket_is_empty(
    server: Server, *, keys: bool
) -> None:
    http = await server.start(keys=keys)
    await spend(http)
    bad = WRONG if keys else {"x-api-key": "none of ours"}
    asked = 0
    for method, path in routes(server.app):
        for headers in ({}, bad):
            if path in PROBES and (not headers or path.endswith("healthz")):
                continue
            answer = await http.request(method, path, headers=headers)
            assert answer.status_code == 429, f"{method} {path}"
            assert int(answer.headers["retry-after"]) >= 1
            assert method == "HEAD" or "server.limits.keyless_requests_per_s" in answer.json()["detail"]
            asked += 1
    assert len(server.pauses) == asked, "each refusal has to be waited for"
    assert min(server.pauses) >= strangers.REFUSED_AFTER_S / 2
    assert len(set(server.pauses)) > asked / 2, "those who were refused together must not come back together"
    assert asked > 100


def routes(app: FastAPI) -> list[tuple[str, str]]:
    """Return method and path of every route, of paths that do not exist, and of other methods."""
    found = [
        (method, path) for path in ("/", "/api/v1/none", "/docs", "/metrics") for method in ("GET", "HEAD", "OPTIONS")
    ]
    for path, operations in app.openapi()["paths"].items():
        filled = path.replace("{", "").replace("}", "")
        found += [(method.upper(), filled) for method in operations]
    assert {each.path for each in app.routes if isinstance(each, APIRoute)}
    return found


async def test_a_wrong_link_is_a_strangers_whatever_key_comes_with_it(server: Server) -> None:
    http = await server.start()
    await spend(http)
    for place in ("files", "archives", "traces", "uploads"):
        for stamp in ("1", "no-number"):
            method = "PUT" if place == "uploads" else "GET"
            path = f"/api/v1/{place}/{stamp}/grant/signature/name"
            assert (await http.request(method, path, headers=KEY)).status_code == 429, path
    for path in ("/docs", "/openapi.json"):
        assert (await http.get(path, headers=KEY)).status_code == 429, path


@pytest.mark.parametrize("headers", [{}, WRONG], ids=["no key", "a wrong key"])
async def test_a_tenant_notices_nothing(server: Server, headers: dict[str, str]) -> None:
    http = await server.start()
    await spend(http)
    refused = [await http.post("/api/v1/create_session", json={"tags": []}, headers=headers) for _ in range(20)]
    assert {answer.status_code for answer in refused} == {429}
    body = {"tags": [], "sdk_version": "1"}
    answers = [await http.post("/api/v1/create_session", json=body, headers=KEY) for _ in range(20)]
    assert {answer.status_code for answer in answers} == {200}
    token = (await http.post("/api/v1/auth/token", headers=KEY)).json()["jwt"]
    assert (await http.get("/api/v1/sessions", headers={"x-api-key": token})).status_code == 200


async def test_a_foreign_host_spends_of_the_same_bucket(server: Server) -> None:
    http = await server.start(keys=False)
    statuses = [(await http.get("/metrics", headers={"host": "evil.example"})).status_code for _ in range(BURST + 3)]
    assert statuses == [403] * BURST + [429] * 3


async def test_a_refusal_is_counted_apart(server: Server) -> None:
    http = await server.start()
    await spend(http)
    for _ in range(3):
        await http.get("/api/v1/sessions")
    metrics = (await http.get("/metrics", headers=KEY)).text
    assert 'tinsmith_http_requests_total{route="(without a key)",status="429"} 3.0' in metrics


class Elsewhere:
    """A plugin that asks another service who a caller is."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    @tinsmith.hookimpl
    def tinsmith_authenticate(self, headers: dict[str, str]) -> Principal | None:
        self.asked.append(headers.get("x-user", ""))
        if headers.get("x-user") == "bob":
            return Principal(tenant="bob")
        if headers.get("x-user") == "mallory":
            msg = "no"
            raise AuthenticationError(msg)
        return None


async def test_a_plugin_is_not_asked_about_strangers_who_come_too_fast(server: Server) -> None:
    elsewhere = Elsewhere()
    http = await server.start(elsewhere)
    bob = {"x-user": "bob"}
    assert (await http.get("/api/v1/sessions", headers=bob)).status_code == 200
    elsewhere.asked.clear()
    statuses = [(await http.get("/api/v1/sessions", headers={"x-user": "mallory"})).status_code for _ in range(20)]
    assert statuses == [401] * BURST + [429] * (20 - BURST)
    assert elsewhere.asked == ["mallory"] * BURST, "asked once for each request that is admitted, and for no other"
    for path in ("sessions", "get_server_capabilities"):
        assert (await http.get(f"/api/v1/{path}", headers=bob)).status_code == 200, "it has been known before"


_CHANGING = (
    "accept baggage cf-connecting-ip cf-ray content-type date elastic-apm-traceparent fly-request-id forwarded "
    "sentry-trace traceparent tracestate uber-trace-id via x-amzn-trace-id x-appengine-request-log-id x-b3-spanid "
    "x-b3-traceid x-cloud-trace-context x-correlation-id x-datadog-parent-id x-envoy-attempt-count x-forwarded-for "
    "x-forwarded-port x-idempotency-key x-original-forwarded-for x-real-ip x-request-id x-request-start "
    "x-stainless-retry-count"
)
_TELLING = (
    "authorization cf-access-jwt-assertion cookie team tenant x-amzn-oidc-identity x-api-key x-auth-request-email "
    "x-forwarded-email x-forwarded-client-cert x-forwarded-user x-request-user x-tenant x-user"
)


async def test_a_caller_is_known_whatever_a_proxy_adds(server: Server) -> None:
    """Proxies number each request, and say when and on which way it came."""
    http = await server.start(Elsewhere())
    bob = {"x-user": "bob"}

    async def status_of(number: int) -> int:
        added = {name: f"{number}-{name}" for name in _CHANGING.split()}
        return (await http.get("/api/v1/sessions", headers=bob | added)).status_code

    assert await status_of(0) == 200
    await spend(http)
    assert [await status_of(number) for number in range(1, 4)] == [200] * 3


@pytest.mark.parametrize("name", _TELLING.split())
async def test_who_differs_in_what_may_tell_callers_apart_is_not_known(name: str) -> None:
    asked: list[bytes] = []

    def identify(scope: Scope) -> Principal:
        asked.append(dict(scope["headers"])[name.encode()])
        if asked[-1] == b"mallory":
            msg = "no"
            raise AuthenticationError(msg)
        return Principal(tenant="ann")

    async def pause(_seconds: float) -> None: ...

    callers = strangers.Strangers(per_s=0.001, identify=identify, clock=lambda: 0.0, pause=pause)

    async def answer_to(caller: bytes) -> Response | None:
        scope = {"type": "http", "method": "GET", "path": "/", "headers": [(b"host", b"h"), (name.encode(), caller)]}
        unused: Any = None
        return await callers.admit(Incoming(scope, unused, unused, ExitStack()))

    assert [await answer_to(each) for each in (b"ann", b"mallory", b"ann")] == [None] * 3
    refused = await answer_to(b"eve")
    assert refused is not None
    assert refused.status_code == 429
    assert asked == [b"ann", b"mallory", b"ann"]


# Kept answers ---------------------------------------------------------------------------------------------------------


async def test_the_description_is_rendered_once(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    http = await server.start(burst=1000)
    rendered, describe = 0, server.app.openapi

    def counted() -> dict[str, Any]:
        nonlocal rendered
        rendered += 1
        return describe()

    monkeypatch.setattr(server.app, "openapi", counted)
    answers = await asyncio.gather(*(http.get("/openapi.json") for _ in range(50)))
    assert "/api/v1/session_heartbeat" in answers[0].json()["paths"]
    assert {answer.content for answer in answers} == {answers[0].content}
    assert rendered == 1


async def test_pages_for_browsers_load_nothing_from_other_hosts(server: Server) -> None:
    http = await server.start(burst=1000)
    start, docs = (await http.get("/")).text, (await http.get("/docs")).text
    loaded = re.findall(r'(?:src|href)="([^"]+)"', start + docs)
    assert {"docs/swagger-ui-bundle.js", "docs/swagger-ui.css", "docs", "readyz", "metrics"} <= set(loaded)
    for each in loaded:
        assert not each.startswith("/"), "a proxy may serve it below a path"
        assert ":" not in each, each
        assert (await http.get(each)).status_code in {200, 503}, each  # not ready: no engine runs here
    assert (await http.get("/docs/main.py")).status_code == 404


async def test_the_metrics_are_rendered_once_for_all_strangers_of_a_second(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    http = await server.start(burst=1000)
    asked, list_engines = 0, server.store.list_engines

    async def counted() -> Any:
        nonlocal asked
        asked += 1
        return await list_engines()

    monkeypatch.setattr(server.store, "list_engines", counted)
    monkeypatch.setattr("tinsmith.builtin.metrics_endpoint.KEPT_S", 3600.0)
    for _ in range(2):
        answers = await asyncio.gather(*(http.get("/metrics") for _ in range(50)))
        assert {answer.status_code for answer in answers} == {200}
    assert asked == 1
    text = (await http.get("/metrics", headers=KEY)).text
    assert asked == 2, "a caller with a key sees what is now"
    assert 'route="/metrics",status="200"} 100.0' in text


async def test_probes_are_always_answered_and_cost_little(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    http = await server.start()
    await spend(http)
    reached: list[str] = []
    real = server.app.router.app

    async def counted(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["path"])
        await real(scope, receive, send)

    monkeypatch.setattr(server.app.router, "middleware_stack", counted)
    for path, status in (("/healthz", 200), ("/readyz", 503)):
        answers = [await http.get(path) for _ in range(2 * PROBES_AT_ONCE)]
        assert {answer.status_code for answer in answers} == {status}
        assert {answer.content for answer in answers} == {answers[0].content}
    assert len(reached) <= PROBES_AT_ONCE + 2, "most were answered with what was answered last"
    assert (await http.get("/readyz", headers=KEY)).status_code == 503
    server.pauses.clear()
    transport = httpx.ASGITransport(server.app, client=("10.0.0.9", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as orchestrator:
        assert (await orchestrator.get("/healthz")).status_code == 200
    assert not server.pauses, "one of another address is answered at once"


# Connections ----------------------------------------------------------------------------------------------------------


class Connection:
    def __init__(self, *, is_known: bool) -> None:
        self.is_known = is_known
        self.loop = asyncio.get_running_loop()
        self.transport = self
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True

    def look(self) -> None: ...


def work(connections: bounded_http.Connections, connection: Any) -> None:
    """Let a request arrive, whose answer is then computed."""
    connections.arrives(connection)
    connections.arrived(connection)


async def test_strangers_make_room_before_those_who_are_known() -> None:
    connections = bounded_http.Connections(4)
    known, delayed, busy, idle = [Connection(is_known=known) for known in (True, False, False, False)]
    admit: Callable[[Any], bool] = connections.admit
    for each in (known, delayed, busy, idle):
        assert admit(each)
    connections.delays(delayed)  # type: ignore[arg-type]
    work(connections, busy)
    newcomers = [Connection(is_known=True) for _ in range(4)]
    gone = []
    for newcomer in newcomers:
        assert admit(newcomer)
        work(connections, newcomer)
        gone.append([each.aborted for each in (idle, delayed, known, busy)])
        if all(gone[-1][:3]):
            break
    assert gone == [[True, False, False, False], [True, True, False, False], [True, True, True, False]]
    assert not admit(Connection(is_known=False)), "nobody is idle"


class Socket:
    """A connection of its own to a server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    async def status(self) -> int:
        head = await self._reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
        await self._reader.readexactly(int(length.partition(b":")[2]))
        return int(head.split(b" ", 2)[1])

    def ask(self, path: str, headers: dict[str, str]) -> None:
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.writer.write(f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n{lines}\r\n".encode())

    async def is_cut(self) -> bool:
        try:
            return await self._reader.read() == b""
        except ConnectionResetError:
            return True


@asynccontextmanager
async def listening(server: Server) -> AsyncIterator[Callable[[], Any]]:
    """Serve over real sockets until the block ends. The value connects."""
    state, sockets = ServerState(), list[Socket]()
    config = uvicorn.Config(server.app, http=bounded_http.BoundedHttp, ws="none", lifespan="off", log_config=None)
    config.load()
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(lambda: bounded_http.BoundedHttp(config, state, {}, loop), "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]

    async def connect() -> Socket:
        sockets.append(Socket(*await asyncio.open_connection("127.0.0.1", port)))
        return sockets[-1]

    try:
        yield connect
    finally:
        server.pauses_end.set()
        listener.close()
        for each in sockets:
            each.writer.transport.abort()
        while state.connections:  # noqa: ASYNC110 - sockets have no events
            await asyncio.sleep(0)
        await asyncio.gather(*state.tasks)
        await listener.wait_closed()


@pytest.mark.parametrize("path", ["/api/v1/sessions", "/healthz"], ids=["refused", "late probes"])
async def test_who_waits_for_a_late_answer_makes_room_before_a_tenant_that_is_idle(server: Server, path: str) -> None:
    http = await server.start()
    await spend(http)
    for _ in range(PROBES_AT_ONCE):
        await http.get("/healthz")
    server.pauses_end.clear()
    async with listening(server) as connect:
        tenant = await connect()
        tenant.ask("/api/v1/sessions", KEY)
        assert await tenant.status() == 200
        waiting = [await connect() for _ in range(MOST - 1)]
        for each in waiting:
            each.ask(path, {})
        while len(server.pauses) < len(waiting):  # noqa: ASYNC110 - sockets have no events
            await asyncio.sleep(0)
        for each in (await connect(), tenant):
            each.ask("/api/v1/sessions", KEY)
            assert await each.status() == 200
        assert await waiting[0].is_cut()
