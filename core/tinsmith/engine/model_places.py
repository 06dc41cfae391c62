"""Gives the places on the backend to models that wait for one."""

from datetime import UTC, datetime, timedelta
from typing import Final

from tinsmith.backend import TrainerCapabilities
from tinsmith.engine.context import EngineContext
from tinsmith.engine.failures import with_retries
from tinsmith.steady_clock import SteadyClock
from tinsmith.store import PlaceLimits

_MIN_LOOK_S: Final = 1.0
_MAX_LOOK_S: Final = 60.0
_NEVER: Final = datetime.fromtimestamp(0, UTC)


class Places:
    def __init__(self, engine: EngineContext, trainer: TrainerCapabilities) -> None:
        self._store = engine.store
        self._lease = engine.lease
        self._trainer = trainer
        self._settings = engine.options.quotas

    async def watch(self) -> None:
        """Until cancelled, admit models whenever there may be a place for them."""
        look_s = min(max(self._settings.place_wait_s / 4, _MIN_LOOK_S), _MAX_LOOK_S)
        clock = SteadyClock()
        while True:
            await with_retries(self._store.admit_models, self._lease, self._limits(*clock.read()))
            await self._store.wait_for_places(self._lease.base_model, look_s)

    def _limits(self, now: datetime, steady_s: float) -> PlaceLimits:
        """A model cannot get a place while no engine runs, so this one waits as long before it gives any up."""
        wait_s, max_models = self._settings.place_wait_s, self._trainer.max_models
        full = self._trainer.max_full_models or None  # 0: the engine refuses such a model, which need not wait
        of_them = "" if full is None else f", {full} of them with LoRA rank 0"
        settings = "max_models" if full is None else "max_models or max_full_models"
        return PlaceLimits(
            max_models=max_models,
            max_full_models=full,
            kept=self._settings.kept(max_models),
            give_up_before=now - timedelta(seconds=wait_s) if steady_s >= wait_s else _NEVER,
            failure=f"no place for a model of {self._lease.base_model!r} became free within {wait_s:.0f} s "
            f"(quotas.place_wait_s); it holds {max_models} models{of_them}: end sessions that you no longer need, try "
            f"again later, or ask the operator to raise the backend's {settings}",
        )
