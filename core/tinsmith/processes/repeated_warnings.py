"""Keeps what any client can cause, such as a malformed request, from flooding the log."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

EVERY_S: Final = 60.0


@dataclass(slots=True)
class _Shown:
    at_s: float
    left_out: int = 0


class RepeatedWarnings(logging.Filter):
    """For a logger: lets each kind of warning pass once a minute, and tells how many were left out since."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._shown: dict[str, _Shown] = {}  # by the message before its arguments are filled in

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING:
            return True
        kind, now = str(record.msg), self._clock()
        before = self._shown.get(kind)
        if before is not None and now - before.at_s < EVERY_S:
            before.left_out += 1
            return False
        if before is not None and before.left_out > 0:
            record.msg = f"{kind} ({before.left_out} more since the last such line)"
        self._shown[kind] = _Shown(now)
        return True
