"""Models, which the REST API calls training runs."""

from tinsmith.failpoints import durable_boundary
from tinsmith.sql_store.parts.connections import Connections
from tinsmith.sql_store.transactions import counting, runs
from tinsmith.store import NewOperation, RunRecord, Runs
from tinsmith.store.metadata import refuse_large_metadata


class SqlRuns(Connections, Runs):
    @durable_boundary("store.create_run")
    async def create_run(self, run: RunRecord, operation: NewOperation) -> str:
        refuse_large_metadata(run.user_metadata)
        return await self._durable.write_locking([run.model_id], runs.create, run, operation)

    async def count_live_models(self, tenant: str) -> int:
        return await self._reader.read(counting.live_models, tenant)

    async def get_run(self, model_id: str) -> RunRecord:
        return await self._reader.read(runs.get, model_id)

    async def list_runs(
        self, tenant: str | None, *, session_id: str | None = None, limit: int, offset: int
    ) -> tuple[list[RunRecord], int]:
        return await self._reader.read(runs.list_all, tenant, session_id=session_id, limit=limit, offset=offset)
