"""How the process of an engine ended, judged once.

Everything else follows from the judgement: whether the engine is restarted (`restarts.py`), and whether the operations
that it was running are suspected of having killed it (the next engine is told at its start).
"""

import signal
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

EXIT_MISCONFIGURED: Final = 2
EXIT_STORE: Final = 3  # the store failed for too long
EXIT_SUPERSEDED: Final = 4  # another engine took the lease
EXIT_HUNG: Final = 5  # a call of the backend did not return

_FROM_OUTSIDE: Final = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
_COUNTERS: Final = Path("/proc/vmstat")


class Cause(StrEnum):
    CRASH = "crash"
    """The engine failed, or an operation made it fail."""
    MISCONFIGURED = "misconfigured"
    """The engine cannot start with these settings, however often it tries."""
    INTERRUPTION = "interruption"
    """The engine was killed from outside, or the store failed."""
    SUPERSEDED = "superseded"
    """Another engine serves the base model now."""

    @property
    def is_from_outside(self) -> bool:
        """Whether nothing that the engine was running can be at fault."""
        return self in (Cause.INTERRUPTION, Cause.SUPERSEDED)


_EXITS: Final = {
    EXIT_MISCONFIGURED: Cause.MISCONFIGURED,
    EXIT_STORE: Cause.INTERRUPTION,
    EXIT_SUPERSEDED: Cause.SUPERSEDED,
}


@dataclass(frozen=True, slots=True)
class Death:
    cause: Cause
    how: str  # "was killed by signal SIGKILL"; tenants may read it
    last_words: str = ""  # the last line that it printed, for the operator alone


class Witness:
    """Made before a process starts, it judges how the process ended."""

    def __init__(self) -> None:
        self._memory_kills = _memory_kills()

    def judge(self, code: int, last_line: str = "") -> Death:
        """Judge by the exit code, or by minus the number of the signal that ended the process.

        A SIGKILL counts as a crash if the kernel has killed a process for want of memory meanwhile: as likely as not it
        was this one, because of the operation that it was running.
        """
        if code == EXIT_HUNG:
            return Death(Cause.CRASH, "ended itself, because a call of its backend did not return", last_line)
        if code >= 0:
            return Death(_EXITS.get(code, Cause.CRASH), f"ended with exit code {code}", last_line)
        how = f"was killed by signal {_signal_name(-code)}"
        if -code == signal.SIGKILL and _memory_kills() != self._memory_kills:
            return Death(Cause.CRASH, f"{how}, while this machine was out of memory")
        return Death(Cause.INTERRUPTION if -code in _FROM_OUTSIDE else Cause.CRASH, how)


def is_stopped(pid: int) -> bool:
    """Return whether a process was stopped from outside, as by SIGSTOP. False if the system does not tell."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state in {"T", "t"}


def _signal_name(number: int) -> str:
    names = {each.value: each.name for each in signal.Signals}  # real-time signals have none
    return names.get(number, str(number))


def _memory_kills() -> int | None:
    """Return how many processes the kernel has killed for want of memory, or None if it does not tell."""
    try:
        counters = _COUNTERS.read_text(encoding="ascii").split()
    except OSError:
        return None
    return int(counters[counters.index("oom_kill") + 1]) if "oom_kill" in counters else None
