"""Body limits, compression and identity, at the edges."""

import asyncio
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial

import httpx
import pytest
import zstandard
from pydantic import SecretStr
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Scope

from tinsmith.errors import AuthenticationError, CapacityError
from tinsmith.hook_values import Principal
from tinsmith.server.api_keys import ApiKeys, KeyTokens
from tinsmith.server.limits import body_budget
from tinsmith.server.limits.bodies import UNPACKED_FREELY, Bodies, BodyLimits
from tinsmith.server.limits.body_budget import FREE_BYTES, LEASE, STRANGER_BYTES, BodyBudget, hold_decoded
from tinsmith.server.limits.edge import Edge
from tinsmith.server.limits.heavy_work import LARGE_BYTES, Budget, HeavyWork
from tinsmith.server.live_keys import LiveKeys
from tinsmith.server.signed_urls import Grant, UrlSigner
from tinsmith.settings import ApiKey, KeySource

LIMIT = 10_000


async def _size(request: Request) -> PlainTextResponse:
    return PlainTextResponse(str(len(await request.body())))


def _only_friends(scope: Scope) -> Principal:
    if Headers(scope=scope).get("x-api-key") != "tml-friend":
        msg = "who are you?"
        raise AuthenticationError(msg)
    return Principal(tenant="friend", name="friend")


def _client(
    max_bytes: int,
    headers: Mapping[str, str] | None = None,
    budget: BodyBudget | None = None,
    *,
    ratio: int = 1 << 30,
    route: Callable[[Request], Awaitable[Response]] = _size,
) -> httpx.AsyncClient:
    routes = [Route("/{path:path}", route, methods=["POST"])]
    bodies = Bodies(
        limits=BodyLimits(data_bytes=max_bytes, json_bytes=100, unpack_ratio=ratio),
        budget=budget or BodyBudget(total_bytes=1 << 40, tenant_bytes=1 << 40),
        heavy=HeavyWork(),
        identify=_only_friends,
    )
    app = Edge(Starlette(routes=routes), limits=[bodies])
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test", headers=headers)


@pytest.fixture
def client() -> httpx.AsyncClient:
    return _client(LIMIT, {"X-API-Key": "tml-friend"})


@pytest.fixture
def stranger() -> httpx.AsyncClient:
    return _client(4 * STRANGER_BYTES)


async def test_bodies_up_to_the_limit_pass(client: httpx.AsyncClient) -> None:
    assert (await client.post("/", content=b"x" * LIMIT)).text == str(LIMIT)


async def test_a_larger_body_is_refused_by_its_announced_length(client: httpx.AsyncClient) -> None:
    answer = await client.post("/", content=b"x" * (LIMIT + 1))
    assert answer.status_code == 413
    assert f"over the limit of {LIMIT} bytes" in answer.json()["detail"]


async def test_a_larger_body_of_unknown_length_is_refused_while_it_arrives(client: httpx.AsyncClient) -> None:
    sent = 0

    async def long():  # type: ignore[no-untyped-def]
        nonlocal sent
        while sent < 10 * LIMIT:
            sent += 1000
            yield b"x" * 1000

    assert (await client.post("/", content=long())).status_code == 413
    assert sent <= LIMIT + 2000


async def test_a_stranger_may_send_little(stranger: httpx.AsyncClient) -> None:
    assert (await stranger.post("/", content=b"x" * STRANGER_BYTES)).text == str(STRANGER_BYTES)
    assert (await stranger.post("/", content=b"x" * (STRANGER_BYTES + 1))).status_code == 401
    known = await stranger.post("/", content=b"x" * (STRANGER_BYTES + 1), headers={"x-api-key": "tml-friend"})
    assert known.text == str(STRANGER_BYTES + 1)


async def test_a_strangers_body_of_unknown_length_is_not_read_to_its_end(stranger: httpx.AsyncClient) -> None:
    sent = 0

    async def long() -> AsyncIterator[bytes]:
        nonlocal sent
        while sent < 3 * STRANGER_BYTES:
            sent += 1000
            yield b"x" * 1000

    answer = await stranger.post("/", content=long())
    assert (answer.status_code, answer.json()) == (401, {"detail": "who are you?"})
    assert sent <= STRANGER_BYTES + 2000


async def test_nothing_is_unpacked_for_a_stranger(stranger: httpx.AsyncClient) -> None:
    packed = zstandard.compress(b"x" * 5000)
    assert (await stranger.post("/", content=packed, headers={"content-encoding": "zstd"})).status_code == 401


async def test_zstd_bodies_are_unpacked(client: httpx.AsyncClient) -> None:
    packed = zstandard.compress(b"x" * 5000)
    answer = await client.post("/", content=packed, headers={"content-encoding": "zstd"})
    assert answer.text == "5000"


@pytest.mark.parametrize("claim_size", [True, False])
async def test_a_zstd_bomb_stops_at_the_limit(client: httpx.AsyncClient, claim_size: bool) -> None:
    packed = zstandard.ZstdCompressor(write_content_size=claim_size).compress(b"\0" * (50 * LIMIT))
    assert len(packed) < LIMIT
    assert (await client.post("/", content=packed, headers={"content-encoding": "zstd"})).status_code == 413


async def test_a_zstd_bomb_never_takes_more_memory_than_the_limit(client: httpx.AsyncClient) -> None:
    packed = zstandard.compress(b"\0" * (64 << 20))
    tracemalloc.start()
    try:
        await client.post("/", content=packed, headers={"content-encoding": "zstd"})
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("encoding", "status"), [("zstd", 400), ("gzip", 415), ("br", 415), ("zstd, gzip", 415)])
async def test_what_cannot_be_unpacked_is_refused_with_a_detail(
    client: httpx.AsyncClient, encoding: str, status: int
) -> None:
    answer = await client.post("/", content=b"no such thing", headers={"content-encoding": encoding})
    assert answer.status_code == status
    assert "zstd" in answer.json()["detail"]


# Limits by route, ratio and budget ------------------------------------------------------------------------------------

ZSTD = {"content-encoding": "zstd", "x-api-key": "tml-friend"}
MEGABYTE = 1 << 20


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/v1/session_heartbeat", 413),
        ("/api/v1/nowhere", 413),
        ("/api/v1/asample", 200),
        ("/api/v1/forward_backward", 200),
        ("/a/plugins/own", 200),
    ],
)
async def test_only_routes_for_data_take_large_bodies(client: httpx.AsyncClient, path: str, status: int) -> None:
    answer = await client.post(path, content=b"x" * 101)
    assert answer.status_code == status
    if status == 413:
        assert answer.json()["detail"].endswith("over the limit of 100 bytes; send less at a time")


async def test_a_body_may_not_unpack_to_many_times_its_size() -> None:
    packed = zstandard.compress(b"\0" * (UNPACKED_FREELY + MEGABYTE))
    async with _client(64 * MEGABYTE, ZSTD, ratio=256) as client:
        answer = await client.post("/", content=packed)
        assert answer.status_code == 413
        assert "unpacks to over 256 times as many" in answer.json()["detail"]
        little = zstandard.compress(b"\0" * UNPACKED_FREELY)
        assert (await client.post("/", content=little)).text == str(UNPACKED_FREELY)


async def test_bodies_that_unpack_together_stay_within_the_budget_of_their_tenant() -> None:
    """Twelve bodies of 8 KB took 64 MB and more each."""
    budget, answered = BodyBudget(total_bytes=1 << 40, tenant_bytes=16 * MEGABYTE), asyncio.Semaphore(0)
    arrived = []
    packed = zstandard.ZstdCompressor(write_content_size=False).compress(b"\0" * (10 * MEGABYTE))

    async def held(request: Request) -> PlainTextResponse:
        arrived.append(await request.body())
        for _ in range(11 if len(arrived) == 1 else 0):
            await answered.acquire()
        return PlainTextResponse("answered last")

    async def send(client: httpx.AsyncClient) -> int:
        status = (await client.post("/", content=packed)).status_code
        answered.release()
        return status

    tracemalloc.start()
    try:
        async with _client(64 * MEGABYTE, ZSTD, budget, route=held) as client:
            statuses = await asyncio.gather(*(send(client) for _ in range(12)))
        assert tracemalloc.get_traced_memory()[1] < 40 * MEGABYTE
    finally:
        tracemalloc.stop()
    assert sorted(statuses) == [200] + 11 * [429]
    assert budget.held_bytes == 0


async def test_a_spent_budget_is_a_429_that_tells_when_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_budget, "WAIT_S", 0)
    budget = BodyBudget(total_bytes=1 << 40, tenant_bytes=MEGABYTE)
    async with _client(64 * MEGABYTE, {"x-api-key": "tml-friend"}, budget) as client:
        with budget.lease("friend") as other:
            other.resize(MEGABYTE)
            answer = await client.post("/", content=b"x" * (STRANGER_BYTES + 1))
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
            assert "a share of server.limits.body_bytes" in answer.json()["detail"]
        assert (await client.post("/", content=b"x" * (STRANGER_BYTES + 1))).status_code == 200


def test_one_tenant_cannot_spend_anothers_budget() -> None:
    budget = BodyBudget(total_bytes=30, tenant_bytes=10)
    with budget.lease("hog") as first, budget.lease("hog") as second, budget.lease("light") as light:
        first.resize(10)
        with pytest.raises(CapacityError, match="10 bytes of your requests, and this one needs 1 more; allowed: 10"):
            second.resize(1)
        light.resize(10)
        assert budget.held_bytes == 20
    assert budget.held_bytes == 0


def test_all_together_have_a_budget_too_and_one_alone_always_fits() -> None:
    budget = BodyBudget(total_bytes=10, tenant_bytes=10)
    with budget.lease("one") as one, budget.lease("other") as other:
        one.resize(1000)
        assert budget.held_bytes == 10
        with pytest.raises(CapacityError, match=r"server\.limits\.body_bytes"):
            other.resize(1)
        one.resize(9)
        other.resize(1)


async def test_a_request_waits_until_others_are_answered() -> None:
    budget = BodyBudget(total_bytes=10, tenant_bytes=10)
    with budget.lease("a") as waiting:
        with budget.lease("a") as first:
            first.resize(10)
            waits = asyncio.ensure_future(waiting.wait_to_resize(10))
            await asyncio.sleep(0)
            assert not waits.done()
        await waits
        assert budget.held_bytes == 10


async def test_what_is_given_back_goes_to_those_who_fit_in_the_order_in_which_they_came() -> None:
    budget = BodyBudget(total_bytes=10, tenant_bytes=10)
    with budget.lease("a") as first, budget.lease("b") as b, budget.lease("c") as c, budget.lease("d") as d:
        first.resize(10)
        waits = [asyncio.ensure_future(lease.wait_to_resize(size)) for lease, size in ((b, 6), (c, 6), (d, 4))]
        await asyncio.sleep(0)
        first.resize(0)
        assert (b.num_bytes, c.num_bytes, d.num_bytes) == (6, 0, 4)
        b.resize(0)
        await asyncio.gather(*waits)
        assert (c.num_bytes, budget.held_bytes) == (6, 10)
    assert budget.held_bytes == 0


async def test_few_requests_of_a_tenant_wait_and_the_next_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_budget, "MAX_WAITING", 1)
    budget = BodyBudget(total_bytes=10, tenant_bytes=10)
    with budget.lease("a") as first, budget.lease("a") as waiting, budget.lease("a") as refused:
        first.resize(10)
        waits = asyncio.ensure_future(waiting.wait_to_resize(10))
        await asyncio.sleep(0)
        with pytest.raises(CapacityError, match="a share of"):
            await refused.wait_to_resize(10)
        assert not waits.done()
        first.resize(0)
        await waits
        waiting.resize(0)
        await refused.wait_to_resize(10)


async def test_what_a_small_body_decodes_to_is_counted_if_it_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty requests of 5 KB, with sparse tensors, took 41 MB each."""
    monkeypatch.setattr(body_budget, "WAIT_S", 0)
    budget = BodyBudget(total_bytes=1 << 40, tenant_bytes=MEGABYTE)
    with budget.lease("t") as other, budget.lease() as lease:
        request = Request({"type": "http", LEASE: lease})
        other.resize(MEGABYTE)
        await hold_decoded(request, "t", FREE_BYTES)
        with pytest.raises(CapacityError):
            await hold_decoded(request, "t", FREE_BYTES + 1)
        other.resize(0)
        await hold_decoded(request, "t", FREE_BYTES + 1)
        assert budget.held_bytes == FREE_BYTES + 1
    assert budget.held_bytes == 0


def test_a_tenant_that_fills_the_thread_gets_a_quarter_of_it() -> None:
    now_s = [0.0]
    budget = Budget(clock=lambda: now_s[0])
    used_s = 0.0
    while now_s[0] < 100:
        now_s[0] += budget.wait_s()
        now_s[0] += 0.3
        used_s += 0.3
        budget.use(0.3)
    assert 25 <= used_s <= 27
    now_s[0] += 100
    for _ in range(3):
        assert budget.wait_s() == 0, "what is sent now and then does not wait"
        budget.use(0.3)


async def test_heavy_work_is_done_one_at_a_time_and_by_turns_among_tenants() -> None:
    heavy, order, running = HeavyWork(), [], []

    def work(tenant: str) -> None:
        running.append(tenant)
        assert len(running) == 1
        order.append(tenant)
        running.pop()

    async with asyncio.TaskGroup() as together:
        for tenant in ["hog"] * 20 + ["light"]:
            together.create_task(heavy.run(tenant, LARGE_BYTES, partial(work, tenant)))
    assert order.index("light") == 1
    assert len(order) == 21


# API keys -------------------------------------------------------------------------------------------------------------


def test_without_configured_keys_each_key_is_a_tenant_of_its_own() -> None:
    keys = ApiKeys(LiveKeys(KeySource(keys=())), KeyTokens(b"s" * 32, 60))
    first = keys.tinsmith_authenticate({"x-api-key": "tml-a"})
    assert first == keys.tinsmith_authenticate({"x-api-key": "tml-a"})
    assert first.tenant != keys.tinsmith_authenticate({"x-api-key": "tml-b"}).tenant
    assert "tml-a" not in first.tenant
    for headers in ({}, {"x-api-key": ""}, {"x-api-key": "sk-other"}):
        with pytest.raises(AuthenticationError):
            keys.tinsmith_authenticate(headers)


def test_configured_keys_are_the_only_ones() -> None:
    keys = ApiKeys(
        LiveKeys(
            KeySource(
                keys=(
                    ApiKey(key=SecretStr("tml-one"), tenant="one"),
                    ApiKey(key=SecretStr("tml-two"), tenant="two", admin=True),
                )
            )
        ),
        KeyTokens(b"s" * 32, 60),
    )
    assert keys.tinsmith_authenticate({"x-api-key": "tml-two"}) == Principal(tenant="two", name="two", admin=True)
    for key in ("tml-three", "tml-", "tml-on", "tml-one "):
        with pytest.raises(AuthenticationError, match="not known"):
            keys.tinsmith_authenticate({"x-api-key": key})


# Download links -------------------------------------------------------------------------------------------------------

NOW = datetime(2030, 1, 1, tzinfo=UTC)


GRANT = Grant(created_at=NOW - timedelta(microseconds=1), only_while_public=True, key_id="0af1")


def test_a_link_is_good_for_one_file_until_it_expires() -> None:
    signer = UrlSigner(b"secret")
    name = "m/external_weights/x/a b.bin"
    stamp, grant, signature, _ = signer.url_path(name, NOW + timedelta(hours=1), GRANT).split("/", 3)
    assert UrlSigner(b"secret").check(name, int(stamp), grant, signature, NOW) == GRANT
    with pytest.raises(AuthenticationError):
        UrlSigner(b"another").check(name, int(stamp), grant, signature, NOW)
    for bad in (
        (name, int(stamp) + 1, grant, signature, NOW),
        (name + "x", int(stamp), grant, signature, NOW),
        (name, int(stamp), grant.replace("p", "o"), signature, NOW),
        (name, int(stamp), grant, "0" * 64, NOW),
        (name, int(stamp), grant, "é", NOW),
        (name, int(stamp), grant, signature, NOW + timedelta(hours=2)),
    ):
        with pytest.raises(AuthenticationError):
            signer.check(*bad)
