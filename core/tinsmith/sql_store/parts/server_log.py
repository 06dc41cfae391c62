"""Submitting operations, and waiting for their results."""

from functools import partial

from tinsmith.failpoints import durable_boundary
from tinsmith.sql_store.parts.connections import Connections
from tinsmith.sql_store.transactions import (
    cancelling,
    counting,
    finished_samples,
    log,
    pending_work,
    submitting,
    waiting,
)
from tinsmith.store import FinishedSamples, NewOperation, OperationRecord, PendingCounts, ServerLog, Waiting


class SqlServerLog(Connections, ServerLog):
    @durable_boundary("store.submit")
    async def submit(self, operation: NewOperation) -> str:
        models = [operation.subject_id] if operation.ordered else []
        return await self._durable.write_locking(models, submitting.submit, operation)

    async def get_operation(self, request_id: str) -> OperationRecord:
        found = self._glance(log.glance, request_id)
        return await self._reader.read(log.get, request_id) if found is None else found

    async def wait_for(self, request_id: str, timeout_s: float) -> OperationRecord:
        return await self._read_until(
            lambda operation: operation.state in log.FINISHED,
            partial(self.get_operation, request_id),
            topic=log.done_topic(request_id),
            timeout_s=timeout_s,
        )

    async def finished_samples(
        self, sampling_session_id: str, clone: int, *, after: int, limit: int, timeout_s: float
    ) -> FinishedSamples:
        return await self._read_until(
            lambda found: len(found.samples) > 0,
            partial(self._reader.read, finished_samples.after, sampling_session_id, clone, cursor=after, limit=limit),
            topic=finished_samples.topic(sampling_session_id, clone),
            timeout_s=timeout_s,
        )

    async def waiting(self, request_id: str) -> Waiting:
        return await self._reader.read(waiting.waiting, request_id)

    async def count_samples(self, tenant: str) -> int:
        return (await self.pending(tenant)).by_kind.get("sample", 0)

    async def pending(self, tenant: str) -> PendingCounts:
        return await self._reader.read(pending_work.pending, tenant)

    async def is_awaited(self, model_id: str, seq_id: int) -> bool:
        return await self._reader.read(counting.is_awaited, model_id, seq_id)

    async def cancel(self, request_id: str) -> OperationRecord:
        return await self._durable.write(cancelling.cancel, request_id)
