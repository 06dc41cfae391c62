"""Leases."""

import asyncio
from contextlib import suppress

from tinsmith.failpoints import durable_boundary
from tinsmith.sql_store.parts.connections import Connections
from tinsmith.sql_store.transactions import leases
from tinsmith.store import Lease, LeaseHeld, Leases


class SqlLeases(Connections, Leases):
    @durable_boundary("store.acquire_lease")
    async def acquire_lease(
        self, base_model: str, *, engine_id: str, duration_s: float, dead: str | None = None
    ) -> Lease | LeaseHeld:
        return await self._durable.write(leases.acquire, base_model, engine_id, duration_s, dead)

    async def renew_lease(self, lease: Lease) -> None:
        await self._relaxed.write(leases.renew, lease)

    async def release_lease(self, base_model: str, engine_id: str) -> None:
        await self._durable.write(leases.release, base_model, engine_id)

    async def wait_for_lease(self, base_model: str, timeout_s: float) -> None:
        with self._wakeups.subscribe(leases.topic(base_model)) as told, suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await told.wait()
