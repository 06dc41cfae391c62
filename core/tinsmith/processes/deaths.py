"""How the process of an engine ended, judged once, and whether it is restarted.

Everything else follows from the judgement: whether the engine is restarted (`Restarts`), and whether the operations
that it was running are suspected of having killed it (the next engine is told at its start).
"""

import signal
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from tinsmith.settings import RecoverySettings, SupervisorSettings

EXIT_MISCONFIGURED: Final = 2
EXIT_STORE: Final = 3  # the store failed for too long
EXIT_SUPERSEDED: Final = 4  # another engine took the lease
EXIT_HUNG: Final = 5  # a call of the backend did not return

_FROM_OUTSIDE: Final = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
COUNTERS: Final = Path("/proc/vmstat")


class Cause(StrEnum):
    CRASH = "crash"
    """The engine failed, or an operation made it fail."""
    MISCONFIGURED = "misconfigured"
    """The engine cannot start with these settings, however often it tries."""
    INTERRUPTION = "interruption"
    """The engine was killed from outside, or the store failed."""
    SUPERSEDED = "superseded"
    """Another engine serves the base model now."""
    UNSTARTED = "unstarted"
    """This machine could not start the process. It tells nothing about the one before."""

    @property
    def is_from_outside(self) -> bool:
        """True if no operation of the engine can be the cause."""
        return self in (Cause.INTERRUPTION, Cause.SUPERSEDED, Cause.UNSTARTED)


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


def unstarted(error: Exception) -> Death:
    """Judge a process that could not be started: for want of memory, processes or files, or the program has moved."""
    return Death(Cause.UNSTARTED, "could not be started", f"{type(error).__name__}: {error}")


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
        counters = COUNTERS.read_text(encoding="ascii").split()
    except OSError:
        return None
    return int(counters[counters.index("oom_kill") + 1]) if "oom_kill" in counters else None


class Restarts:
    """Decides for one engine, over all its starts.

    Only deaths before the engine was ready count towards giving up. Later ones are charged to the operations that were
    running, which the store fails when they were charged too often.
    """

    def __init__(self, supervisor: SupervisorSettings, recovery: RecoverySettings) -> None:
        self._supervisor = supervisor
        self._recovery = recovery
        self._crashes = 0  # before the engine was ready, in a row
        self._interruptions = 0  # likewise
        self._next_delay_s = supervisor.restart_backoff_s
        self.number = 0
        self.attempt = 0
        """Restarts since the engine was last ready."""

    def delay_after_s(self, death: Death, *, was_ready: bool, in_outage: bool = False) -> float | None:
        """Return the seconds to wait before the next start, or None if the engine is given up.

        in_outage: nobody can write to the store at the moment. However long that lasts, an interruption then tells
        nothing about the engine.
        """
        if death.cause is Cause.SUPERSEDED:
            return 0.0  # the next one waits for the lease as a standby
        if was_ready:
            self._crashes, self._interruptions, self._next_delay_s = 0, 0, self._supervisor.restart_backoff_s
            self.attempt = 0
        elif not (in_outage and death.cause.is_from_outside) and self._is_one_too_many(death.cause):
            return None
        self.number += 1
        self.attempt += 1
        delay_s = self._next_delay_s
        self._next_delay_s = min(2 * delay_s, self._supervisor.restart_backoff_max_s)
        return delay_s

    def _is_one_too_many(self, cause: Cause) -> bool:
        if cause.is_from_outside:
            self._interruptions += 1
            return self._interruptions > self._recovery.max_interruptions
        self._crashes += 1
        return cause is Cause.MISCONFIGURED or self._crashes > self._supervisor.max_restarts
