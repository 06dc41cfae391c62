"""Machines cannot reach each other for longer than leases and time-outs: delay, and the undisturbed run's bits."""

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import pytest
import scenario
from campaign import Expected, assert_same, outcome, settings_with, undisturbed
from campaign_stores import SQLITE, CampaignStore
from forked import Forked
from interludes import Interlude, Interludes
from networks import Machine, Network, a_database, a_network, on_database
from processes import WAIT_S, Launcher, Served

from tinsmith.settings import ModelSettings, PluginSection
from tinsmith.testing.harness import TOY
from tinsmith_checkpoints.huggingface.tiny_model import TinyShape, write_tiny_model
from tinsmith_workers.launching import KEY

KEYS = {"host": "0.0.0.0", "api_keys": [{"key": "tml-test", "tenant": "anybody"}]}
_PROGRAM: Final = Path(__file__).with_name("client_program.py")


@pytest.fixture
def network() -> Iterator[Network]:
    with a_network() as network:
        yield network


class Line(threading.Event):
    """Whether a server has printed something since `clear`."""

    def __init__(self, pattern: str) -> None:
        super().__init__()
        self._pattern = re.compile(pattern)

    def heard(self, line: str) -> None:
        if self._pattern.search(line):
            self.set()

    def wait_for(self) -> None:
        assert self.wait(WAIT_S), self._pattern.pattern


@contextmanager
def serving(
    launcher: Launcher,
    machine: Machine,
    directory: Path,
    settings: Mapping[str, Mapping[str, Any]],
    on_line: Callable[[str], None] = lambda _: None,
    *,
    model: ModelSettings = TOY,
    environ: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Served]:
    environ = {**environ, **machine.environ}
    served = Served(launcher, directory, [model], settings=settings, on_line=on_line, environ=environ)
    try:
        machine.run(served.wait_until_it_answers)
        yield served
        assert machine.run(served.stop) == 0
    finally:
        served.close()


@contextmanager
def client_on(
    machine: Machine, launcher: Launcher, url: str, model: ModelSettings, at_step: Callable[[int], None], log: Path
) -> Iterator[tuple[list[Any], list[str]]]:
    """Yield what a client saw and saved; after the block it closes its session."""
    ours, theirs = Pipe()
    environ = {**launcher.environ, **machine.environ, "PYTHONPATH": str(_PROGRAM.parent)}
    arguments = ["-c", _PROGRAM.read_text(), url, model.name, str(scenario.STEPS)]
    with ours:
        with theirs, log.open("wb") as errors:
            client = Forked(launcher, *arguments, environ=environ, output=theirs, errors=errors)
        try:
            while isinstance(told := ours.recv(), int):
                at_step(told)
                ours.send("go on")
            yield told
            ours.send("close")
            assert client.wait() == 0, log
        finally:
            client.kill()


def ran_as_expected(
    expected: Expected,
    served: Served,
    store: CampaignStore,
    client: Machine,
    url: str,
    planned: Sequence[Interlude],
    model: ModelSettings = TOY,
) -> None:
    """Run the scenario; raise AssertionError where it differs from the undisturbed run."""
    log = Path(served.label).with_name("client")
    with (
        Interludes(planned).running() as at_step,
        client_on(client, served.launcher, url, model, at_step, log) as (seen, saved),
    ):
        found = outcome(served.data_dir, store, seen, saved)
    assert_same(expected, found)


def sessions(store: CampaignStore) -> set[int]:
    """Return the processes of the database that serve ours."""
    return {
        pid for (pid,) in store.query(Path(), "SELECT pid FROM pg_stat_activity WHERE application_name = 'tinsmith'")
    }


def wait_until_ended(store: CampaignStore, before: set[int]) -> None:
    """Wait for the end of the sessions whose clients are gone. The database looks by itself."""
    deadline = time.monotonic() + WAIT_S
    while left := before & sessions(store):
        assert time.monotonic() < deadline, f"the database keeps {len(left)} of {len(before)} sessions that nobody uses"
        time.sleep(0.1)


QUICK = {"connect_timeout": "2", "tcp_user_timeout": "1000"}
QUICK |= {"keepalives_idle": "1", "keepalives_interval": "1", "keepalives_count": "2"}
"""Of connections to the database: both ends notice a cut after one to three seconds."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_database_that_is_cut_off_for_a_moment(
    network: Network, launcher: Launcher, for_a_while: Expected, tmp_path: Path
) -> None:
    """For longer than the lease and the connections. What the cut leaves of those at the database ends as well."""
    ours, theirs = network.add(), network.add()
    with a_database(theirs) as database:
        store = on_database(database, theirs, **QUICK)
        settings = settings_with(store, {"recovery": {"lease_s": 1.0}})
        back = Line("the database .* is back after")
        with serving(launcher, ours, tmp_path / "run", settings, back.heard) as served:
            before: set[int] = set()

            def last() -> None:
                before.update(sessions(store))
                time.sleep(4.0)  # the length is the point

            cut = Interlude(3, partial(network.cut, ours, theirs), last)
            ran_as_expected(for_a_while, served, store, ours, served.url, [cut])
            assert back.is_set(), "connections broke"
            wait_until_ended(store, before)


@pytest.mark.crash
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("options", "outage_s"), [pytest.param({}, 30.0, id="as shipped"), pytest.param(QUICK, 1.0, id="impatient")]
)
def test_a_database_that_is_cut_off(
    network: Network, launcher: Launcher, tmp_path: Path, options: dict[str, str], outage_s: float
) -> None:
    """For longer than the time-out of a session. If nobody has patience, engines die and cannot start for a minute."""
    expected = undisturbed(launcher, tmp_path / "undisturbed")
    ours, theirs = network.add(), network.add()
    with a_database(theirs) as database:
        store = on_database(database, theirs, **options)
        more = {
            "store": {"outage_s": outage_s},
            "server": {"session_timeout_s": 60.0, "result_retention_s": 3600.0},
            "recovery": {"lease_s": 5.0, "max_interruptions": 3},
        }
        died = Line("ended with exit code 3")
        with serving(launcher, ours, tmp_path / "run", settings_with(store, more), died.heard) as served:
            before: set[int] = set()

            def last() -> None:
                before.update(sessions(store))
                time.sleep(100.0)  # as above

            cuts = [Interlude(step, partial(network.cut, ours, theirs), last) for step in (10, 36)]
            ran_as_expected(expected, served, store, ours, served.url, cuts)
            wait_until_ended(store, before)
    assert died.is_set() == (outage_s == 1.0)


@pytest.mark.crash
@pytest.mark.timeout(3600)
def test_standbys_take_over_from_machines_that_are_cut_off(
    network: Network, launcher: Launcher, tmp_path: Path
) -> None:
    """To and fro. The client keeps to one server, also while that cannot reach the database."""
    expected = undisturbed(launcher, tmp_path / "undisturbed")
    one, two, theirs = network.add(), network.add(), network.add()
    with a_database(theirs) as database:
        store = on_database(database, theirs)
        shared = {"share_data_dir": True, "session_timeout_s": 60.0, "data_dir": str(tmp_path / "one" / "data")}
        settings = settings_with(store, {"server": shared, "recovery": {"lease_s": 2.0}})
        takes = [Line("tinsmith.processes.engine_run: ready:") for _ in range(2)]
        with (
            serving(launcher, one, tmp_path / "one", settings, takes[0].heard) as first,
            serving(launcher, two, tmp_path / "two", settings, takes[1].heard) as second,
        ):
            takes[0].wait_for()

            def until_the_other_serves(number: int) -> None:
                takes[number].clear()
                takes[number].wait_for()
                time.sleep(5.0)

            cuts = [
                Interlude(8, partial(network.cut, one, theirs), partial(until_the_other_serves, 1)),
                Interlude(20, partial(network.cut, two, theirs), partial(until_the_other_serves, 0)),
                Interlude(36, partial(network.cut, one, theirs), partial(time.sleep, 75.0)),
            ]
            del second
            ran_as_expected(expected, first, store, one, first.url, cuts)


@pytest.mark.crash
@pytest.mark.timeout(3600)
def test_a_client_that_is_cut_off(network: Network, launcher: Launcher, tmp_path: Path) -> None:
    """For longer than its requests wait, and than its session's time-out less a heartbeat."""
    expected = undisturbed(launcher, tmp_path / "undisturbed")
    ours, theirs = network.add(), network.add()
    settings = settings_with(SQLITE, {"server": {**KEYS, "session_timeout_s": 150.0}})
    with serving(launcher, ours, tmp_path / "run", settings) as served:
        cuts = [
            Interlude(step, partial(network.cut, ours, theirs), partial(time.sleep, for_s))
            for step, for_s in [(3, 20.0), (10, 75.0), (36, 120.0)]
        ]
        url = f"http://{ours.address}:{served.port}"
        ran_as_expected(expected, served, SQLITE, theirs, url, cuts)


@pytest.mark.crash
@pytest.mark.timeout(3600)
def test_workers_that_are_cut_off(
    network: Network, launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine notices by itself, and waits for all workers to join again, which they do when they can."""
    monkeypatch.setattr(scenario, "STEPS", 9)
    write_tiny_model(tmp_path / "tiny", TinyShape(num_layers=2, hidden_size=64, intermediate_size=96))
    sampler = {"plugin": "jax", "warm_up": False, "max_context_tokens": 128, "max_lora_rank": 8, "decode_slots": 4}
    backend = {"plugin": "fsdp", "device": "cpu", "max_lora_rank": 8, "max_context_tokens": 128}
    model = ModelSettings(
        name="tiny",
        path=tmp_path / "tiny",
        backend=PluginSection.model_validate({**backend, "nproc_per_node": 2}),
        sampler=PluginSection.model_validate(sampler),
    )
    expected = undisturbed(launcher, tmp_path / "undisturbed", model)
    ours, theirs = network.add(), network.add()
    address = f"{ours.address}:7000"
    apart = {**backend, "nnodes": 2, "nproc_per_node": 1, "launcher": "scheduler", "control_address": address}
    model = model.model_copy(update={"backend": PluginSection.model_validate(apart)})
    died = Line("worker 1 of 2 .* died before it had answered")
    settings = settings_with(SQLITE, {})
    secret = {KEY: "a secret of the test, long enough"}
    with (
        hosting(launcher, [ours, theirs], address, secret, tmp_path / "workers"),
        serving(launcher, ours, tmp_path / "run", settings, died.heard, model=model, environ=secret) as served,
    ):

        def until_noticed() -> None:
            died.clear()
            died.wait_for()

        cuts = [
            Interlude(3, partial(network.cut, ours, theirs), until_noticed),
            Interlude(6, partial(network.cut, ours, theirs), partial(time.sleep, 100.0)),  # both notice
        ]
        ran_as_expected(expected, served, SQLITE, ours, served.url, cuts, model)
    tried = re.findall(r"waiting for the engine at .*: timed out", (tmp_path / "workers").read_text())
    assert tried, "a worker tries again while the kernel would still wait"


@contextmanager
def hosting(
    launcher: Launcher, machines: Sequence[Machine], coordinator: str, secret: Mapping[str, str], log: Path
) -> Iterator[None]:
    """Run a worker on each machine, again and again."""
    hosts = []
    with log.open("wb") as output:
        for index, machine in enumerate(machines):
            environ = {**launcher.environ, **machine.environ, **secret, "GLOO_SOCKET_IFNAME": "eth0"}
            arguments = ["worker", "--coordinator", coordinator, "--index", str(index), "--again"]
            hosts.append(Forked(launcher, *arguments, environ=environ, output=output, errors=output))
    try:
        yield
    finally:
        for host in hosts:
            host.kill()
            host.wait()
