"""SqlStore: the request store over SQLAlchemy. Writes go through the group commit, reads through a few connections."""

from datetime import datetime
from functools import partial
from typing import Final

from tinsmith.failpoints import durable_boundary
from tinsmith.sql_store.parts.checkpoints import SqlCheckpoints
from tinsmith.sql_store.parts.engine_log import SqlEngineLog
from tinsmith.sql_store.parts.engine_states import SqlEngineStates
from tinsmith.sql_store.parts.leases import SqlLeases
from tinsmith.sql_store.parts.log_inspection import SqlLogInspection
from tinsmith.sql_store.parts.model_places import SqlModelPlaces
from tinsmith.sql_store.parts.recovery import SqlRecovery
from tinsmith.sql_store.parts.routed_experts import SqlRoutedExperts
from tinsmith.sql_store.parts.runs import SqlRuns
from tinsmith.sql_store.parts.sampling_sessions import SqlSamplingSessions
from tinsmith.sql_store.parts.server_log import SqlServerLog
from tinsmith.sql_store.parts.sessions import SqlSessions
from tinsmith.sql_store.parts.usage import SqlUsageLog
from tinsmith.sql_store.transactions import pruning, routed_experts, shared_secrets, write_checks
from tinsmith.store import RequestStore

_PART: Final = 500  # operations that one transaction deletes


class SqlStore(
    SqlSessions,
    SqlRuns,
    SqlSamplingSessions,
    SqlCheckpoints,
    SqlServerLog,
    SqlEngineLog,
    SqlModelPlaces,
    SqlLogInspection,
    SqlLeases,
    SqlRecovery,
    SqlEngineStates,
    SqlUsageLog,
    SqlRoutedExperts,
    RequestStore,
):
    """Creating it does no I/O. It raises ConfigError for a URL that cannot be used."""

    @property
    def max_value_bytes(self) -> int:
        return self._max_value_bytes

    async def secret(self, name: str) -> bytes:
        if (found := await self._reader.read(shared_secrets.find, name)) is not None:
            return found
        return await self._durable.write(shared_secrets.find_or_make, name)

    async def expect_writes(self) -> None:
        for writer in (self._durable, self._relaxed):
            if writer.failed:
                await writer.write(write_checks.write)

    @durable_boundary("store.prune")
    async def prune(self, finished_before: datetime, *, idle_since: datetime | None = None) -> int:
        pruned = 0
        idle_since = idle_since or finished_before
        models = partial(pruning.models_of, finished_before=finished_before, idle_since=idle_since, limit=_PART)
        while part := await self._durable.write_locking(
            models, pruning.operations, finished_before, idle_since=idle_since, limit=_PART
        ):
            pruned += part
        await self._durable.write(pruning.finished_samples, finished_before)
        forgotten = await self._durable.write(pruning.deleted_checkpoints, finished_before)
        forgotten += await self._durable.write(routed_experts.prune, finished_before)
        await self._durable.scrub(deleted=pruned + forgotten > 0)
        return pruned
