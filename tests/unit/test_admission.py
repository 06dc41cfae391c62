"""A tenant with too much in progress, or too fast, is refused before its body is read. Others notice nothing."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from tinsmith.errors import AuthenticationError
from tinsmith.hook_values import Principal
from tinsmith.server.limits.edge import Edge, Rates
from tinsmith.server.limits.quotas import Quotas
from tinsmith.server.limits.strangers import Strangers
from tinsmith.settings import QuotaSettings
from tinsmith.store import RequestStore

POLL, OTHER, OF_A_PLUGIN = "/api/v1/retrieve_future", "/api/v1/asample", "/v1/chat/completions"


def identify(scope: Scope) -> Principal:
    key = Headers(scope=scope).get("x-api-key")
    if key is None:
        msg = "who are you?"
        raise AuthenticationError(msg)
    return Principal(tenant=key)


@dataclass
class Service:
    """An app that answers when it may."""

    quotas: Quotas
    begun: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.begun.release()
        await self.may_answer.wait()
        await PlainTextResponse("done")(scope, receive, send)


def limited(service: Service, strangers: Strangers) -> Edge:
    return Edge(service, limits=[strangers, Rates(service.quotas, lambda _caller, _headers: None)])


@pytest.fixture
def service() -> Service:
    settings = QuotaSettings.model_validate({"long_polls": 2, "tenants": {"small": {"requests_in_progress": 1}}})
    return Service(Quotas(Mock(spec=RequestStore), settings))  # what is tested here asks no store


@pytest.fixture
async def http(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    app = limited(service, Strangers(per_s=1e6, identify=identify))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
        yield client


async def refused(service: Service, http: httpx.AsyncClient, path: str, setting: str, **sent: Any) -> httpx.Response:
    """Send a request, and return the refusal by which it ends before the app has it."""
    answer, begun = asyncio.create_task(http.post(path, **sent)), asyncio.create_task(service.begun.acquire())
    await asyncio.wait({answer, begun}, return_when=asyncio.FIRST_COMPLETED)
    begun.cancel()
    assert answer.done(), "the request was admitted"
    assert answer.result().status_code == 429
    assert int(answer.result().headers["retry-after"]) >= 1
    content = answer.result().json()
    assert f"(quotas.{setting})" in content["detail"]
    assert "send this one again when some of them are answered, or ask the operator to raise" in content["detail"]
    assert content["queue_state"] == "paused_rate_limit"
    assert content["queue_state_reason"] == content["detail"]
    return answer.result()


async def begin(service: Service, http: httpx.AsyncClient, path: str, tenant: str) -> asyncio.Task[httpx.Response]:
    """Send a request, and wait until the app has it."""
    task = asyncio.create_task(http.post(path, headers={"x-api-key": tenant}))
    begun = asyncio.create_task(service.begun.acquire())
    await asyncio.wait({task, begun}, return_when=asyncio.FIRST_COMPLETED)
    assert begun.done(), "the request was refused"
    return task


async def finish(service: Service, *tasks: asyncio.Task[httpx.Response]) -> None:
    service.may_answer.set()
    assert [(await task).status_code for task in tasks] == [200] * len(tasks)


async def test_long_polls_of_a_tenant_are_limited(service: Service, http: httpx.AsyncClient) -> None:
    polls = [await begin(service, http, POLL, "ann") for _ in range(2)]
    for path in (POLL, f"{POLL}s"):
        await refused(service, http, path, "long_polls", headers={"x-api-key": "ann"})
    others = [await begin(service, http, OTHER, "ann"), await begin(service, http, POLL, "bob")]
    await finish(service, *polls, *others)
    assert (await http.post(POLL, headers={"x-api-key": "ann"})).status_code == 200


async def test_all_requests_of_a_tenant_are_limited(service: Service, http: httpx.AsyncClient) -> None:
    for path in (POLL, OTHER, OF_A_PLUGIN):
        task = await begin(service, http, path, "small")
        for again in (POLL, OTHER, OF_A_PLUGIN):
            await refused(service, http, again, "requests_in_progress", headers={"x-api-key": "small"})
        await finish(service, task)
        service.may_answer.clear()


async def test_what_needs_no_key_is_not_counted(service: Service, http: httpx.AsyncClient) -> None:
    tasks = [asyncio.create_task(http.get("/api/v1/healthz")) for _ in range(10)]
    tasks += [asyncio.create_task(http.get("/metrics", headers={"x-api-key": "small"})) for _ in range(10)]
    for _ in tasks:
        await service.begun.acquire()
    await finish(service, *tasks)


async def test_a_request_that_ends_by_an_error_no_longer_counts(service: Service, http: httpx.AsyncClient) -> None:
    task = await begin(service, http, OTHER, "small")
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    await finish(service, await begin(service, http, OTHER, "small"))


@pytest.mark.parametrize("length", [None, 1 << 20, 100])
async def test_the_body_of_a_refused_request_is_not_read(
    service: Service, http: httpx.AsyncClient, length: int | None
) -> None:
    """The connection of a small one can be used again. The rest of a large one would have to be read first."""
    task = await begin(service, http, OTHER, "small")
    read = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal read
        for _ in range((length or 1000) // 100):
            read += 100
            yield b"x" * 100

    headers = {"x-api-key": "small"} | ({} if length is None else {"content-length": str(length)})
    answer = await refused(service, http, OTHER, "requests_in_progress", content=body(), headers=headers)
    assert read == 0
    assert answer.headers.get("connection") == (None if length == 100 else "close")
    await finish(service, task)


@pytest.mark.parametrize("in_thread", [True, False])
async def test_a_plugin_that_asks_elsewhere_is_asked_in_a_thread(service: Service, *, in_thread: bool) -> None:
    """The configured keys answer at once, and a thread for each request would cost more than they do."""
    threads: list[int] = []

    def noting(scope: Scope) -> Principal:
        threads.append(threading.get_ident())
        return identify(scope)

    app = limited(service, Strangers(per_s=1e6, identify=noting, in_thread=in_thread))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
        await finish(service, await begin(service, client, OTHER, "ann"))
    assert [each != threading.get_ident() for each in threads] == [in_thread]
