"""Places for models on a backend."""

import asyncio
from contextlib import suppress
from functools import partial

from tinsmith.failpoints import durable_boundary
from tinsmith.sql_store.parts.connections import Connections
from tinsmith.sql_store.transactions import log, model_places
from tinsmith.store import Lease, ModelPlaces, PlaceLimits


class SqlModelPlaces(Connections, ModelPlaces):
    holds_models = True

    @durable_boundary("store.admit_models")
    async def admit_models(self, lease: Lease, limits: PlaceLimits) -> None:
        waiting = partial(model_places.waiting_models, base_model=lease.base_model)
        if await self._reader.read(waiting):
            overdue = await self._durable.write_locking(waiting, model_places.admit, lease, limits)
            for model_id in overdue:  # one at a time, because each may have thousands of operations
                await self._durable.write_locking([model_id], model_places.give_up, lease, model_id, limits.failure)

    async def wait_for_places(self, base_model: str, timeout_s: float) -> None:
        event = self._subscribed(log.places_topic(base_model))
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await event.wait()
        event.clear()
