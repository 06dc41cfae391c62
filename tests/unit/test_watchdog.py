"""A call that does not return: noticed, told, and its engine ended; a slow one, or a paused process, is not."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tinsmith.engine.call_watch import LOADING, CallWatch
from tinsmith.processes.watchdog import Watchdog
from tinsmith.settings import WatchdogSettings

SETTINGS = WatchdogSettings(least_s=100, factor=10, first_s=300, most_s=5000)


class World:
    def __init__(self, settings: WatchdogSettings = SETTINGS) -> None:
        self.s = 0.0
        self.watch = CallWatch(settings, clock=lambda: self.s)
        self.told: list[str | None] = []
        self.ended: list[str] = []
        self.watchdog = Watchdog(self.watch, tell=self.told.append, end=self.ended.append)

    def passes(self, seconds: float) -> None:
        for _ in range(round(seconds)):
            self.s += 1.0
            self.watchdog.check()

    def call_of(self, seconds: float, kind: str = "optim_step", **sizes: float) -> None:
        with self.watch.call(kind, sizes or {"calls": 1.0}):
            self.passes(seconds)

    @contextmanager
    def measured(self, kind: str = "optim_step") -> Iterator[None]:
        """As during a call of which others have ended."""
        for _ in range(2):
            self.call_of(1, kind)
        with self.watch.call(kind):
            yield


@pytest.fixture
def world() -> World:
    return World()


def test_a_call_that_does_not_return_is_told_and_then_ends_the_engine(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    with world.measured():
        world.passes(49)
        assert world.told == []
        world.passes(3)
        (why,) = world.told
        assert why is not None
        assert why.startswith("optim_step has not returned since ")
        assert "this engine is silent: optim_step" in caplog.text
        world.passes(46)
        assert world.ended == []
        world.passes(5)
        assert "optim_step did not return within 100 s" in world.ended[0]
    assert world.told == [why]


def test_a_call_that_returns_after_all_is_told(world: World, caplog: pytest.LogCaptureFixture) -> None:
    with world.measured():
        world.passes(60)
    world.passes(1)
    assert [each is None for each in world.told] == [False, True]
    assert "no longer silent: optim_step" in caplog.text
    assert world.ended == []


def test_an_idle_engine_is_not_silent(world: World) -> None:
    world.passes(10_000)
    assert world.told == world.ended == []


def test_first_calls_have_more_time(world: World) -> None:
    world.call_of(140)
    assert world.told == []
    world.call_of(310, "sample")
    assert "sample did not return within 300 s" in world.ended[0]


def test_work_on_files_has_much_time_whatever_others_took(world: World) -> None:
    for _ in range(3):
        world.watch.files(lambda: world.passes(1), 1e6)()
    world.watch.files(lambda: world.passes(2400), 1e11)()
    world.watch.files(lambda: world.passes(2400))()
    assert world.told == []
    world.watch.files(lambda: world.passes(5001), 1e6)()
    assert "work on files did not return within 5000 s" in world.ended[0]


def test_work_on_many_bytes_has_more_time(world: World) -> None:
    world.watch.files(lambda: world.passes(4000), 1e11)()
    assert world.told == []
    world.watch.files(lambda: world.passes(10_001), 1e11)()
    assert "work on files did not return within 10000 s" in world.ended[0]


def test_loading_has_much_time(world: World) -> None:
    world.call_of(2400, LOADING)
    assert world.told == []
    world.call_of(5001, LOADING)
    assert "loading did not return within 5000 s" in world.ended[0]


def test_progress_is_a_sign_of_life(world: World) -> None:
    with world.measured():
        for _ in range(10):
            world.passes(40)
            world.watch.progressed()
        assert world.told == []
        world.passes(110)
    assert world.ended


def test_large_calls_have_as_much_time_as_the_slowest_of_their_size_suggest(world: World) -> None:
    for _ in range(3):
        world.call_of(20, "forward_backward", tokens=1000)
        world.call_of(1, "forward_backward", tokens=10)  # dearer for each token, and tells nothing about large ones
    with world.watch.call("forward_backward", {"tokens": 4000.0}):  # 80 s are expected
        world.passes(390)
        assert world.told == []
        world.passes(415)
    assert "forward_backward did not return within 800 s" in world.ended[0]


def test_a_long_sample_after_short_ones_has_its_time(world: World) -> None:
    """Samples that stop early, or only read a long prompt, do not make those that draw much look slow."""
    for _ in range(3):
        with world.watch.call("sample", {"steps": 32_000.0, "prompt": 10.0}) as call:
            world.passes(2)
            call.did = {"steps": 10.0, "prompt": 10.0}
        with world.watch.call("sample", {"steps": 1.0, "prompt": 32_000.0}) as call:
            world.passes(2)
            call.did = {"steps": 1.0, "prompt": 32_000.0}
    world.call_of(2400, "sample", steps=32_000.0, prompt=10.0)
    assert world.told == []


def test_failures_say_nothing_about_how_long_a_call_takes(world: World) -> None:
    for _ in range(5):
        with pytest.raises(ValueError, match="x"), world.watch.call("optim_step"):
            raise ValueError("x")
    world.call_of(140)
    assert world.told == []


def test_a_pause_of_the_process_does_not_count(world: World) -> None:
    with world.measured():
        for _ in range(5):
            world.passes(1)
            world.s += 3600.0
        assert world.told == world.ended == []
        world.passes(110)
    assert world.ended


def test_the_longest_wait_counts_among_many_calls(world: World) -> None:
    with ExitStack() as stack:
        stack.enter_context(world.measured("sample"))
        world.passes(30)
        for _ in range(20):
            stack.enter_context(world.measured("sample"))
        world.passes(60)
    assert len(world.ended) > 0


def test_the_watchdog_looks_by_itself() -> None:
    ended = threading.Event()
    watch = CallWatch(WatchdogSettings(least_s=0.02, first_s=0.02))
    watchdog = Watchdog(watch, tell=lambda _: None, end=lambda _: ended.set())
    with watchdog.running(), watch.call("optim_step"):
        assert ended.wait(300)
