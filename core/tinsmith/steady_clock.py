"""A wall clock that notices its own jumps, so that nothing expires only because the clock was set."""

import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

_TOLERANCE_S: Final = 10.0  # between two readings; more than slewing or a busy machine explain

_log = logging.getLogger(__name__)


def _now() -> datetime:
    return datetime.now(UTC)


class SteadyClock:
    """Tells the time, and for how long it has kept pace with the monotonic clock."""

    def __init__(self, now: Callable[[], datetime] = _now, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._monotonic = monotonic
        self._seen = now(), monotonic()
        self._steady_since = monotonic()
        self._jumped = False

    def read(self) -> tuple[datetime, float]:
        """Return the time, and the seconds since the clock was created or since a reading that found a jump."""
        now, at_s = self._now(), self._monotonic()
        before, before_s = self._seen
        jump_s = (now - before).total_seconds() - (at_s - before_s)
        if abs(jump_s) > _TOLERANCE_S:
            _log.warning("the clock jumped by %+.0f s; nothing expires until it has been steady for a while", jump_s)
            self._steady_since, self._jumped = at_s, True
        self._seen = now, at_s
        return now, at_s - self._steady_since

    @property
    def jumped(self) -> bool:
        """Whether any reading has found a jump."""
        return self._jumped
