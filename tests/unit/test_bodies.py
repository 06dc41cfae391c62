"""Body limits, compression and identity, at the edges."""

import tracemalloc
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime, timedelta

import httpx
import pytest
import zstandard
from pydantic import SecretStr
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from tinsmith.errors import AuthenticationError
from tinsmith.hook_values import Principal
from tinsmith.server.api_keys import ApiKeys
from tinsmith.server.bodies import STRANGER_BYTES, BodyLimit
from tinsmith.server.key_tokens import KeyTokens
from tinsmith.server.signed_urls import UrlSigner
from tinsmith.settings import ApiKey

LIMIT = 10_000


async def _size(request: Request) -> PlainTextResponse:
    return PlainTextResponse(str(len(await request.body())))


def _only_friends(headers: Mapping[str, str]) -> None:
    if headers.get("x-api-key") != "tml-friend":
        msg = "who are you?"
        raise AuthenticationError(msg)


def _client(max_bytes: int, headers: Mapping[str, str] | None = None) -> httpx.AsyncClient:
    routes = [Route("/", _size, methods=["POST"])]
    app = BodyLimit(Starlette(routes=routes), max_bytes=max_bytes, authenticate=_only_friends)
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


@pytest.mark.parametrize("encoding", ["zstd", "gzip", "br"])
async def test_what_cannot_be_unpacked_is_refused_with_a_detail(client: httpx.AsyncClient, encoding: str) -> None:
    answer = await client.post("/", content=b"no such thing", headers={"content-encoding": encoding})
    assert answer.status_code == 400
    assert "zstd" in answer.json()["detail"]


# API keys -------------------------------------------------------------------------------------------------------------


def test_without_configured_keys_each_key_is_a_tenant_of_its_own() -> None:
    keys = ApiKeys((), KeyTokens(b"s" * 32, 60))
    first = keys.tinsmith_authenticate({"x-api-key": "tml-a"})
    assert first == keys.tinsmith_authenticate({"x-api-key": "tml-a"})
    assert first.tenant != keys.tinsmith_authenticate({"x-api-key": "tml-b"}).tenant
    assert "tml-a" not in first.tenant
    for headers in ({}, {"x-api-key": ""}, {"x-api-key": "sk-other"}):
        with pytest.raises(AuthenticationError):
            keys.tinsmith_authenticate(headers)


def test_configured_keys_are_the_only_ones() -> None:
    keys = ApiKeys(
        (ApiKey(key=SecretStr("tml-one"), tenant="one"), ApiKey(key=SecretStr("tml-two"), tenant="two", admin=True)),
        KeyTokens(b"s" * 32, 60),
    )
    assert keys.tinsmith_authenticate({"x-api-key": "tml-two"}) == Principal(tenant="two", name="two", admin=True)
    for key in ("tml-three", "tml-", "tml-on", "tml-one "):
        with pytest.raises(AuthenticationError, match="not known"):
            keys.tinsmith_authenticate({"x-api-key": key})


# Download links -------------------------------------------------------------------------------------------------------

NOW = datetime(2030, 1, 1, tzinfo=UTC)


def test_a_link_is_good_for_one_file_until_it_expires() -> None:
    signer = UrlSigner(b"secret")
    stamp, signature, _ = signer.url_path("m/external_weights/x/a b.bin", NOW + timedelta(hours=1)).split("/", 2)
    name = "m/external_weights/x/a b.bin"
    UrlSigner(b"secret").check(name, int(stamp), signature, NOW)
    with pytest.raises(AuthenticationError):
        UrlSigner(b"another").check(name, int(stamp), signature, NOW)
    for bad in (
        (name, int(stamp) + 1, signature, NOW),
        (name + "x", int(stamp), signature, NOW),
        (name, int(stamp), "0" * 64, NOW),
        (name, int(stamp), "é", NOW),
        (name, int(stamp), signature, NOW + timedelta(hours=2)),
    ):
        with pytest.raises(AuthenticationError):
            signer.check(*bad)
