"""How a vLLM process ended, and which conclusion that allows about its samples."""

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_FROM_OUTSIDE: Final = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
_COUNTERS: Final = Path("/proc/vmstat")


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    how: str  # tenants may read it
    last_words: str = ""  # the end of its log, for the operator alone
    was_ready: bool = True  # otherwise no sample had reached it
    from_outside: bool = False  # so no sample is suspected of it
    hopeless: bool = False  # with this configuration, so trying again would not help

    def __str__(self) -> str:
        return f"{self.how}: {self.last_words}" if self.last_words else self.how


class Witness:
    """Made before a process starts, it judges whether the process was ended from outside."""

    def __init__(self) -> None:
        self._memory_kills = _memory_kills()

    def is_from_outside(self, code: int) -> bool:
        """Judge by the exit code. A SIGKILL for want of memory may well be due to a sample."""
        return -code in _FROM_OUTSIDE and not (-code == signal.SIGKILL and _memory_kills() != self._memory_kills)


def _memory_kills() -> str:
    """Return how many processes the kernel has killed for want of memory, if it tells."""
    try:
        lines = _COUNTERS.read_text(encoding="ascii").splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith("oom_kill ")), "")
