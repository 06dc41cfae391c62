"""Processes are stopped for longer than leases and time-outs, and go on: delay, and the undisturbed run's bits."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import pytest
from campaign import Expected, assert_same, client_of, settings_with, undisturbed
from campaign_stores import SQLITE, CampaignStore, on_postgres
from interludes import Interlude, Interludes
from processes import WAIT_S, Launcher, Served

from tinsmith.testing.harness import TOY
from tinsmith.testing.postgres import Postgres

ENGINE, SERVER, BOTH = ("engine",), ("serve",), ("serve", "engine")


@contextlib.contextmanager
def stopped(served: Served, roles: tuple[str, ...]) -> Iterator[None]:
    with served.changed:
        assert served.changed.wait_for(lambda: all(served.pids[role] for role in roles), WAIT_S)
        pids = {pid for role in roles for pid in served.pids[role]}
    _signal(pids, signal.SIGSTOP)
    yield
    _signal(pids, signal.SIGCONT)


@contextlib.contextmanager
def stopped_database(database: Postgres) -> Iterator[None]:
    """Its connections stay, and nobody answers."""
    postmaster = psutil.Process(int((database.data / "postmaster.pid").read_text().split()[0]))
    postmaster.suspend()  # it forks no more
    others = postmaster.children()
    for process in others:
        process.suspend()
    yield
    for process in (*others, postmaster):
        process.resume()


def _signal(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # its supervisor has killed it meanwhile
            os.kill(pid, number)


@dataclass(frozen=True, slots=True)
class Pause:
    step: int
    roles: tuple[str, ...]
    for_s: float


def paused(served: Served, expected: Expected, pauses: Sequence[Pause], store: CampaignStore = SQLITE) -> None:
    """Run the scenario while processes pause; raise AssertionError where it differs from the undisturbed run."""
    planned = [
        Interlude(
            each.step, partial(stopped, served, each.roles), partial(time.sleep, each.for_s)
        )  # its length is the point
        for each in pauses
    ]
    with Interludes(planned).running() as at_step:
        found = client_of(served, TOY, store, at_step)
    assert_same(expected, found)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_short_pauses(launcher: Launcher, for_a_while: Expected, tmp_path: Path) -> None:
    """Longer than a lease. Whether the supervisor kills what stops, or lets it go on, makes no difference."""
    short = {"recovery": {"lease_s": 1.0}, "watchdog": {"lost_s": 1.0}}
    served = Served(launcher, tmp_path / "run", [TOY], settings=settings_with(SQLITE, short))
    try:
        paused(served, for_a_while, [Pause(3, ENGINE, 1.5), Pause(6, BOTH, 1.5), Pause(9, ENGINE, 4.0)])
        assert served.stop() == 0
    finally:
        served.close()


@pytest.mark.crash
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("lost_s", [300.0, 10.0])
@pytest.mark.parametrize("on", ["sqlite", "postgresql"])
def test_long_pauses(
    launcher: Launcher, tmp_path: Path, on: str, lost_s: float, request: pytest.FixtureRequest
) -> None:
    """Longer than the time-out of a session, whose client never stops."""
    expected = undisturbed(launcher, tmp_path / "undisturbed")
    store = SQLITE if on == "sqlite" else on_postgres(request.getfixturevalue("postgres"))
    server = {"session_timeout_s": 60.0, "result_retention_s": 3600.0}
    long = {"server": server, "recovery": {"lease_s": 5.0}, "watchdog": {"lost_s": lost_s}}
    served = Served(launcher, tmp_path / "run", [TOY], settings=settings_with(store, long))
    try:
        pauses = [Pause(4, ENGINE, 75.0), Pause(20, SERVER, 75.0), Pause(36, BOTH, 75.0)]
        paused(served, expected, pauses, store)
        assert served.stop() == 0
    finally:
        served.close()


@pytest.mark.crash
@pytest.mark.timeout(3600)
def test_a_standby_takes_over_from_engines_that_pause(launcher: Launcher, tmp_path: Path, postgres: Postgres) -> None:
    """Two servers on one database and data directory. Each engine that goes on finds that another one serves."""
    expected = undisturbed(launcher, tmp_path / "undisturbed")
    store = on_postgres(postgres)
    shared = {"share_data_dir": True, "session_timeout_s": 60.0, "data_dir": str(tmp_path / "first" / "data")}
    settings = settings_with(store, {"server": shared, "recovery": {"lease_s": 2.0}})
    first = Served(launcher, tmp_path / "first", [TOY], settings=settings)
    try:
        first.wait_until_it_answers()
        second = Served(launcher, tmp_path / "second", [TOY], settings=settings)
        try:
            pauses = [Pause(4, ENGINE, 10.0), Pause(12, BOTH, 10.0), Pause(20, SERVER, 75.0), Pause(36, BOTH, 75.0)]
            paused(first, expected, pauses, store)
            assert second.stop() == first.stop() == 0
        finally:
            second.close()
    finally:
        first.close()


@pytest.mark.crash
@pytest.mark.timeout(3600)
def test_the_database_pauses(launcher: Launcher, tmp_path: Path, own_postgres: Postgres) -> None:
    """All its processes, for longer than everybody's time-outs; whoever waits for an answer waits on."""
    expected = undisturbed(launcher, tmp_path / "undisturbed")
    store = on_postgres(own_postgres)
    server = {"session_timeout_s": 60.0, "result_retention_s": 3600.0}
    settings = settings_with(store, {"server": server, "recovery": {"lease_s": 5.0}})
    served = Served(launcher, tmp_path / "run", [TOY], settings=settings)
    try:
        stop = partial(stopped_database, own_postgres)
        planned = [Interlude(step, stop, partial(time.sleep, for_s)) for step, for_s in [(8, 20.0), (20, 100.0)]]
        with Interludes(planned).running() as at_step:
            found = client_of(served, TOY, store, at_step)
        assert_same(expected, found)
        assert served.stop() == 0
    finally:
        served.close()
