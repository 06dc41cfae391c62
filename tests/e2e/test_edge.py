"""What any client may send: bounds of bodies, fields, connections and origins, by plain HTTP and without an engine."""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest
import zstandard

from tinsmith.server.limits.gate import names_of
from tinsmith.server.routes import sampling
from tinsmith.settings import PluginSection, ServerSettings, Settings
from tinsmith.store import EngineFailure, EngineRecord, EngineState
from tinsmith.testing.harness import RunningServer, running_server

KEY = {"X-API-Key": "tml-mine"}
ZSTD = {"Content-Encoding": "zstd", "Content-Type": "application/json"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("data"), engines=False, server={"long_poll_s": 0.05}) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{server.url}/api/v1/", headers=KEY, timeout=300) as client:
        yield client


def ok(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()


# Bodies ---------------------------------------------------------------------------------------------------------------


def answers(http: httpx.Client, server: RunningServer, path: str, status: int) -> float:
    """Return how many answers /metrics counts under this route and status."""
    label = f'tinsmith_http_requests_total{{route="/api/v1/{path}",status="{status}"}} '
    lines = http.get(f"{server.url}/metrics").text.splitlines()
    return sum(float(line.removeprefix(label)) for line in lines if line.startswith(label))


@pytest.mark.parametrize("headers", [{}, ZSTD], ids=["plain", "zstd"])
def test_a_long_heartbeat_is_refused_unread_and_counted_under_its_route(
    http: httpx.Client, server: RunningServer, headers: dict[str, str]
) -> None:
    before = answers(http, server, "session_heartbeat", 413)
    body = b'{"session_id": "' + b"x" * (2 << 20) + b'"}'
    answer = http.post("session_heartbeat", content=zstandard.compress(body) if headers else body, headers=headers)
    assert answer.status_code == 413
    assert "1048576 bytes" in answer.json()["detail"]
    assert answers(http, server, "session_heartbeat", 413) == before + 1


# Fields ---------------------------------------------------------------------------------------------------------------


def test_a_refusal_names_field_value_and_what_is_allowed(http: httpx.Client) -> None:
    for body, detail in (
        (
            {"tags": ["x" * 2000]},
            f"body.tags.0: String should have at most 1024 characters; it is '{'x' * 100}'... of 2000 characters",
        ),
        (
            {"display_name": "a\0"},
            "body.display_name: must not hold control characters, this one holds '\\x00' at 1; remove it; "
            "it is 'a\\x00'",
        ),
        (
            {"user_metadata": {"a": ["x"] * 10_000}},
            "body.user_metadata: is larger than 32768 bytes; keep large values elsewhere; it is an object of 1 fields",
        ),
        ({}, None),
    ):
        answer = http.post("create_session", json=body)
        assert (answer.json().get("detail"), answer.status_code) == (detail, 422 if detail else 200)


def test_a_small_packed_sample_of_wrong_tokens_is_refused_at_its_first_error(http: httpx.Client) -> None:
    """Half a kilobyte stopped the event loop for 17 s, to build a million errors."""
    tokens = b'"x",' * 1_000_000 + b'"x"'
    body = b'{"seq_id": 0, "prompt": {"chunks": [{"tokens": [%b]}]}}' % tokens
    answer = http.post("asample", content=zstandard.compress(body), headers=ZSTD)
    assert answer.status_code == 400
    assert answer.json() == {"detail": "the body holds more than 262144 quotation marks; send shorter lists"}
    wrong = b'{"seq_id": 0, "prompt": {"chunks": [{"tokens": [%b]}]}}' % (b"null," * 1_000_000 + b"0")
    answer = http.post("asample", content=zstandard.compress(wrong), headers=ZSTD)
    assert answer.status_code == 422
    assert answer.json()["detail"] == (
        "body.prompt.chunks.0.tokens: must be a list of integers; [0] is of type NoneType; it is a list of 1000001"
    )


@pytest.mark.parametrize("shape", [[1 << 40, 1 << 20], [0, 1 << 60]])
def test_a_small_sample_cannot_claim_the_memory_of_all(http: httpx.Client, shape: list[int]) -> None:
    """A shape alone, in 200 bytes, took the whole budget of bodies, and made all tenants wait."""
    session = ok(http.post("create_session", json={}))["session_id"]
    new = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "toy"}
    sampler = ok(http.post("create_sampling_session", json=new))["sampling_session_id"]
    targets = {"data": [], "dtype": "int64", "shape": shape, "sparse_crow_indices": [0]}
    sample = {"sampling_session_id": sampler, "seq_id": 0, "prompt": {"chunks": []}, "target_prompt_logprobs": targets}
    with mock.patch.object(sampling, "hold_decoded", wraps=sampling.hold_decoded) as held:
        answer = http.post("asample", json=sample)
    assert answer.status_code == 400, answer.text
    assert "has more than 16777216 elements" in answer.json()["detail"]
    assert not held.called


@pytest.mark.parametrize(
    ("content_type", "detail"),
    [
        ("text/plain", "the content-type 'text/plain' is not offered; send 'application/json'"),
        (None, "the body has no content-type; send 'application/json'"),
    ],
)
def test_a_body_that_does_not_claim_to_be_json_is_refused_by_its_type(
    http: httpx.Client, content_type: str | None, detail: str
) -> None:
    headers = {} if content_type is None else {"Content-Type": content_type}
    answer = http.post("asample", content=b"{}", headers=headers)
    assert (answer.status_code, answer.json()) == (415, {"detail": detail})
    assert http.post("asample", content=b"{}", headers={**headers, "X-API-Key": "sk-x"}).status_code == 401


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "APPLICATION/JSON", "application/a+json"])
def test_every_spelling_of_json_is_read(http: httpx.Client, content_type: str) -> None:
    ok(http.post("create_session", content=b"{}", headers={"Content-Type": content_type}))


def test_a_numbered_request_without_a_type_keeps_its_number(http: httpx.Client) -> None:
    session = ok(http.post("create_session", json={}))["session_id"]
    new = {"session_id": session, "model_seq_id": 0, "base_model": "toy", "lora_config": {"rank": 4}}
    model = ok(http.post("create_model", json=new))["model_id"]
    body = b'{"model_id": "%b", "seq_id": 1, "adam_params": {}}' % model.encode()
    failed = ok(http.post("retrieve_future", json=ok(http.post("optim_step", content=body))))
    assert failed == {"error": "the body has no content-type; send 'application/json'", "category": "user"}


def test_a_wrong_key_learns_nothing_about_its_body(http: httpx.Client) -> None:
    answer = http.post("asample", json={"prompt": {"chunks": [{"tokens": "x"}]}}, headers={"X-API-Key": "sk-x"})
    assert answer.status_code == 401


# Hosts, origins and paths ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "10.0.0.1", "a b", "["]
)
def test_a_keyless_server_goes_by_local_names_only(http: httpx.Client, server: RunningServer, host: str) -> None:
    """Otherwise a web page could rebind its own name to 127.0.0.1, and use the server."""
    before = answers(http, server, "healthz", 403)
    answer = http.get("healthz", headers={"Host": host})
    assert answer.status_code == 403
    assert f"Host {host!r} is not allowed on a server without API keys" in answer.json()["detail"]
    assert answers(http, server, "healthz", 403) == before + 1


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "localhost.", "127.0.0.1:1", "127.1.2.3", "[::1]:8000"]
)
def test_every_name_of_loopback_passes(http: httpx.Client, host: str) -> None:
    ok(http.get("healthz", headers={"Host": host}))


@pytest.mark.parametrize(
    ("origin", "status"),
    [("https://evil.example", 403), ("null", 403), ("http://localhost:3000", 200), ("http://127.0.0.1", 200)],
)
def test_requests_of_other_sites_pages_are_refused(http: httpx.Client, origin: str, status: int) -> None:
    assert http.post("create_session", json={}, headers={"Origin": origin}).status_code == status


def test_other_names_are_those_that_the_operator_gave() -> None:
    named = ServerSettings.model_validate({"host": "127.0.0.1", "public_url": "https://tinker.example:8443/x"})
    assert names_of(Settings(server=named)) == {"127.0.0.1", "tinker.example"}
    keyed = ServerSettings.model_validate({"api_keys": [{"key": "tml-a", "tenant": "a"}]})
    assert names_of(Settings(server=keyed)) is None
    assert names_of(Settings(login=PluginSection(plugin="oidc"))) is None


@pytest.mark.parametrize("path", ["sessions/a%00b", "samplers/%0A", "training_runs/%C2%85", "sessions/" + "x" * 5000])
def test_paths_are_short_and_hold_no_control_characters(http: httpx.Client, path: str) -> None:
    answer = http.get(path)
    assert answer.status_code == 400
    assert answer.json()["detail"].startswith("the path ")


# What needs no key ----------------------------------------------------------------------------------------------------


REFERENCE = "reference 1f2e3d4c in the operator's log"
HOW = f"the engine of 'toy' ended with exit code 1 ({REFERENCE})"
FULL = f"the engine of 'toy' ended with exit code 1 (/srv/planted is missing; {REFERENCE})"
READERS = [{"key": f"tml-{name}", "tenant": name, "admin": name == "admin"} for name in ("ann", "admin")]


def an_engine(state: EngineState, detail: str) -> EngineRecord:
    failure = EngineFailure(attempt=3, text=HOW, reference=REFERENCE, cause="/srv/planted is missing")
    return EngineRecord(base_model="toy", state=state, detail=detail, failure=failure, updated_at=datetime.now(UTC))


def test_how_an_engine_failed_is_for_callers_with_a_key_and_why_for_the_operator(tmp_path: Path) -> None:
    """The cause may be a line of the engine's log."""

    def readiness(server: RunningServer, name: str | None) -> dict[str, Any]:
        headers = {} if name is None else {"X-API-Key": f"tml-{name}"}
        ready = httpx.get(f"{server.url}/readyz", headers=headers, timeout=300)
        assert ready.status_code == 503
        return dict(ready.json()["engines"]["toy"])

    def details(server: RunningServer, *names: str | None) -> list[Any]:
        return [readiness(server, name)["detail"] for name in names]

    failed, loading = an_engine(EngineState.FAILED, HOW), an_engine(EngineState.LOADING, "loading weights")
    with running_server(tmp_path, engines=False, server={"api_keys": READERS}) as server:
        server.call(server.store.report_engine(failed))
        in_the_log = "the reason is in the server's log; send an API key to see it here"
        assert details(server, None, "ann", "admin") == [in_the_log, HOW, FULL]
        for path in ("metrics", "healthz", "openapi.json"):
            assert "planted" not in httpx.get(f"{server.url}/{path}", timeout=300).text
        server.call(server.store.report_engine(loading))
        assert details(server, None, "ann", "admin") == ["loading weights"] * 3
        restarted = [readiness(server, name).get("restarted") for name in (None, "ann", "admin")]
        assert restarted == [None, f"attempt 3: before, {HOW}", f"attempt 3: before, {FULL}"]
    with running_server(tmp_path, engines=False) as server:
        server.call(server.store.report_engine(failed))
        assert details(server, None, "anybody") == [FULL, FULL]
