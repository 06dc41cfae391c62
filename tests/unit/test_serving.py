"""What a server does to its process before it serves."""

import re
import resource

import pytest

from tinsmith.errors import ConfigError
from tinsmith.processes.serve import allow_many_files, with_files_for_connections
from tinsmith.settings import PluginSection, ServerSettings, Settings
from tinsmith.settings.schema import LimitsSettings

INFINITY = resource.RLIM_INFINITY
Limits = list[tuple[int, int]]


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Limits:
    """Stand in for those of the machine, which cannot all be had; the last one counts."""
    limits: Limits = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.append(new))
    return limits


def settings(connections: int) -> Settings:
    server = ServerSettings(limits=LimitsSettings(connections=connections))
    return Settings(server=server, store=PluginSection(plugin="sql"))


@pytest.mark.parametrize(
    ("before", "connections", "after"),
    [
        ((1024, 524_288), 10_000, (65_536, 524_288)),
        ((1024, INFINITY), 10_000, (65_536, INFINITY)),
        ((100_000, 524_288), 10_000, (100_000, 524_288)),
        ((INFINITY, INFINITY), 10_000, (INFINITY, INFINITY)),
        ((1024, 524_288), 100_000, (100_256, 524_288)),
        ((1024, 10_256), 10_000, (10_256, 10_256)),
    ],
)
def test_all_connections_get_files(
    limits: Limits, before: tuple[int, int], connections: int, after: tuple[int, int]
) -> None:
    limits.append(before)
    assert with_files_for_connections(settings(connections)).server.limits.connections == connections
    assert limits[-1] == after


def test_connections_beyond_the_hard_limit_of_files_are_lowered_and_told(
    limits: Limits, caplog: pytest.LogCaptureFixture
) -> None:
    limits.append((1024, 4096))
    assert with_files_for_connections(settings(10_000)).server.limits.connections == 4096 - 256
    assert limits[-1] == (4096, 4096)
    told = r"server\.limits\.connections is 10000, and this process may open 4096 files .*: lowered to 3840 connections"
    assert re.search(told, caplog.text)


def test_a_limit_of_files_that_leaves_no_connections_is_refused(limits: Limits) -> None:
    limits.append((256, 256))
    with pytest.raises(ConfigError, match=r"this process may open 256 files .*raise the limit to at least 272"):
        with_files_for_connections(settings(10_000))


def test_the_limit_of_this_process_is_raised() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        assert allow_many_files() == resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 256
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
