"""A kill campaign: runs of the scenario, moments to kill at, and what came of it."""

import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import scenario
import tinker
from campaign_stores import SQLITE, CampaignStore
from processes import Event, Launcher, Served

from tinsmith import failpoints
from tinsmith.checkpoints.tinker_path import TinkerPath
from tinsmith.settings import ModelSettings
from tinsmith.testing.harness import TOY

SETTINGS: dict[str, dict[str, Any]] = {
    # everything else is as shipped; these make a run of 50 steps meet what longer runs meet
    "supervisor": {"restart_backoff_s": 0.05, "restart_backoff_max_s": 0.5},
    "recovery": {"point_every_operations": 7},
}
_WHOM: list[tuple[str, ...]] = [("engine",), ("serve",), ("serve", "engine"), ()]  # nobody: an orderly stop
_HOW_OFTEN = [12, 4, 4, 1]
_CONNECTIONS, _CONNECTIONS_HOW_OFTEN = ("connections",), 4  # where there are any
_DEATHS_PER_STEP = 12  # an operation that is interrupted 20 times fails, as recovery.max_interruptions says


def settings_with(store: CampaignStore, more: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    parts = (SETTINGS, store.settings, more)
    names = {name for part in parts for name in part}
    return {name: {key: value for part in parts for key, value in part.get(name, {}).items()} for name in names}


@dataclass(frozen=True, slots=True)
class Kill:
    kind: str  # engine, server, both; at a failpoint: its name
    at_s: float


@dataclass
class Tally:
    """Of a whole campaign; shared by the runs that go on at the same time."""

    wanted: int
    seed: int
    kills: list[Kill] = field(default_factory=list)
    recoveries_s: list[float] = field(default_factory=list)
    runs: int = 0
    orderly: int = 0
    broken: int = 0  # times that all connections to the database ended at once
    never_hit: set[str] = field(default_factory=lambda: set(failpoints.points()))
    lock: threading.Lock = field(default_factory=threading.Lock)
    show: Callable[[str], None] = lambda _: None

    def add(self, kind: str) -> None:
        with self.lock:
            self.kills.append(Kill(kind, time.monotonic()))
            self.never_hit.discard(kind)
            self.show(f"{len(self.kills)} of {self.wanted} kills, {len(self.never_hit)} failpoints to go, {kind}")

    @property
    def enough(self) -> bool:
        return len(self.kills) >= self.wanted and not self.never_hit

    def table(self) -> str:
        kinds = Counter(kill.kind if "." not in kill.kind else "at a failpoint" for kill in self.kills)
        points = Counter(kill.kind for kill in self.kills if "." in kill.kind)
        lines = [f"seed {self.seed}: {len(self.kills)} kills in {self.runs} runs"]
        lines += [f"  {number:5}  {kind}" for kind, number in kinds.most_common()]
        lines.append(f"  {self.orderly:5}  orderly stops besides")
        if self.broken:
            lines.append(f"  {self.broken:5}  times all connections to the database besides")
        lines += [f"  {number:9}  {point}" for point, number in sorted(points.items())]
        if self.recoveries_s:
            low, middle, high = min(self.recoveries_s), statistics.median(self.recoveries_s), max(self.recoveries_s)
            lines.append(f"  kill to ready: min {low:.2f} s, median {middle:.2f} s, max {high:.2f} s")
        return "\n".join(lines)


class Disturber:
    """Kills the processes of one run, at moments and points drawn from one seed."""

    def __init__(
        self, tally: Tally, seed: str, *, arm_all: bool, share_at_points: float, store: CampaignStore = SQLITE
    ) -> None:
        """With `arm_all` every point that was never hit is armed in every process, else some, in that share of them."""
        self.tally = tally
        self.random = random.Random(seed)
        self.arm_all = arm_all
        self.share_at_points = share_at_points
        self.store = store
        self.served: Served | None = None
        self.log: Path | None = None
        self.read = 0
        self.ours: set[int] = set()
        self.down_since: float | None = None
        self.step = -1
        self.deaths_at_step = 0
        self.finished = False
        self.news = threading.Condition()
        self.planning = threading.Lock()

    def attach(self, served: Served) -> None:
        self.served = served
        self.log = Path(f"{served.label}.points")
        for role in ("serve", "engine"):
            self.plan(role)

    def disarm(self) -> None:
        """Let what runs now be the last: a server that is armed might die of its orderly stop."""
        assert self.served is not None
        self.share_at_points, self.arm_all = 0.0, False
        for role in ("engine", "serve"):
            self.plan(role)
        self.ours |= self.served.kill("serve", "engine")

    # what is armed in the next process of each role

    def plan(self, role: str) -> None:
        assert self.served is not None
        with self.planning:
            with self.tally.lock:
                rare = sorted(self.tally.never_hit)
            if self.deaths_at_step >= _DEATHS_PER_STEP:
                armed = {}
            elif self.arm_all:
                armed = dict.fromkeys(rare, 1)  # some are passed once in a run
            elif self.random.random() < self.share_at_points:
                points = self.random.sample(failpoints.points(), 4) + self.random.sample(rare, min(4, len(rare)))
                armed = {point: 1 if point in rare else 1 + int(self.random.expovariate(1 / 6)) for point in points}
            else:
                armed = {}
            self.served.arm(role, ";".join([f"log={self.log}", *(f"{point}=kill@{at}" for point, at in armed.items())]))

    def heard(self, event: Event) -> None:
        """Runs where births and deaths are heard of, one at a time."""
        if event.killed:
            self.deaths_at_step += 1
        if event.killed and event.pid not in self.ours:
            for point in self.new_points():
                self.tally.add(point)
        self.plan(event.role)  # at a death once more: where it died is done
        if event.killed:
            self.down_since = event.at_s

    def new_points(self) -> list[str]:
        assert self.log is not None
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        fresh, self.read = lines[self.read :], len(lines)
        return fresh

    def said(self, line: str) -> None:
        if "tinsmith.processes.engine_run: ready:" in line and self.down_since is not None:
            self.tally.recoveries_s.append(time.monotonic() - self.down_since)
            self.down_since = None

    # moments

    def at_step(self, number: int) -> None:
        with self.news:
            self.step, self.deaths_at_step = number, 0
            self.news.notify_all()

    def kill_at_moments(self, moments: list[tuple[int, float, tuple[str, ...]]]) -> None:
        assert self.served is not None
        for step, delay_s, roles in moments:
            with self.news:
                self.news.wait_for(lambda step=step: self.step >= step or self.finished)
                if self.finished:
                    return
            time.sleep(delay_s)  # the moment is the point
            if not roles:
                self.served.terminate()
                self.tally.orderly += 1
                continue
            if roles == _CONNECTIONS:
                assert self.store.break_connections is not None
                self.store.break_connections()
                self.tally.broken += 1
                continue
            with self.served.changed:
                self.ours |= self.served.kill(*roles)
            self.tally.add("both" if len(roles) > 1 else {"serve": "server"}.get(roles[0], roles[0]))

    def draw_moments(self, number: int) -> list[tuple[int, float, tuple[str, ...]]]:
        """Most while it trains, some while what was killed before comes back."""
        whom, how_often = _WHOM, _HOW_OFTEN
        if self.store.break_connections is not None:
            whom, how_often = [*whom, _CONNECTIONS], [*how_often, _CONNECTIONS_HOW_OFTEN]
        moments = []
        for step in sorted(self.random.randrange(scenario.STEPS - 1) for _ in range(number)):
            delay_s = self.random.uniform(0.0, 0.1 if self.random.random() < 0.7 else 1.0)
            roles = self.random.choices(whom, how_often)[0]
            moments.append((step, delay_s, roles))
        return moments


@dataclass(frozen=True, slots=True)
class Expected:
    """The run that nobody disturbed."""

    seen: list[Any]
    states: list[dict[str, bytes | int]]
    kinds: list[str]
    used: list[tuple[Any, ...]]


def undisturbed(launcher: Launcher, directory: Path, model: ModelSettings = TOY) -> Expected:
    served = Served(launcher, directory, [model], settings=SETTINGS)
    try:
        expected = client_of(served, model, SQLITE, lambda _: None)
        assert served.stop() == 0
    finally:
        served.close()
    return expected


def disturbed(
    launcher: Launcher,
    directory: Path,
    expected: Expected,
    tally: Tally,
    *,
    number: int,
    arm_all: bool = False,
    num_moments: int = 0,
    share_at_points: float = 0.0,
    model: ModelSettings = TOY,
    store: CampaignStore = SQLITE,
) -> None:
    """One run under fire; raise AssertionError where it differs from the one that nobody disturbed."""
    seed = f"{tally.seed}:{number}"
    disturber = Disturber(tally, seed, arm_all=arm_all, share_at_points=share_at_points, store=store)
    moments = disturber.draw_moments(num_moments)
    served = Served(
        launcher,
        directory,
        [model],
        settings={**SETTINGS, **store.settings},
        on_event=disturber.heard,
        on_line=disturber.said,
        prepare=disturber.attach,
    )
    try:
        with ThreadPoolExecutor(1) as pool:
            killing = pool.submit(disturber.kill_at_moments, moments)
            try:
                found = client_of(served, model, store, disturber.at_step)
            finally:
                with disturber.news:
                    disturber.finished = True
                    disturber.news.notify_all()
                killing.result()
        assert_same(expected, found)
        disturber.disarm()
        assert served.stop() == 0, f"the server did not stop in order, see {served.log.name}"
    finally:
        served.close()
    with tally.lock:
        tally.runs += 1


def client_of(served: Served, model: ModelSettings, store: CampaignStore, at_step: Callable[[int], None]) -> Expected:
    service = tinker.ServiceClient(base_url=served.url, api_key="tml-test")
    seen, saved = scenario.run(service, model.name, at_step)
    found = outcome(served.data_dir, store, seen, saved)
    service.close("success").result(timeout=scenario.WAIT_S)
    return found


def outcome(data_dir: Path, store: CampaignStore, seen: list[Any], saved: list[str]) -> Expected:
    """Return what a client saw and saved, and what its session, not closed yet, has left in the store."""
    states = [scenario.state_at(data_dir, path) for path in saved]
    query = partial(store.query, data_dir)
    kinds = journal(query, TinkerPath.parse(saved[0]).model_id)
    used = query(
        "SELECT sum(trained_tokens), sum(prefilled_tokens), sum(sampled_tokens), sum(checkpoints) FROM usage "
        "GROUP BY tenant, base_model"
    )
    return Expected(seen, states, kinds, [tuple(map(int, row)) for row in used])


def journal(query: Callable[[str], list[tuple[Any, ...]]], model_id: str) -> list[str]:
    """Return the kinds of the model's operations in order; none missing, twice or failed, and no note on the run."""
    rows = query(f"SELECT seq_id, state, kind FROM operations WHERE subject_id = '{model_id}' ORDER BY seq_id")
    assert [row[:2] for row in rows] == [(number, "succeeded") for number in range(len(rows))]
    notes = query("SELECT state, state_reason, applied_seq_id FROM runs")
    assert notes == [("ready", None, len(rows) - 1)]
    return [row[2] for row in rows]


def assert_same(expected: Expected, found: Expected) -> None:
    assert found.kinds == expected.kinds
    assert found.used == expected.used
    assert len(found.seen) == len(expected.seen)
    for number, (one, other) in enumerate(zip(found.seen, expected.seen, strict=True)):
        assert one == other, f"result {number} differs"
    assert found.states == expected.states
