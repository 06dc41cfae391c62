"""How the end of an engine's process is judged, and what follows for its restart."""

import signal
from pathlib import Path

import pytest

from tinsmith.processes import deaths
from tinsmith.processes.deaths import Cause, Death, Restarts, Witness
from tinsmith.settings import RecoverySettings, SupervisorSettings

CRASH, INTERRUPTION = Death(Cause.CRASH, "crashed"), Death(Cause.INTERRUPTION, "was killed")
SUPERSEDED, MISCONFIGURED = Death(Cause.SUPERSEDED, "was replaced"), Death(Cause.MISCONFIGURED, "cannot start")


@pytest.fixture
def counters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    counters = tmp_path / "vmstat"
    counters.write_text("nr_free_pages 1\noom_kill 3\n")
    monkeypatch.setattr(deaths, "COUNTERS", counters)
    return counters


@pytest.mark.parametrize(
    ("code", "cause", "how"),
    [
        (0, Cause.CRASH, "ended with exit code 0"),  # nobody had asked it to end
        (1, Cause.CRASH, "ended with exit code 1"),
        (deaths.EXIT_MISCONFIGURED, Cause.MISCONFIGURED, "ended with exit code 2"),
        (deaths.EXIT_STORE, Cause.INTERRUPTION, "ended with exit code 3"),
        (deaths.EXIT_SUPERSEDED, Cause.SUPERSEDED, "ended with exit code 4"),
        (-signal.SIGKILL, Cause.INTERRUPTION, "was killed by signal SIGKILL"),
        (-signal.SIGTERM, Cause.INTERRUPTION, "was killed by signal SIGTERM"),
        (-signal.SIGINT, Cause.INTERRUPTION, "was killed by signal SIGINT"),
        (-signal.SIGHUP, Cause.INTERRUPTION, "was killed by signal SIGHUP"),
        (-signal.SIGSEGV, Cause.CRASH, "was killed by signal SIGSEGV"),
        (-40, Cause.CRASH, "was killed by signal 40"),  # a real-time signal
        (-signal.SIGABRT, Cause.CRASH, "was killed by signal SIGABRT"),
    ],
)
@pytest.mark.usefixtures("counters")
def test_a_death_is_judged_by_the_wait_status(code: int, cause: Cause, how: str) -> None:
    last_words = "last words" if code >= 0 else ""  # for the operator alone
    assert Witness().judge(code, "last words") == Death(cause, how, last_words)


def test_a_kill_while_memory_ran_out_is_a_crash(counters: Path) -> None:
    witness = Witness()
    counters.write_text("oom_kill 4")
    assert witness.judge(-signal.SIGKILL) == Death(
        Cause.CRASH, "was killed by signal SIGKILL, while this machine was out of memory"
    )
    assert witness.judge(-signal.SIGTERM).cause is Cause.INTERRUPTION  # the kernel uses SIGKILL
    assert Witness().judge(-signal.SIGKILL).cause is Cause.INTERRUPTION  # it counted before this process started


def test_a_kernel_that_does_not_count_is_not_asked_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deaths, "COUNTERS", tmp_path / "none")
    assert Witness().judge(-signal.SIGKILL).cause is Cause.INTERRUPTION


def test_only_deaths_from_outside_leave_the_operations_unsuspected() -> None:
    outside = [Cause.INTERRUPTION, Cause.SUPERSEDED, Cause.UNSTARTED]
    assert [cause for cause in Cause if cause.is_from_outside] == outside


def restarts(*, max_restarts: int = 2, max_interruptions: int = 3) -> Restarts:
    supervisor = SupervisorSettings(restart_backoff_s=1.0, restart_backoff_max_s=5.0, max_restarts=max_restarts)
    return Restarts(supervisor, RecoverySettings(max_interruptions=max_interruptions))


def delays(policy: Restarts, death: Death, number: int, *, was_ready: bool = False) -> list[float | None]:
    return [policy.delay_after_s(death, was_ready=was_ready) for _ in range(number)]


def test_the_delay_doubles_up_to_its_limit_until_the_engine_is_ready() -> None:
    policy = restarts(max_restarts=9)
    assert delays(policy, CRASH, 4) == [1.0, 2.0, 4.0, 5.0]
    assert delays(policy, CRASH, 2, was_ready=True) == [1.0, 1.0]
    assert delays(policy, CRASH, 2) == [2.0, 4.0]
    assert policy.number == 8


@pytest.mark.parametrize(("death", "allowed"), [(CRASH, 2), (INTERRUPTION, 3), (MISCONFIGURED, 0)])
def test_an_engine_that_never_becomes_ready_is_given_up(death: Death, allowed: int) -> None:
    policy = restarts()
    *before, last = delays(policy, death, allowed + 1)
    assert None not in before
    assert last is None
    assert policy.number == allowed


def test_crashes_and_interruptions_are_counted_apart() -> None:
    policy = restarts()
    for death in (CRASH, INTERRUPTION, INTERRUPTION, CRASH, INTERRUPTION):
        assert policy.delay_after_s(death, was_ready=False) is not None
    assert policy.delay_after_s(CRASH, was_ready=False) is None


def test_an_engine_that_was_ready_is_never_given_up() -> None:
    policy = restarts()
    assert None not in delays(policy, CRASH, 2)
    assert None not in delays(policy, CRASH, 20, was_ready=True)
    assert None not in delays(policy, CRASH, 2)  # the count has started again
    assert delays(policy, CRASH, 1) == [None]


def test_an_outage_of_the_store_may_last_as_long_as_it_will() -> None:
    """An interruption in it tells nothing about the engine, and does not count. A crash does."""
    policy = restarts(max_restarts=0, max_interruptions=1)
    found = [policy.delay_after_s(INTERRUPTION, was_ready=False, in_outage=True) for _ in range(100)]
    assert found == [1.0, 2.0, 4.0, *[5.0] * 97]
    assert policy.delay_after_s(INTERRUPTION, was_ready=False) == 5.0
    assert policy.delay_after_s(INTERRUPTION, was_ready=False) is None
    assert restarts(max_restarts=0).delay_after_s(CRASH, was_ready=False, in_outage=True) is None


def test_a_superseded_engine_is_started_again_at_once_and_nothing_is_counted() -> None:
    policy = restarts(max_restarts=0, max_interruptions=1)
    assert delays(policy, SUPERSEDED, 5) == [0.0] * 5
    assert policy.number == 0
    assert policy.delay_after_s(INTERRUPTION, was_ready=False) == 1.0
