"""Streams of points: one reader for each run, however many are open, and a limit when each is opened."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import httpx
import orjson
import pytest
from fastapi import FastAPI

from tinsmith.plugins.loading import Plugins
from tinsmith.server.app import begin_shutdown, create_app
from tinsmith.settings import ApiKey, QuotaSettings, ServerSettings, Settings
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import StoreContext
from tinsmith.testing.engine_driver import WAIT_S
from tinsmith.testing.harness import TOY

ANN, BOB = {"x-api-key": "tml-ann"}, {"x-api-key": "tml-bob"}
KEYS = tuple(ApiKey.model_validate({"key": each["x-api-key"], "tenant": each["x-api-key"][4:]}) for each in (ANN, BOB))
Headers = dict[str, str]


@dataclass
class Stream:
    """A client that reads a stream as fast as it comes, in this process."""

    task: "asyncio.Task[None] | None" = None
    status: int = 0
    body: bytes = b""
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    came: asyncio.Condition = field(default_factory=asyncio.Condition)
    reads: bool = True

    async def open(self, app: FastAPI, runs: Sequence[str], headers: Headers) -> None:
        scope = {
            "type": "http",
            "method": "GET",
            "path": "/api/v1/run_events",
            "query_string": urlencode([("run", each) for each in runs]).encode(),
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }
        self.task = asyncio.create_task(self._run(app, scope))
        await self.until(lambda: self.status != 0)

    async def _run(self, app: FastAPI, scope: dict[str, Any]) -> None:
        try:
            await app(scope, self._receive, self._send)
        finally:
            async with self.came:
                self.came.notify_all()

    async def _receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        async with self.came:
            self.status = message.get("status", self.status)
            self.body += message.get("body", b"")
            self.came.notify_all()
        if self.body and self.status == 200 and not self.reads:
            await self.gone.wait()

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(WAIT_S), self.came:
            await self.came.wait_for(lambda: condition() or (self.task is not None and self.task.done()))
        assert condition(), self.body

    def points(self) -> dict[int, dict[str, float]]:
        events = [orjson.loads(each.removeprefix(b"data: ")) for each in self.body.split(b"\n\n")[:-1]]
        return {point["step"]: point["values"] for event in events for point in event["points"]}

    async def has(self, step: int) -> None:
        await self.until(lambda: step in self.points())

    async def close(self) -> None:
        self.gone.set()
        await self.ends()

    async def ends(self) -> None:
        assert self.task is not None
        await asyncio.wait_for(asyncio.shield(self.task), WAIT_S)


@dataclass
class Server:
    app: FastAPI
    http: httpx.AsyncClient
    store: SqlStore
    streams: list[Stream] = field(default_factory=list)

    async def post(self, path: str, headers: Headers, body: object) -> dict[str, Any]:
        answer = await self.http.post(path, headers=headers, json=body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def a_run(self, headers: Headers = ANN) -> str:
        session = (await self.post("create_session", headers, {}))["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": "toy", "lora_config": {"rank": 4}}
        return str((await self.post("create_model", headers, body))["model_id"])

    async def log(self, run: str, step: int, headers: Headers = ANN) -> None:
        await self.post(f"runs/{run}/metrics", headers, {"points": [{"step": step, "values": {"reward": 0.5}}]})

    async def a_link(self, run: str, headers: Headers = ANN) -> Headers:
        url = (await self.post(f"runs/{run}/share_links", headers, {}))["url"]
        return {"x-share-secret": parse_qs(urlsplit(url).fragment)["share"][0]}

    async def stream(self, headers: Headers, *runs: str, reads: bool = True) -> Stream:
        stream = Stream(reads=reads)
        self.streams.append(stream)
        await stream.open(self.app, runs, headers)
        return stream

    async def refused(self, headers: Headers, *runs: str) -> str:
        stream = await self.stream(headers, *runs)
        await stream.ends()
        assert stream.status == 429, stream.body
        return str(orjson.loads(stream.body)["detail"])


@asynccontextmanager
async def served(directory: Path, *, limits: dict[str, int] | None = None, **quotas: Any) -> AsyncIterator[Server]:
    settings = Settings(
        server=ServerSettings.model_validate({"data_dir": directory, "api_keys": KEYS, "limits": limits or {}}),
        quotas=QuotaSettings.model_validate(quotas),
        models=(TOY,),
    )
    store = SqlStore(
        SqlStoreConfig(synchronous="off", safety_poll_s=600.0),
        StoreContext(data_dir=directory, tables=Plugins.load().make_tables()),
    )
    await store.open()
    app = await create_app(settings, store=store, plugins=Plugins.load())
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test/api/v1/", timeout=WAIT_S) as http:
        server = Server(app, http, store)
        try:
            yield server
        finally:
            for each in server.streams:
                await each.close()
            await store.close()


async def test_all_streams_of_a_run_share_one_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(tmp_path) as server:
        run, read = await server.a_run(), list[str]()
        real = server.store.read_metrics

        async def read_metrics(model_id: str, **options: Any) -> Any:
            read.append(model_id)
            return await real(model_id, **options)

        monkeypatch.setattr(server.store, "read_metrics", read_metrics)
        link = await server.a_link(run)
        await server.log(run, 0)
        streams = [await server.stream(each, run) for each in (ANN, link) for _ in range(10)]
        for stream in streams:
            await stream.has(0)
        await server.log(run, 1)
        for stream in streams:
            await stream.has(1)
        late = await server.stream(ANN, run)
        await late.has(1)
        assert late.points() == streams[0].points()
        assert 0 < len(read) <= 4, "a page of rows and a last empty one, for each change"
        context = server.app.state.context
        assert (len(context.run_streams), len(context.open_streams)) == (1, 5)
        for stream in (*streams, late):
            await stream.close()
        assert (len(context.run_streams), len(context.open_streams)) == (0, 0), "nothing goes on without a reader"


async def test_a_stream_that_nobody_reads_keeps_no_more_than_some_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinsmith.server.run_streams.LEAST_S", 0)
    async with served(tmp_path) as server:
        run = await server.a_run()
        await server.log(run, 0)
        slow, quick = await server.stream(ANN, run, reads=False), await server.stream(ANN, run)
        for step in range(1, 40):
            await server.log(run, step)
            await quick.has(step)
        slow.reads = True
        slow.gone.set()
        await slow.ends()
        assert slow.points().keys() == {0}


async def test_streams_end_when_the_server_stops(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        run = await server.a_run()
        stream = await server.stream(ANN, run)
        begin_shutdown(server.app)
        await stream.ends()


LIMITS = {
    "link": ({"streams_per_link": 2}, {}, "at most 2 streams of one share link", "(server.limits.streams_per_link)"),
    "run": ({"streams_per_run": 2}, {}, "at most 2 streams of share links to one run", "(server.limits.streams_per_"),
    "all links": ({"keyless_streams": 2}, {}, "at most 2 streams of share links", "(server.limits.keyless_streams)"),
    "links of a tenant": ({}, {"streams": 2}, "at most 2 streams of links to one tenant's runs", "(quotas.streams)"),
}


@pytest.mark.parametrize("name", LIMITS)
async def test_streams_of_links_are_limited_when_they_are_opened(name: str, tmp_path: Path) -> None:
    limits, quotas, what, setting = LIMITS[name]
    async with served(tmp_path, limits=limits, **quotas) as server:
        first, second, bobs = await server.a_run(), await server.a_run(), await server.a_run(BOB)
        link, other, own = await server.a_link(first), await server.a_link(first), await server.a_link(second)
        strangers, theirs = await server.a_link(bobs, BOB), {"link": (other, first), "run": (own, second)}
        one, two = await server.stream(link, first), await server.stream(link, first)
        detail = await server.refused(link, first)
        assert detail.startswith(what), detail
        assert setting in detail
        allowed = theirs.get(name, (strangers, bobs))
        if name == "all links":
            assert await server.refused(*allowed)
        else:
            assert (await server.stream(*allowed)).status == 200
        assert (await server.stream(ANN, first)).status == 200, "the owner's own streams are not theirs"
        await one.close()
        assert (await server.stream(link, first)).status == 200, "closing one makes room"
        await two.close()


async def test_a_stream_counts_once_for_each_run_of_a_tenant(tmp_path: Path) -> None:
    async with served(tmp_path, streams=3) as server:
        runs = [await server.a_run() for _ in range(2)]
        both = await server.stream(ANN, *runs)
        assert (await server.stream(ANN, runs[0])).status == 200
        detail = await server.refused(ANN, runs[0])
        assert detail.startswith("at most 3 runs may be followed by streams of one tenant at each server"), detail
        assert (await server.stream(BOB, await server.a_run(BOB))).status == 200
        await both.close()
        assert (await server.stream(ANN, *runs)).status == 200
