"""What a server does to its process before it serves."""

import resource

import pytest

from tinsmith.processes.serve import allow_many_connections

INFINITY = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1024, 524_288), (65_536, 524_288)),
        ((1024, INFINITY), (65_536, INFINITY)),
        ((1024, 4096), (4096, 4096)),
        ((100_000, 524_288), (100_000, 524_288)),
        ((INFINITY, INFINITY), (INFINITY, INFINITY)),
    ],
)
def test_thousands_of_connections_are_allowed(
    monkeypatch: pytest.MonkeyPatch, before: tuple[int, int], after: tuple[int, int]
) -> None:
    limits = [before]  # those of the machine cannot all be had
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.append(new))
    allow_many_connections()
    assert limits[-1] == after


def test_the_limit_of_this_process_is_raised() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        allow_many_connections()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 256
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
