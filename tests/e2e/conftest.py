"""The real SDK against a server on the toy backend. Each test is a tenant of its own, by its key."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import tinker

from tinsmith.testing.harness import RunningServer, running_server

_HERE = Path(__file__).parent
_numbers = itertools.count()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The SDK leaves HTTP connections open until they are collected; that is its own business."""
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"))


@pytest.fixture(scope="session")
def toy_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("toy-server")) as server:
        yield server


@pytest.fixture
def api_key() -> str:
    return f"tml-test-{next(_numbers)}"


@pytest.fixture
def connect() -> Iterator[Callable[[str, str], tinker.ServiceClient]]:
    """Make sessions, by URL and API key, at servers that outlive the test. All are closed at its end."""
    made: list[tinker.ServiceClient] = []

    def connect(url: str, api_key: str) -> tinker.ServiceClient:
        made.append(tinker.ServiceClient(base_url=url, api_key=api_key))
        return made[-1]

    yield connect
    for client in made:
        client.close("success").result(timeout=300)


@pytest.fixture
def new_client(
    toy_server: RunningServer, api_key: str, connect: Callable[[str, str], tinker.ServiceClient]
) -> Callable[[], tinker.ServiceClient]:
    """Make sessions of this test's tenant."""
    return partial(connect, toy_server.url, api_key)


@pytest.fixture
def client(new_client: Callable[[], tinker.ServiceClient]) -> tinker.ServiceClient:
    return new_client()


@pytest.fixture
def rest(toy_server: RunningServer, api_key: str) -> tinker.RestClient:
    return tinker.RestClient(base_url=toy_server.url, api_key=api_key)
