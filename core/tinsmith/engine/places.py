"""Places on the backend: an idle model gives its own to one that waits, and comes back at its next request.

A model that leaves is parked: its whole state becomes a recovery point, with weights, moments, and the gradient that
its passes have added up. The store frees the place in the transaction that registers it, if nothing has arrived
meanwhile. So whatever dies at whatever moment, a model either has its place, or goes on from that recovery point.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Final

from tinsmith.engine.context import EngineContext
from tinsmith.engine.failures import EngineFailedError, ending_the_engine, with_retries
from tinsmith.engine.models import Models
from tinsmith.engine.recovery import Recovery
from tinsmith.engine.recovery_points import RecoveryPoints
from tinsmith.engine.training import TrainingQueue
from tinsmith.errors import LeaseLostError, TinsmithError
from tinsmith.failpoints import durable_boundary
from tinsmith.figures import PLACE_SECONDS
from tinsmith.store import Parking, PlaceMoves

_log = logging.getLogger(__name__)

_TRY_AGAIN_S: Final = 60.0


@dataclass(slots=True, eq=False)
class Places:
    """Carries out what the store has decided about places. Nothing of a model runs while it moves."""

    engine: EngineContext
    queue: TrainingQueue
    models: Models
    recovery_points: RecoveryPoints
    recovery: Recovery
    on_moved: Callable[[], None]  # called when operations of a model that has moved may start
    failed_s: dict[str, float] = field(default_factory=dict)  # when a model's state could not be written, by model_id

    def staying(self) -> frozenset[str]:
        """Return the models that need not be tried now: the disk had no room for them a moment ago."""
        recently_s = time.monotonic() - _TRY_AGAIN_S
        self.failed_s = {name: at_s for name, at_s in self.failed_s.items() if at_s > recently_s}
        return frozenset(self.failed_s)

    async def carry_out(self, moves: PlaceMoves) -> frozenset[str]:
        """Return the models for which a place has become free.

        If this is cancelled, the engine still finishes the move that has begun: it uses backend and disk.
        """
        for model_id in moves.come_back:
            await self._move(model_id, "brought_back", self._bring_back(model_id))
        parked = [each for each in moves.park if await self._move(each.model_id, "parked", self._park(each))]
        return frozenset(each.for_model_id for each in parked)

    async def _move(self, model_id: str, move: str, work: Coroutine[None, None, bool]) -> bool:
        """Return whether the model has moved."""
        if self.engine.stopping.is_set() or not self.queue.hold(model_id):
            work.close()
            return False
        started = time.monotonic()
        moving = self.engine.tasks.create_task(work, name=f"{model_id} is {move}")
        moving.add_done_callback(lambda _: self._end(model_id))
        await asyncio.wait([moving])
        moved = moving.result()
        if moved:
            self.engine.figures.observe(PLACE_SECONDS, time.monotonic() - started, move)
        return moved

    def _end(self, model_id: str) -> None:
        self.queue.end(model_id)
        self.on_moved()

    @durable_boundary("places.park")
    async def _park(self, parking: Parking) -> bool:
        """Something may have arrived for the model since the store has found it idle: it keeps its place then."""
        model_id, engine = parking.model_id, self.engine
        with ending_the_engine(engine.base_model, "while it parked a model"):
            try:
                point = await self.recovery_points.for_parking(model_id, parking.tenant, parking.seq_id)
            except (LeaseLostError, EngineFailedError):
                raise
            except TinsmithError as error:
                _log.warning("idle model %s keeps its place, because its state cannot be written: %s", model_id, error)
                self.failed_s[model_id] = time.monotonic()
                return False
            keep = engine.settings.recovery.keep_points
            if point is None or not await with_retries(engine.store.park_model, engine.lease, point, keep=keep):
                return False
            await self.models.unload(model_id)
            await self.recovery_points.parked(model_id)
        _log.info("parked %s, which was idle", model_id)
        return True

    @durable_boundary("places.bring_back")
    async def _bring_back(self, model_id: str) -> bool:
        return await self.recovery.bring_back(model_id)
