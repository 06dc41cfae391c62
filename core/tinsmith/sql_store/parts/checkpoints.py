"""What is known of checkpoints."""

from collections.abc import Callable, Collection
from datetime import datetime

from tinsmith.failpoints import durable_boundary
from tinsmith.sql_store.parts.connections import Connections
from tinsmith.sql_store.transactions import checkpoints, counting
from tinsmith.store import CheckpointRecord, Checkpoints, KeptCheckpoints
from tinsmith.store.metadata import refuse_large_metadata


class SqlCheckpoints(Connections, Checkpoints):
    async def get_checkpoint(self, path: str) -> CheckpointRecord:
        return await self._reader.read(checkpoints.get, path)

    async def list_checkpoints(
        self, tenant: str | None, *, model_id: str | None = None, limit: int | None = None, offset: int = 0
    ) -> tuple[list[CheckpointRecord], int]:
        return await self._reader.read(checkpoints.list_all, tenant, model_id=model_id, limit=limit, offset=offset)

    async def newest_checkpoints(self, model_ids: Collection[str]) -> list[CheckpointRecord]:
        return await self._reader.read(checkpoints.newest, model_ids)

    async def recorded_directories(self, paths: Collection[str]) -> set[str]:
        return await self._reader.read(checkpoints.directories, paths)

    async def kept_checkpoints(self, tenant: str) -> KeptCheckpoints:
        return await self._reader.read(counting.kept_checkpoints, tenant)

    async def add_checkpoint(self, record: CheckpointRecord) -> None:
        refuse_large_metadata(record.user_metadata)
        await self._durable.write(checkpoints.add, record)

    async def update_checkpoint(
        self, path: str, change: Callable[[CheckpointRecord], CheckpointRecord]
    ) -> CheckpointRecord:
        return await self._durable.write(checkpoints.update, path, change)

    async def delete_checkpoint(self, path: str) -> CheckpointRecord:
        return await self._delete(checkpoints.delete, path)

    async def delete_version(self, read: CheckpointRecord) -> CheckpointRecord:
        return await self._delete(checkpoints.delete_version, read)

    @durable_boundary("store.delete_checkpoint")
    async def _delete(self, delete: Callable[..., CheckpointRecord], what: str | CheckpointRecord) -> CheckpointRecord:
        return await self._durable.write(delete, what)

    async def deleted_checkpoint(self, path: str) -> CheckpointRecord:
        return await self._reader.read(checkpoints.deleted, path)

    async def expired_checkpoints(self, now: datetime) -> list[CheckpointRecord]:
        return await self._reader.read(checkpoints.expired, now)
