"""Claiming operations, and recording their results."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Concatenate, ParamSpec, TypeVar

from tinsmith.failpoints import durable_boundary
from tinsmith.sql_store.grouping import Models
from tinsmith.sql_store.parts.connections import Connections
from tinsmith.sql_store.parts.failing import fail_in_parts
from tinsmith.sql_store.transactions import cancelling, claiming, completing, gaps, log, windows
from tinsmith.sql_store.transactions.writer import Transaction
from tinsmith.store import Claim, ClaimRoom, Completion, EngineLog, FailedPass, Lease, OperationRecord

P = ParamSpec("P")
T = TypeVar("T")


class SqlEngineLog(Connections, EngineLog):
    async def claim(
        self, lease: Lease, *, max_operations: int, ordered: bool | None = None, alone: bool = False
    ) -> list[OperationRecord]:
        self._subscribed(log.work_topic(lease.base_model))
        if max_operations <= 0:
            return []
        if alone:
            return await self._claim_suspects(lease, max_operations)
        return (await self._claim(lease, claiming.in_turns(max_operations, ordered=ordered))).records

    async def claim_shares(self, lease: Lease, *, training: ClaimRoom, samples: ClaimRoom) -> Claim:
        self._subscribed(log.work_topic(lease.base_model))
        return await self._claim(lease, claiming.by_shares(training, samples))

    async def _claim(self, lease: Lease, choice: claiming.Choice) -> Claim:
        models = partial(claiming.models_to_claim, base_model=lease.base_model, choice=choice)
        return await self._write_claim(models, claiming.claim, lease, choice)

    async def _claim_suspects(self, lease: Lease, max_operations: int) -> list[OperationRecord]:
        if not await self._reader.read(claiming.any_alone, lease.base_model):
            return []
        models = partial(claiming.suspects_to_claim, base_model=lease.base_model, max_operations=max_operations)
        return await self._write_claim(models, claiming.claim_suspects, lease, max_operations)

    @durable_boundary("store.claim")
    async def _write_claim(
        self,
        models: Models,
        claim: Callable[Concatenate[Transaction, P], T],
        *args: P.args,
        **options: P.kwargs,
    ) -> T:
        return await self._relaxed.write_locking(models, claim, *args, **options)

    @durable_boundary("store.complete")
    async def complete(self, lease: Lease, completions: Sequence[Completion]) -> None:
        if completions:
            models = partial(completing.models_of, completions=completions)
            await self._durable.write_locking(models, completing.complete, lease, completions)

    async def failed_pass(self, model_id: str, *, after_seq_id: int | None, before_seq_id: int) -> FailedPass | None:
        return await self._reader.read(
            windows.failed_pass, model_id, after_seq_id=after_seq_id, before_seq_id=before_seq_id
        )

    async def cancelled(self, lease: Lease) -> list[str]:
        if not await self._reader.read(cancelling.any_untold, lease.base_model):
            return []
        return await self._relaxed.write(cancelling.tell, lease)

    async def fail_gaps(self, base_model: str, *, older_than: datetime) -> int:
        failed = 0
        for model_id in await self._reader.read(gaps.waiting_since, base_model, older_than):
            failed += await fail_in_parts(self._durable, model_id, older_than)
        return failed

    async def wait_for_work(self, base_model: str, timeout_s: float) -> None:
        event = self._subscribed(log.work_topic(base_model))
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):  # before Python 3.12, wait_for may swallow a cancellation
                await event.wait()
        event.clear()
