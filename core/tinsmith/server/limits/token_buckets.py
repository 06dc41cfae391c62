"""Limits rates with a bucket of tokens for each tenant. It refills continuously, and each request takes a token.

A full bucket has the tokens of five seconds, and at least one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

_FULL_S: Final = 5.0
_TIDY_EVERY: Final = 1000  # buckets, after which full ones are dropped


@dataclass(slots=True)
class _Bucket:
    tokens: float
    at_s: float


class TokenBuckets:
    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns seconds that never go back."""
        self._clock = clock
        self._buckets: dict[str, _Bucket] = {}
        self._tidy_at = _TIDY_EVERY

    def take(self, tenant: str, *, per_s: float) -> float:
        """Take a token and return 0, or return the seconds until there is one."""
        bucket = self._filled(tenant, per_s)
        if bucket.tokens < 1:
            return (1 - bucket.tokens) / per_s
        bucket.tokens -= 1
        return 0.0

    def wait(self, tenant: str, *, per_s: float) -> float:
        """Return the seconds until there is a token, 0 if there is one."""
        bucket = self._filled(tenant, per_s)
        return max(0.0, 1 - bucket.tokens) / per_s

    def _filled(self, tenant: str, per_s: float) -> _Bucket:
        now, full = self._clock(), max(1.0, _FULL_S * per_s)
        bucket = self._buckets.get(tenant)
        if bucket is None:
            self._tidy(now, full / per_s)
            bucket = self._buckets[tenant] = _Bucket(full, now)
        bucket.tokens = min(full, bucket.tokens + (now - bucket.at_s) * per_s)
        bucket.at_s = now
        return bucket

    def _tidy(self, now: float, fills_in_s: float) -> None:
        """Drop full buckets, because any key that somebody tries gets one."""
        if len(self._buckets) >= self._tidy_at:
            full_since = now - fills_in_s
            self._buckets = {tenant: each for tenant, each in self._buckets.items() if each.at_s > full_since}
            self._tidy_at = len(self._buckets) + _TIDY_EVERY
