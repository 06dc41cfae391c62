"""Gives the places on the backend to models that wait for one."""

from datetime import UTC, datetime, timedelta
from typing import Final

from tinsmith.engine.store_retries import with_retries
from tinsmith.settings import QuotaSettings
from tinsmith.steady_clock import SteadyClock
from tinsmith.store import Lease, PlaceLimits, RequestStore

_MIN_LOOK_S: Final = 1.0
_MAX_LOOK_S: Final = 60.0
_NEVER: Final = datetime.fromtimestamp(0, UTC)


class Places:
    def __init__(self, store: RequestStore, lease: Lease, *, max_models: int, settings: QuotaSettings) -> None:
        self._store = store
        self._lease = lease
        self._max_models = max_models
        self._settings = settings

    async def watch(self) -> None:
        """Until cancelled, admit models whenever there may be a place for them."""
        look_s = min(max(self._settings.place_wait_s / 4, _MIN_LOOK_S), _MAX_LOOK_S)
        clock = SteadyClock()
        while True:
            await with_retries(self._store.admit_models, self._lease, self._limits(*clock.read()))
            await self._store.wait_for_places(self._lease.base_model, look_s)

    def _limits(self, now: datetime, steady_s: float) -> PlaceLimits:
        """A model cannot get a place while no engine runs, so this one waits as long before it gives any up."""
        wait_s = self._settings.place_wait_s
        return PlaceLimits(
            max_models=self._max_models,
            kept=self._settings.kept(self._max_models),
            give_up_before=now - timedelta(seconds=wait_s) if steady_s >= wait_s else _NEVER,
            failure=f"no place for a model of {self._lease.base_model!r} became free within {wait_s:.0f} s "
            f"(quotas.place_wait_s); it holds {self._max_models} models: end sessions that you no longer need, try "
            "again later, or have the operator raise the backend's max_models",
        )
