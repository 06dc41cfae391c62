"""What any client may send: bounds of bodies, fields, connections and origins, by plain HTTP and without an engine."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import zstandard

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


@pytest.fixture(scope="module")
def session(http: httpx.Client) -> str:
    return str(ok(http.post("create_session", json={}))["session_id"])


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
