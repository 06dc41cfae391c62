"""The counters of limits: rates by `TokenBuckets`, and a tenant's holdings by `Tallies`."""

from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from tinsmith.server.kept import Reading

_FULL_S: Final = 5.0
_ROUNDING_S: Final = 1e-6
_TIDY_EVERY: Final = 1000  # names, after which those that say nothing any more are dropped


class TokenBuckets:
    """Limits rates with a bucket of tokens for each name. It refills continuously, and each request takes a token.

    A full bucket has the tokens of five seconds, and at least one.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns seconds that never go back."""
        self._clock = clock
        self._full_at_s: dict[str, float] = {}
        self._tidy_at = _TIDY_EVERY

    def __len__(self) -> int:
        return len(self._full_at_s)

    def take(self, name: str, *, per_s: float) -> float:
        """Take a token and return 0, or return the seconds until there is one."""
        wait_s = self.wait(name, per_s=per_s)
        if wait_s == 0:
            self._tidy()
            self._full_at_s[name] = max(self._clock(), self._full_at_s.get(name, 0.0)) + 1 / per_s
        return wait_s

    def wait(self, name: str, *, per_s: float) -> float:
        """Return the seconds until there is a token, 0 if there is one."""
        missing_s = self._full_at_s.get(name, 0.0) - self._clock()
        wait_s = missing_s + 1 / per_s - max(1 / per_s, _FULL_S)
        return wait_s if wait_s > _ROUNDING_S else 0.0

    def _tidy(self) -> None:
        """Drop full buckets, because any key that somebody tries gets one."""
        if len(self._full_at_s) >= self._tidy_at:
            now = self._clock()
            self._full_at_s = {name: at_s for name, at_s in self._full_at_s.items() if at_s > now}
            self._tidy_at = len(self._full_at_s) + _TIDY_EVERY


class Tallies:
    """Counts of each tenant's objects, by setting: read from the store once a second, and added to in between.

    They are without what other servers have accepted since they were read.
    """

    def __init__(self, read: Callable[[str], Awaitable[Counter[str]]], clock: Callable[[], float]) -> None:
        self._read = read
        self._clock = clock
        self._readings: dict[str, Reading[Counter[str]]] = {}
        self._tidy_at = _TIDY_EVERY

    def __len__(self) -> int:
        return len(self._readings)

    async def of(self, tenant: str) -> Counter[str]:
        """Return the tally, to which the caller adds what it accepts."""
        reading = self._readings.get(tenant)
        if reading is None:
            self._tidy()
            reading = self._readings[tenant] = Reading(partial(self._read, tenant), clock=self._clock)
        return await reading.get()

    def forget(self, tenant: str) -> None:
        """Read the tally of this tenant again when it is needed."""
        self._readings.pop(tenant, None)

    def _tidy(self) -> None:
        if len(self._readings) >= self._tidy_at:
            self._readings = {tenant: each for tenant, each in self._readings.items() if not each.is_old}
            self._tidy_at = len(self._readings) + _TIDY_EVERY
