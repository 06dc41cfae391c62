"""A client that never stops sending heartbeats, a store that fails for longer than the time-out, and housekeeping."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from interleaving import Choice, pause, run

from tinsmith.errors import StoreError
from tinsmith.processes.housekeeping import Housekeeping
from tinsmith.server.hearing import Hearing
from tinsmith.settings import ServerSettings
from tinsmith.steady_clock import SteadyClock
from tinsmith.store import RequestStore, SessionRecord

TIMEOUT_S = 60
_EVERY_S = 20.0
_BEFORE, _DURING = 3, 4  # heartbeats
_ROUNDS = 4


class SilentWorld:
    """The time goes on with each heartbeat."""

    def __init__(self, store: RequestStore, run_id: int, *, hears: bool = True) -> None:
        """`hears` False plants the fault: housekeeping takes any silence for the client's."""
        self._store = store
        self._session_id = f"silent{run_id}"
        self._down = False
        self._seconds = 0.0
        self._begun = datetime.now(UTC)
        self._hearing = Hearing(unnoticed_s=2 * _EVERY_S, monotonic=lambda: self._seconds)
        settings = ServerSettings(session_timeout_s=TIMEOUT_S, result_retention_s=1e6)
        clock = SteadyClock(self._now, lambda: self._seconds)
        hearing = self._hearing if hears else None
        self._housekeeping = Housekeeping(settings, self, Path("/nonexistent"), clock=clock, hearing=hearing)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        """Return a method of the store, which fails while the disk is full."""

        async def fragile(*args: Any, **options: Any) -> Any:
            if self._down:
                msg = "the disk is full"
                raise StoreError(msg)
            return await getattr(self._store, name)(*args, **options)

        return fragile

    def _now(self) -> datetime:
        return self._begun + timedelta(seconds=self._seconds)

    async def run(self, choices: Sequence[int]) -> tuple[list[Choice], list[str]]:
        """Return the order of the steps, and what was wrong at its end."""
        session = SessionRecord(
            session_id=self._session_id, tenant="ann", created_at=self._begun, last_seen_at=self._begun
        )
        await self._store.create_session(session, idempotency_key=None)
        sessions = {"client": self._client, "housekeeping": self._rounds}
        made = await run(sessions, choices, skipped=frozenset())
        ended = (await self._store.get_session(self._session_id)).ended
        await self._store.end_session(self._session_id, "success", None)
        return made, [] if ended is None else [f"the session of a client that never stopped has {ended}"]

    async def _client(self) -> None:
        for number in range(_BEFORE + _DURING + 1):
            await pause("the disk is full" if number == _BEFORE else "heartbeat")
            self._down = _BEFORE <= number < _BEFORE + _DURING
            self._seconds += _EVERY_S
            if number == _BEFORE + _DURING:
                await pause("heartbeat, now that there is room")
            with suppress(StoreError), self._hearing.recording():
                await self.hear_session(self._session_id, self._now(), server_id="server")

    async def _rounds(self) -> None:
        for _ in range(_ROUNDS):
            await pause("round")
            try:
                await self._housekeeping.round()
            except StoreError as error:
                self._hearing.failed(error)
