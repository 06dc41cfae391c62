"""Whether and when an engine that has died is started again."""

from typing import Final

from tinsmith.processes.deaths import Cause, Death
from tinsmith.settings import RecoverySettings, SupervisorSettings

_LONGEST_DELAY_S: Final = 60.0


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
        self._next_delay_s = min(2 * delay_s, _LONGEST_DELAY_S)
        return delay_s

    def _is_one_too_many(self, cause: Cause) -> bool:
        if cause.is_from_outside:
            self._interruptions += 1
            return self._interruptions > self._recovery.max_interruptions
        self._crashes += 1
        return cause is Cause.MISCONFIGURED or self._crashes > self._supervisor.max_restarts
