"""Claiming operations, and recording their results."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial

from tinsmith.failpoints import durable_boundary
from tinsmith.sql_store.grouping import Models
from tinsmith.sql_store.parts.connections import Connections
from tinsmith.sql_store.transactions import cancelling, claiming, completing, gaps, log
from tinsmith.store import Completion, EngineLog, Lease, OperationRecord


class SqlEngineLog(Connections, EngineLog):
    @durable_boundary("store.claim")
    async def claim(
        self, lease: Lease, *, max_operations: int, ordered: bool | None = None, alone: bool = False
    ) -> list[OperationRecord]:
        self._subscribed(log.work_topic(lease.base_model))
        if max_operations <= 0 or not await self._reader.read(claiming.any_queued, lease.base_model, ordered=ordered):
            return []
        models: Models = [] if ordered is False else partial(claiming.models_to_claim, base_model=lease.base_model)
        return await self._relaxed.write_locking(
            models, claiming.claim, lease, max_operations=max_operations, ordered=ordered, alone=alone
        )

    @durable_boundary("store.complete")
    async def complete(self, lease: Lease, completions: Sequence[Completion]) -> None:
        if completions:
            models = partial(completing.models_of, completions=completions)
            await self._durable.write_locking(models, completing.complete, lease, completions)

    async def cancelled(self, lease: Lease) -> list[str]:
        if not await self._reader.read(cancelling.any_untold, lease.base_model):
            return []
        return await self._relaxed.write(cancelling.tell, lease)

    async def fail_gaps(self, base_model: str, *, older_than: datetime) -> int:
        if not await self._reader.read(gaps.any_waiting_since, base_model, older_than):
            return 0
        return await self._durable.write(gaps.fail_old, base_model, older_than)

    async def wait_for_work(self, base_model: str, timeout_s: float) -> None:
        event = self._subscribed(log.work_topic(base_model))
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):  # before Python 3.12, wait_for may swallow a cancellation
                await event.wait()
        event.clear()
