"""Malformed requests do not flood the log."""

import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tinsmith.processes.logs import EVERY_S, RepeatedWarnings
from tinsmith.processes.serve import configure_logging
from tinsmith.settings import ServerSettings
from tinsmith.testing.harness import running_server


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def logger(clock: Clock) -> Iterator[logging.Logger]:
    """The logger of uvicorn, held to the clock alone: a server that ran in this process left a filter of its own."""
    logger = logging.getLogger("uvicorn.error")
    left, logger.filters = logger.filters, [RepeatedWarnings(clock)]
    yield logger
    logger.filters = left


def test_a_warning_passes_once_a_minute_and_the_others_are_counted(
    logger: logging.Logger, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for clock.now_s in (0.0, 1.0, EVERY_S - 1.0, EVERY_S, 3 * EVERY_S):
        logger.warning("bad request from %s", "ann")
    assert caplog.messages == [
        "bad request from ann",
        "bad request from ann (2 more since the last such line)",
        "bad request from ann",
    ]


def test_other_warnings_and_errors_pass(logger: logging.Logger, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        logger.error("failed")
    logger.warning("one")
    logger.warning("another")
    assert caplog.messages == ["failed", "failed", "one", "another"]


def test_a_server_logs_so_however_often_one_starts() -> None:
    changed = [logging.getLogger(name) for name in ("uvicorn", "httpx", "alembic")]
    levels, uvicorns = [logger.level for logger in changed], logging.getLogger("uvicorn.error")
    left, uvicorns.filters = uvicorns.filters, []
    try:
        for _ in range(2):
            configure_logging(ServerSettings())
        assert [type(each) for each in uvicorns.filters] == [RepeatedWarnings]
    finally:
        uvicorns.filters = left
        for logger, level in zip(changed, levels, strict=True):
            logger.setLevel(level)


@pytest.mark.parametrize(
    "request_bytes",
    [
        pytest.param(b"no such thing\r\n\r\n", id="malformed"),
        pytest.param(b"GET /x HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n", id="upgrade"),
    ],
)
def test_many_malformed_requests_are_one_line(
    logger: logging.Logger, tmp_path: Path, caplog: pytest.LogCaptureFixture, request_bytes: bytes
) -> None:
    del logger
    with running_server(tmp_path, engines=False) as server:
        url = httpx.URL(server.url)
        for _ in range(50):
            with socket.create_connection((url.host, url.port), timeout=300) as connection:
                connection.sendall(request_bytes)
                assert connection.recv(100).startswith(b"HTTP/1.1 4")
    lines = [record.message for record in caplog.records if record.name == "uvicorn.error"]
    assert len(lines) == len(set(lines)) <= 2
