"""One line of the log for each refusal, at most twenty a minute of one tenant.

No line has a text or a token of a tenant, so none has the message: it may quote them.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tinsmith.log_fields import about

_EVERY_S: Final = 60.0
_MOST: Final = 20  # lines in that time
_NOBODY: Final = "nobody known"

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Told:
    since_s: float
    lines: int = 0
    left_out: int = 0


class RefusalLog:
    """Senders without a valid key count as one tenant."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told: dict[str | None, _Told] = {}

    def tell(self, what: str, why: str, tenant: str | None, *, run: str | None = None) -> bool:
        """Log that a request was refused. `what` names it without its content, `why` the kind of the error.

        Return whether it is one of those with a line of their own.
        """
        told, now_s = self._told.get(tenant), self._clock()
        if told is None or now_s - told.since_s >= _EVERY_S:
            if told is not None and told.left_out:
                _log.info("%d more refusals of %s are not listed", told.left_out, tenant or _NOBODY)
            told = self._told[tenant] = _Told(now_s)
        if told.lines == _MOST:
            told.left_out += 1
            return False
        told.lines += 1
        _log.info("refused %s of %s: %s", what, tenant or _NOBODY, why, extra=about(tenant=tenant, run=run))
        return True
