"""Recovery: requeueing, rebuilding models, recovery points."""

from collections.abc import Collection

from tinsmith.failpoints import durable_boundary
from tinsmith.sql_store.parts.connections import Connections
from tinsmith.sql_store.transactions import lost_models, rebuilding, recovery_points, requeueing
from tinsmith.store import Lease, LiveModel, OperationRecord, Recovery, RecoveryPointRecord


class SqlRecovery(Connections, Recovery):
    @durable_boundary("store.requeue")
    async def requeue(
        self,
        lease: Lease,
        *,
        max_attempts: int,
        reason: str | None,
        max_interruptions: int | None = None,
        held: Collection[str] = (),
    ) -> list[str]:
        return await self._durable.write(
            requeueing.requeue,
            lease,
            max_attempts=max_attempts,
            reason=reason,
            max_interruptions=max_interruptions,
            held=frozenset(held),
        )

    async def live_models(self, base_model: str) -> list[LiveModel]:
        return await self._reader.read(rebuilding.live_models, base_model)

    async def begin_rebuild(self, lease: Lease, model_id: str, *, interrupted: bool) -> int:
        return await self._relaxed.write(rebuilding.begin, lease, model_id, interrupted=interrupted)

    async def end_rebuild(self, lease: Lease, model_id: str) -> None:
        await self._relaxed.write(rebuilding.end, lease, model_id)

    async def replayable(self, model_id: str, *, after_seq_id: int, limit: int) -> list[OperationRecord]:
        return await self._reader.read(rebuilding.replayable, model_id, after_seq_id=after_seq_id, limit=limit)

    @durable_boundary("store.add_recovery_point")
    async def add_recovery_point(self, lease: Lease, record: RecoveryPointRecord, *, keep: int) -> None:
        await self._durable.write(recovery_points.add, lease, record, keep=keep)

    async def list_recovery_points(self, model_id: str) -> list[RecoveryPointRecord]:
        return await self._reader.read(recovery_points.list_of, model_id)

    async def drop_recovery_point(self, lease: Lease, model_id: str, seq_id: int) -> None:
        await self._durable.write(recovery_points.drop, lease, model_id, seq_id)

    async def lose_run(self, lease: Lease, model_id: str, reason: str) -> None:
        await self._durable.write(lost_models.lose, lease, model_id, reason)

    async def note_run(self, lease: Lease, model_id: str, note: str) -> None:
        await self._durable.write(lost_models.note, lease, model_id, note)
