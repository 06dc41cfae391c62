"""What never ends is cut off, whoever sends it."""

import socket
from collections.abc import Iterator

import httpx
import pytest

from tinsmith.server.limits.bounded_http import MAX_HEADER_BYTES
from tinsmith.testing.harness import RunningServer, running_server

_MEGABYTE = b"a" * (1 << 20)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("data"), engines=False) as running:
        yield running


def send_without_end(server: RunningServer, start: bytes, more: bytes) -> bytes:
    """Send up to 64 MB, and return what came back when the server cut the connection."""
    url = httpx.URL(server.url)
    with socket.create_connection((url.host, url.port), timeout=300) as connection:
        connection.sendall(start)
        try:
            for _ in range(64):
                connection.sendall(more)
        except (ConnectionResetError, BrokenPipeError):
            return b"cut"
        connection.shutdown(socket.SHUT_WR)
        return connection.recv(1000)


@pytest.mark.parametrize(
    ("start", "more"),
    [
        pytest.param(b"GET /", _MEGABYTE, id="request line"),
        pytest.param(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nx-long: ", _MEGABYTE, id="one header"),
        pytest.param(b"GET /healthz HTTP/1.1\r\n", b"x: " + _MEGABYTE[:1000] + b"\r\n", id="many headers"),
        pytest.param(
            b"POST /healthz HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx-long: ",
            _MEGABYTE,
            id="trailer",
        ),
    ],
)
def test_a_head_without_end_is_cut_off(server: RunningServer, start: bytes, more: bytes) -> None:
    more *= len(_MEGABYTE) // len(more)
    answer = send_without_end(server, start, more)
    assert answer == b"cut" or answer.startswith(b"HTTP/1.1 431 ")


def test_a_large_head_within_the_limit_passes(server: RunningServer) -> None:
    long = {"x-long": "a" * (MAX_HEADER_BYTES // 2)}
    with httpx.Client(timeout=300) as client:
        for _ in range(3):  # on one connection
            assert client.get(f"{server.url}/healthz", headers=long).status_code == 200
