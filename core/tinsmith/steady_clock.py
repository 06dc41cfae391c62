"""The wall clock, with a watch on it: one that jumps must not end what is by its time alone."""

import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

_TOLERANCE_S: Final = 10.0  # between two looks; slewing and a busy machine are no jumps

_log = logging.getLogger(__name__)


def _now() -> datetime:
    return datetime.now(UTC)


class SteadyClock:
    """Says the time, and for how long it has run at the pace of the monotonic clock."""

    def __init__(self, now: Callable[[], datetime] = _now, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._monotonic = monotonic
        self._seen = now(), monotonic()
        self._steady_since = monotonic()
        self._jumped = False

    def read(self) -> tuple[datetime, float]:
        """Return the time, and the seconds since this clock was made or since a look that found it to have jumped."""
        now, at_s = self._now(), self._monotonic()
        before, before_s = self._seen
        jump_s = (now - before).total_seconds() - (at_s - before_s)
        if abs(jump_s) > _TOLERANCE_S:
            _log.warning("the clock jumped by %+.0f s: what ends by it waits until it has been steady", jump_s)
            self._steady_since, self._jumped = at_s, True
        self._seen = now, at_s
        return now, at_s - self._steady_since

    @property
    def jumped(self) -> bool:
        """Whether a look has ever found that it jumped."""
        return self._jumped
