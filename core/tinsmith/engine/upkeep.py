"""What an engine does at intervals: it fails what waits behind gaps, drops snapshots, and gives places to models."""

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Final

from tinsmith.backend import TrainerCapabilities
from tinsmith.engine.context import EngineContext
from tinsmith.engine.failures import with_retries
from tinsmith.engine.places import Places
from tinsmith.engine.snapshots import Snapshots
from tinsmith.settings import QuotaSettings
from tinsmith.steady_clock import SteadyClock
from tinsmith.store import PlaceLimits

_MIN_POLL_S: Final = 1.0
_MAX_POLL_S: Final = 60.0
_LOOK_AGAIN_S: Final = 1.0  # while a model waits: nothing tells when another has become idle
_TIDY_S: Final = 30.0
_NEVER: Final = datetime.fromtimestamp(0, UTC)


async def close_gaps(engine: EngineContext) -> None:
    """Until cancelled, fail what has waited too long behind a missing seq_id."""
    clock, timeout_s = SteadyClock(), engine.settings.server.gap_timeout_s
    while True:
        await asyncio.sleep(min(5.0, timeout_s / 4))
        now, steady_s = clock.read()
        if steady_s < timeout_s:
            continue  # nothing ran here for a while, so clients may have been unable to send what is missing
        older_than = now - timedelta(seconds=timeout_s)
        await with_retries(engine.store.fail_gaps, engine.base_model, older_than=older_than)


async def drop_snapshots(snapshots: Snapshots) -> None:
    """Until cancelled, free the snapshots that nobody may use any more, and those left idle for too long."""
    while True:
        await asyncio.sleep(_TIDY_S)
        await snapshots.drop_unused()


async def admit_models(engine: EngineContext, trainer: TrainerCapabilities, places: Places) -> None:
    """Until cancelled, admit waiting models whenever there may be a place for them on the backend.

    A model cannot get a place while no engine runs, so this one waits as long before it gives any up. Nor can a client
    use its model then, so this engine runs as long before it takes a model for idle.
    """
    clock, quotas, freed_for = SteadyClock(), engine.settings.quotas, frozenset[str]()
    poll_s = min(max(quotas.place_wait_s / 4, _MIN_POLL_S), _MAX_POLL_S)
    while True:
        now, steady_s = clock.read()
        wait_s = quotas.place_wait_s
        give_up_before = now - timedelta(seconds=wait_s) if steady_s >= wait_s else _NEVER
        limits = replace(
            _limits(engine.base_model, quotas, trainer, give_up_before),
            idle_since=_idle_since(quotas, now, steady_s),
            staying=places.staying(),
            freed_for=freed_for,
        )
        moves = await with_retries(engine.store.admit_models, engine.lease, limits)
        freed_for = await places.carry_out(moves)
        if not freed_for:
            await engine.store.wait_for_places(engine.base_model, _LOOK_AGAIN_S if moves.waiting else poll_s)


def _idle_since(quotas: QuotaSettings, now: datetime, steady_s: float) -> datetime | None:
    idle_s = quotas.place_idle_s
    return None if idle_s is None or steady_s < idle_s else now - timedelta(seconds=idle_s)


def _limits(
    base_model: str, quotas: QuotaSettings, trainer: TrainerCapabilities, give_up_before: datetime
) -> PlaceLimits:
    max_models = trainer.max_models
    full = trainer.max_full_models or None  # 0: the engine refuses such a model, which need not wait
    of_them = "" if full is None else f", {full} of them with LoRA rank 0"
    settings = "max_models" if full is None else "max_models or max_full_models"
    return PlaceLimits(
        max_models=max_models,
        max_full_models=full,
        kept=quotas.kept(max_models),
        give_up_before=give_up_before,
        failure=f"no place for a model of {base_model!r} became free within {quotas.place_wait_s:.0f} s "
        f"(quotas.place_wait_s); it holds {max_models} models{of_them}: end sessions that you no longer need, try "
        f"again later, or ask the operator to raise the backend's {settings}",
    )
