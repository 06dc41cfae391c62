"""Quotas by plain HTTP, without an engine, so that everything waits. Each test is a tenant with limits of its own."""

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tinsmith.testing.harness import RunningServer, running_server

TENANTS = {
    "busy": {"pending_operations": 3},
    "many_sessions": {"sessions": 1},
    "many_models": {"live_models": 1},
    "many_samplers": {"sampling_sessions": 2},
    "collector": {"checkpoints": 1},
    "fast": {"requests_per_s": 1e-6},
    "two_keys": {"key_requests_per_s": 1e-6},
}
NewClient = Callable[[str], httpx.Client]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    keys = [{"key": f"tml-{tenant}", "tenant": tenant} for tenant in (*TENANTS, "anybody")]
    keys.append({"key": "tml-another", "tenant": "two_keys"})
    options: dict[str, Any] = {"server": {"api_keys": keys, "long_poll_s": 0.05}, "quotas": {"tenants": TENANTS}}
    with running_server(tmp_path_factory.mktemp("data"), engines=False, **options) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[NewClient]:
    made: list[httpx.Client] = []

    def make(tenant: str) -> httpx.Client:
        headers = {"X-API-Key": f"tml-{tenant}"}
        made.append(httpx.Client(base_url=f"{server.url}/api/v1/", headers=headers, timeout=300))
        return made[-1]

    yield make
    for each in made:
        each.close()


def ok(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()


def a_session(http: httpx.Client) -> str:
    return str(ok(http.post("create_session", json={}))["session_id"])


def create_model(http: httpx.Client, session: str, number: int = 0) -> httpx.Response:
    body = {"session_id": session, "model_seq_id": number, "base_model": "toy", "lora_config": {"rank": 4}}
    return http.post("create_model", json=body)


def step(http: httpx.Client, model: str, seq_id: int) -> httpx.Response:
    return http.post("optim_step", json={"model_id": model, "seq_id": seq_id, "adam_params": {}})


def refused(answer: httpx.Response, setting: str) -> None:
    assert answer.status_code == 429, answer.text
    assert int(answer.headers["retry-after"]) >= 1
    assert f"(quotas.{setting})" in answer.json()["detail"]


def test_a_training_request_over_the_quota_keeps_its_number_free(server: RunningServer, client: NewClient) -> None:
    http = client("busy")
    model = ok(create_model(http, a_session(http)))["model_id"]
    for seq_id in (2, 3):
        ok(step(http, model, seq_id))
    refused(step(http, model, 4), "pending_operations")
    ok(step(http, model, 1))  # the others wait for it
    refused(step(http, model, 4), "pending_operations")
    recorded = server.call(server.store.list_log(model, from_seq_id=0, limit=10))
    assert [each.seq_id for each in recorded] == [0, 1, 2, 3]
    refused(create_model(http, a_session(http)), "pending_operations")


def test_a_tenant_has_so_many_sessions_and_models(client: NewClient) -> None:
    http = client("many_sessions")
    session = a_session(http)
    refused(http.post("create_session", json={}), "sessions")
    assert http.post("session_heartbeat", json={"session_id": session}).status_code == 200
    http = client("many_models")
    session = a_session(http)
    ok(create_model(http, session))
    refused(create_model(http, session, 1), "live_models")
    ok(create_model(client("anybody"), a_session(client("anybody"))))


def test_a_tenant_has_so_many_sampling_sessions(client: NewClient) -> None:
    http = client("many_samplers")
    session = a_session(http)

    def open_one(number: int) -> httpx.Response:
        body = {"session_id": session, "sampling_session_seq_id": number, "base_model": "toy"}
        return http.post("create_sampling_session", json=body)

    assert ok(open_one(0)) != ok(open_one(1))
    refused = open_one(2)
    assert refused.status_code == 429
    assert "quotas.sampling_sessions" in refused.text
    assert ok(open_one(1))["sampling_session_id"].endswith(":1")  # a repeat needs no room
    model = ok(create_model(http, session))["model_id"]
    save = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 2}
    saved = ok(http.post("save_weights_for_sampler", json=save))
    failed = ok(http.post("retrieve_future", json={"request_id": saved["request_id"]}))
    assert "quotas.sampling_sessions" in failed["error"]
    ok(http.post(f"sessions/{session}/finish", json={"reason": {"type": "success"}, "detail": None}))


def test_a_save_without_room_fails_and_training_goes_on(client: NewClient) -> None:
    http = client("collector")
    model = ok(create_model(http, a_session(http)))["model_id"]
    first = ok(http.post("save_weights", json={"model_id": model, "seq_id": 1, "path": "a"}))
    assert http.post("retrieve_future", json=first).status_code == 408
    routes = ("save_weights", "save_weights_for_sampler", "save_weights_external")
    for seq_id, route in enumerate(routes, start=2):
        submitted = ok(http.post(route, json={"model_id": model, "seq_id": seq_id, "path": "b"}))
        failed = ok(http.post("retrieve_future", json={"request_id": submitted["request_id"]}))
        assert failed["category"] == "user"
        assert "at most 1 checkpoints may be kept for one tenant (quotas.checkpoints)" in failed["error"]
    ok(step(http, model, 5))


def test_a_tenant_that_sends_too_fast_holds_nobody_up(client: NewClient) -> None:
    http = client("fast")
    ok(http.get("get_server_capabilities"))
    refused(http.post("session_heartbeat", json={"session_id": "anything"}), "requests_per_s")
    refused(http.post("optim_step", content=b"not even JSON"), "requests_per_s")
    half = http.post("create_session", content=b"{", headers={"Content-Type": "application/json"})
    refused(half, "requests_per_s")  # before it is decoded
    ok(client("anybody").get("get_server_capabilities"))
    assert http.get("healthz").status_code == 200


def test_one_key_of_a_tenant_does_not_hold_up_its_others(client: NewClient) -> None:
    http = client("two_keys")
    token = ok(http.post("auth/token", json={}))["jwt"]
    refused(http.get("get_server_capabilities"), "key_requests_per_s")
    as_token = http.get("get_server_capabilities", headers={"X-API-Key": token})
    refused(as_token, "key_requests_per_s")
    ok(client("another").get("get_server_capabilities"))
