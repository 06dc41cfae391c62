"""The unmodified SDK exchanges its key for a token, and goes on when that one ends or is refused."""

import threading
import time
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest
import tinker

from tinsmith.hook_values import Principal
from tinsmith.hookspecs import hookimpl
from tinsmith.server.api_keys import ApiKeys, KeyTokens
from tinsmith.testing.harness import RunningServer, running_server
from tinsmith.testing.sdk_data import datum, step

KEY = "tml-real"
KEYS = [{"key": KEY, "tenant": "me@example.org"}]
DEADLINE_S = 300


def exchanges(server: RunningServer) -> int:
    counted = {"route": "/api/v1/auth/token", "status": "200"}
    registry = server.app.state.context.metrics.registry
    return int(registry.get_sample_value("tinsmith_http_requests_total", counted) or 0)


def forget_tokens(server: RunningServer) -> None:
    """Replace the secret, as a server on another database would have it."""
    server.app.state.context.api_keys.tokens = KeyTokens(b"another" * 5, 3600)


def test_training_goes_on_when_tokens_are_refused(tmp_path: Path) -> None:
    with (
        running_server(tmp_path, server={"api_keys": KEYS}) as server,
        tinker.ServiceClient(base_url=server.url, api_key=KEY) as client,
    ):
        model = client.create_lora_training_client(base_model="toy", rank=2, seed=1).result(timeout=300)
        step(model, [datum()])
        before = exchanges(server)
        assert before >= 1
        forget_tokens(server)
        step(model, [datum()])
        assert exchanges(server) > before
        assert tinker.RestClient(base_url=server.url, api_key=KEY).whoami().result().email == "me@example.org"


def test_a_token_is_renewed_before_it_ends(tmp_path: Path) -> None:
    """Where a request comes in its last minute, and in the background at half of its time."""
    with running_server(tmp_path, engines=False, server={"api_keys": KEYS, "token_lifetime_s": 62}) as server:
        rest = tinker.RestClient(base_url=server.url, api_key=KEY)
        rest.get_server_capabilities().result()
        first = exchanges(server)
        deadline = time.monotonic() + DEADLINE_S
        while exchanges(server) == first and time.monotonic() < deadline:
            rest.get_server_capabilities().result()
            time.sleep(0.2)
        assert exchanges(server) > first
    with running_server(tmp_path, engines=False, server={"api_keys": KEYS, "token_lifetime_s": 4}) as server:
        rest = tinker.RestClient(base_url=server.url, api_key=KEY)
        rest.get_server_capabilities().result()
        first = exchanges(server)
        deadline = time.monotonic() + DEADLINE_S
        while exchanges(server) == first and time.monotonic() < deadline:
            time.sleep(0.1)  # no request is made: only the background renews
        assert exchanges(server) > first


def test_servers_on_one_store_take_each_others_tokens(tmp_path: Path) -> None:
    with (
        running_server(tmp_path, engines=False, server={"api_keys": KEYS}) as one,
        running_server(tmp_path, engines=False, server={"api_keys": KEYS}) as two,
    ):
        token = exchange(one, KEY).json()["jwt"]
        assert config(two, token).status_code == 200
    with running_server(tmp_path, engines=False, server={"api_keys": KEYS}) as again:
        assert config(again, token).status_code == 200
    with running_server(tmp_path, engines=False, server={"api_keys": [{"key": "tml-new", "tenant": "me"}]}) as without:
        refused = config(without, token)
        assert refused.status_code == 401
        assert 'error="invalid_token"' in refused.headers["www-authenticate"]
        assert "has been removed" in refused.json()["detail"]
    with running_server(tmp_path / "other", engines=False, server={"api_keys": KEYS}) as other:
        assert "did not issue this token" in config(other, token).json()["detail"]


def test_a_large_body_with_a_bad_token_is_refused_in_the_same_words(tmp_path: Path) -> None:
    """It is refused before it is read, elsewhere than small ones."""
    with running_server(tmp_path, engines=False) as server:
        for size in (10, 1 << 17):
            headers = {"X-API-Key": "eyJ.e30.x", "Content-Type": "application/x-protobuf"}
            refused = httpx.post(
                f"{server.url}/api/v1/forward_backward", content=b"x" * size, headers=headers, timeout=300
            )
            assert refused.status_code == 401
            assert 'error="invalid_token"' in refused.headers["www-authenticate"]


def exchange(server: RunningServer, credential: str) -> httpx.Response:
    return httpx.post(f"{server.url}/api/v1/auth/token", json={}, headers={"X-API-Key": credential}, timeout=300)


def config(server: RunningServer, credential: str) -> httpx.Response:
    headers = {"X-API-Key": credential}
    return httpx.post(
        f"{server.url}/api/v1/client/config", json={"sdk_version": "0.38.0"}, headers=headers, timeout=300
    )


def test_a_wrong_key_is_shown_at_once(tmp_path: Path) -> None:
    with running_server(tmp_path, engines=False, server={"api_keys": KEYS}) as server:
        refused = exchange(server, "tml-wrong")
        assert (refused.status_code, "www-authenticate" in refused.headers) == (401, False)
        with pytest.raises(tinker.AuthenticationError, match="not known"):
            tinker.RestClient(base_url=server.url, api_key="tml-wrong").get_server_capabilities().result()


class Directory:
    """A plugin that knows its callers by its own credentials."""

    @hookimpl
    def tinsmith_authenticate(self, headers: Any) -> Principal | None:
        return Principal(tenant="ann") if headers.get("x-api-key") == "tml-ann" else None


def test_what_a_plugin_goes_by_is_not_exchanged(tmp_path: Path) -> None:
    with running_server(tmp_path, engines=False, server={"api_keys": KEYS}, extra_plugins=[Directory()]) as server:
        assert config(server, "tml-ann").json()["pjwt_auth_enabled"] is False
        assert config(server, KEY).json()["pjwt_auth_enabled"] is True
        refused = exchange(server, "tml-ann")
        assert (refused.status_code, "only for API keys" in refused.json()["detail"]) == (400, True)
        rest = tinker.RestClient(base_url=server.url, api_key="tml-ann")
        assert rest.get_server_capabilities().result().supported_models


@pytest.mark.parametrize("plugins", [[], [Directory()]])
def test_callers_are_identified_in_a_thread_only_if_a_plugin_is_asked_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plugins: list[object]
) -> None:
    """A plugin may have to ask elsewhere, the configured keys never do."""
    threads: set[str] = set()
    principal = ApiKeys.principal

    def noting(keys: ApiKeys, credential: str) -> Principal:
        threads.add(threading.current_thread().name)
        return principal(keys, credential)

    monkeypatch.setattr(ApiKeys, "principal", noting)
    options: dict[str, Any] = {"engines": False, "server": {"api_keys": KEYS}, "extra_plugins": plugins}
    with running_server(tmp_path, **options) as server:
        answer = httpx.get(f"{server.url}/api/v1/get_server_capabilities", headers={"x-api-key": KEY})
    assert answer.status_code == 200
    assert len(threads) == 1
    assert ("tinsmith-server" in threads) is (not plugins)


def test_a_token_is_a_jwt_of_the_expected_age(tmp_path: Path) -> None:
    with running_server(tmp_path, engines=False, server={"token_lifetime_s": 120}) as server:
        claims = jwt.decode(exchange(server, "tml-x").json()["jwt"], options={"verify_signature": False})
        assert claims["exp"] - claims["iat"] == 120
        assert claims["sub"].startswith("key-")
