"""Errors as the clients of both APIs meet them: by class, type, code, and whether and when they ask again."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import anthropic
import httpx
import openai
import pytest
from fastapi import APIRouter
from openai_served import toy_model

import tinsmith
from tinsmith import AuthenticationError, CapacityError, TinsmithError, UnsupportedError, UserError, hookimpl
from tinsmith.testing.harness import RunningServer, running_server
from tinsmith_openai.plugin import ANTHROPIC_PREFIX, PREFIXES
from tinsmith_openai.refusals import NoSuchModelError, TooLongError

KEY = "tml-ann"


class ForbiddenError(UserError):
    http_status = 403


class TooLargeError(UserError):
    http_status = 413


class DownError(TinsmithError):
    http_status = 503
    public = True


ERRORS: dict[str, Exception] = {
    "no key": AuthenticationError("the key is not known"),
    "forbidden": ForbiddenError("not for you"),
    "no model": NoSuchModelError("no model named 'x'"),
    "too large": TooLargeError("the body is too large"),
    "too long": TooLongError(num_prompt=9, max_context_tokens=4),
    "not offered": UnsupportedError("not offered"),
    "too many": CapacityError("too many at a time", retry_after_s=6.2),
    "down": DownError("the store cannot be read"),
    "unexpected": RuntimeError("a fault of ours"),
}
"""What a route raises."""

OF_OPENAI: dict[str, tuple[type[openai.APIStatusError], str, str | None]] = {
    "no key": (openai.AuthenticationError, "invalid_request_error", "invalid_api_key"),
    "forbidden": (openai.PermissionDeniedError, "invalid_request_error", None),
    "no model": (openai.NotFoundError, "invalid_request_error", "model_not_found"),
    "too large": (openai.APIStatusError, "invalid_request_error", "request_too_large"),
    "too long": (openai.BadRequestError, "invalid_request_error", "context_length_exceeded"),
    "not offered": (openai.BadRequestError, "invalid_request_error", None),
    "too many": (openai.RateLimitError, "rate_limit_error", "rate_limit_exceeded"),
    "down": (openai.InternalServerError, "server_error", None),
    "unexpected": (openai.InternalServerError, "server_error", None),
}
OF_ANTHROPIC: dict[str, tuple[type[anthropic.APIStatusError], str]] = {
    "no key": (anthropic.AuthenticationError, "authentication_error"),
    "forbidden": (anthropic.PermissionDeniedError, "permission_error"),
    "no model": (anthropic.NotFoundError, "not_found_error"),
    "too large": (anthropic.APIStatusError, "request_too_large"),
    "too long": (anthropic.BadRequestError, "invalid_request_error"),
    "not offered": (anthropic.BadRequestError, "invalid_request_error"),
    "too many": (anthropic.RateLimitError, "rate_limit_error"),
    "down": (anthropic.InternalServerError, "overloaded_error"),
    "unexpected": (anthropic.InternalServerError, "api_error"),
}
ASKED_AGAIN = {"too many", "down", "unexpected"}


class Failing:
    """Routes that fail, beside those of the endpoints."""

    def __init__(self) -> None:
        self.asked = 0

    @hookimpl
    def tinsmith_register_routes(
        self, settings: tinsmith.Settings, context: tinsmith.RoutesContext
    ) -> Sequence[APIRouter]:
        return [self._router(prefix) for prefix in (*PREFIXES, ANTHROPIC_PREFIX)]

    def _router(self, prefix: str) -> APIRouter:
        router = APIRouter(prefix=prefix)

        @router.get("/fail/{name}")
        async def fail(name: str) -> None:
            self.asked += 1
            raise ERRORS[name]

        return router


@pytest.fixture(scope="module")
def failing() -> Failing:
    return Failing()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, failing: Failing) -> Iterator[RunningServer]:
    directory = tmp_path_factory.mktemp("errors")
    models = [toy_model(directory / "toy")]
    with running_server(directory / "data", models=models, extra_plugins=[failing], engines=False) as server:
        yield server


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("prefix", PREFIXES)
def test_openais_client_tells_errors_apart(server: RunningServer, name: str, prefix: str) -> None:
    kind, type_, code = OF_OPENAI[name]
    with (
        openai.OpenAI(base_url=server.url + prefix, api_key=KEY, max_retries=0) as client,
        pytest.raises(openai.APIStatusError) as raised,
    ):
        client.get(f"/fail/{name}", cast_to=object)
    assert (type(raised.value), raised.value.type, raised.value.code) == (kind, type_, code)
    assert raised.value.body is not None


@pytest.mark.parametrize("name", ERRORS)
def test_anthropics_client_tells_errors_apart(server: RunningServer, name: str) -> None:
    kind, type_ = OF_ANTHROPIC[name]
    with (
        anthropic.Anthropic(base_url=f"{server.url}/anthropic/api", api_key=KEY, max_retries=0) as client,
        pytest.raises(anthropic.APIStatusError) as raised,
    ):
        client.get(f"/v1/fail/{name}", cast_to=object)
    assert isinstance(raised.value, kind)
    body: Any = raised.value.body
    assert (body["type"], body["error"]["type"]) == ("error", type_)
    assert body["error"]["message"]


@pytest.mark.parametrize("name", ERRORS)
def test_clients_ask_again_for_what_may_pass(
    server: RunningServer, failing: Failing, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """And wait as long as they are told."""
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    async def ask() -> int:
        failing.asked = 0
        monkeypatch.setattr("anyio.sleep", sleep)
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=1) as client:
            with pytest.raises(openai.APIStatusError):
                await client.get(f"/fail/{name}", cast_to=object)
        return failing.asked

    assert asyncio.run(ask()) == (2 if name in ASKED_AGAIN else 1)
    if name == "too many":
        assert waited[-1] == 7


@pytest.mark.parametrize(("prefix", "route"), [("/v1", "chat/completions"), (ANTHROPIC_PREFIX, "messages")])
def test_bodies_that_cannot_be_read_are_bad_requests(server: RunningServer, prefix: str, route: str) -> None:
    url, headers = f"{server.url}{prefix}/{route}", {"authorization": f"Bearer {KEY}"}
    for content, media_type, status in (
        (b"{", "application/json", 400),
        (b"[]", "application/json", 400),
        (b'{"model": 1}', "application/json", 400),
        (b'{"model": "toy", "messages": "hi", "max_tokens": 1}', "application/json", 400),
        (b"model=toy", "application/x-www-form-urlencoded", 415),
    ):
        answer = httpx.post(url, content=content, headers={**headers, "content-type": media_type}, timeout=300)
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["type"] == "invalid_request_error"
