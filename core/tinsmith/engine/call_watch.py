"""How long each running call of an engine has taken, and how long it may, judged by earlier calls of its kind."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, TypeVar

from tinsmith.settings import WatchdogSettings

T = TypeVar("T")

LOADING: Final = "loading"
FILES: Final = "work on files"

Sizes = Mapping[str, float]
"""The sizes with which a call's time grows, such as {"tokens": 512}. A size of zero takes no time."""

_LOOKS: Final = 40  # in the least time that a call may take
_LATE: Final = 5  # looks: a later look means that the process was paused, and its calls with it
_ALIKE: Final = 2  # powers of two: calls up to this much smaller predict a call's time

_BYTES_PER_S: Final = 10e6  # a disk that is slower counts as one that hangs

ONE_CALL: Final[Sizes] = {"calls": 1.0}


@dataclass(frozen=True, slots=True)
class Seen:
    """A running call, as somebody who looks sees it."""

    kind: str
    age_s: float
    bound_s: float

    @property
    def is_silent(self) -> bool:
        return self.age_s >= self.bound_s / 2

    @property
    def is_hung(self) -> bool:
        return self.age_s >= self.bound_s


@dataclass(slots=True)
class Watched:
    """A running call. Its caller may tell afterwards how much it really did; nothing, if it failed."""

    kind: str
    began_s: float
    bound_s: float
    did: Sizes


@dataclass(slots=True)
class _Measured:
    """The slowest calls: seconds for each unit, by the power of two of the size."""

    slowest: dict[str, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))

    def add(self, took_s: float, did: Sizes) -> None:
        for unit, size in did.items():
            if size > 0:
                power, by_power = _power(size), self.slowest[unit]
                by_power[power] = max(by_power.get(power, 0.0), took_s / size)

    def expected_s(self, sizes: Sizes) -> float | None:
        """Return how long a call of this size takes at most. None if nothing is known of one of its units."""
        expected_s = 0.0
        for unit, size in sizes.items():
            if size > 0:
                by_power = self.slowest.get(unit, {})
                alike = [rate for power, rate in by_power.items() if power >= _power(size) - _ALIKE]
                if not by_power:
                    return None
                expected_s += size * max(alike or by_power.values())
        return expected_s


class CallWatch:
    """Calls may begin and end in any thread. Somebody must `check` every `check_s` seconds.

    Time in which nobody looked does not count: the process was paused.
    """

    def __init__(self, settings: WatchdogSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self.check_s = min(1.0, settings.least_s / _LOOKS)
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._running: dict[int, Watched] = {}
        self._ended: Counter[str] = Counter()
        self._measured: dict[str, _Measured] = defaultdict(_Measured)
        self._looked_at_s, self._awake_s = clock(), 0.0

    @contextmanager
    def call(self, kind: str, sizes: Sizes = ONE_CALL) -> Iterator[Watched]:
        """Watch a call until the block ends."""
        with self._lock:
            number = next(self._numbers)
            call = Watched(kind=kind, began_s=self._now_s(), bound_s=self._bound_s(kind, sizes), did=sizes)
            self._running[number] = call
        try:
            yield call
        except BaseException:
            call.did = {}
            raise
        finally:
            with self._lock:
                del self._running[number]
                self._end(call, self._now_s() - call.began_s)

    def files(self, work: Callable[[], T], num_bytes: float = 0.0) -> Callable[[], T]:
        """Wrap a function that reads or writes `num_bytes` of files, 0 if unknown. Waiting for a thread does not count.

        What other files took says nothing: the next file may be a thousand times as large.
        """

        def watched() -> T:
            with self.call(FILES, {"bytes": num_bytes}):
                return work()

        return watched

    def progressed(self, kinds: Collection[str] | None = None) -> None:
        """Note that a backend reports progress: what runs is not hung. `kinds`: only these calls; None: all."""
        with self._lock:
            now_s = self._now_s()
            for call in self._running.values():
                if kinds is None or call.kind in kinds:
                    call.began_s = now_s

    def check(self) -> Seen | None:
        """Return the call that has used most of its time, None if there is none."""
        with self._lock:
            self._awake_s, self._looked_at_s = self._now_s(), self._clock()
            seen = [Seen(call.kind, self._awake_s - call.began_s, call.bound_s) for call in self._running.values()]
        return max(seen, key=lambda each: each.age_s / each.bound_s, default=None)

    def _end(self, call: Watched, took_s: float) -> None:
        """The first call of a kind may have compiled, so it tells nothing about others."""
        if call.did:
            self._ended[call.kind] += 1
            if self._ended[call.kind] > 1:
                self._measured[call.kind].add(took_s, call.did)

    def _now_s(self) -> float:
        """Return the seconds for which this process was awake."""
        return self._awake_s + min(self._clock() - self._looked_at_s, _LATE * self.check_s)

    def _bound_s(self, kind: str, sizes: Sizes) -> float:
        least_s, most_s = self._settings.least_s, max(self._settings.least_s, self._settings.most_s)
        if kind == LOADING:
            return most_s
        if kind == FILES:
            return max(most_s, sizes["bytes"] / _BYTES_PER_S)
        expected_s = self._measured[kind].expected_s(sizes)
        if expected_s is None:
            return max(least_s, self._settings.first_s)
        return min(most_s, max(least_s, self._settings.factor * expected_s))


def _power(size: float) -> int:
    return math.frexp(size)[1]
