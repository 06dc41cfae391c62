"""A provider that does not answer keeps some threads of the server, and not all of them."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import islice
from pathlib import Path

import httpx
import pytest

from tinsmith.testing.harness import running_server
from tinsmith_oidc.routes import MOST_ASKING


@pytest.fixture
def silent_provider() -> Iterator[socket.socket]:
    """Its connections are open, and end unanswered when it is closed."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def test_only_some_sign_ins_wait_for_the_provider_at_a_time(silent_provider: socket.socket, tmp_path: Path) -> None:
    issuer = f"http://127.0.0.1:{silent_provider.getsockname()[1]}"
    login = {"plugin": "oidc", "issuer": issuer, "client_id": "a"}
    number = MOST_ASKING + 4
    with running_server(tmp_path, engines=False, login=login) as server, ThreadPoolExecutor(number) as pool:
        asked = [pool.submit(httpx.get, f"{server.url}/login", timeout=300) for _ in range(number)]
        refused = [each.result() for each in islice(as_completed(asked), number - MOST_ASKING)]
        assert all(f"{MOST_ASKING} sign-ins wait for the provider" in answer.text for answer in refused)
        assert httpx.get(f"{server.url}/api/v1/runs", timeout=300).status_code == 401, "others are answered"
        silent_provider.close()
        waited = [each.result() for each in asked]
        assert sum("does not answer" in answer.text for answer in waited) == MOST_ASKING
        assert {answer.status_code for answer in waited} == {401}
