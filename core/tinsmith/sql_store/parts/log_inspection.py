"""What a model's log holds, for people."""

from tinsmith.sql_store.parts.connections import Connections
from tinsmith.sql_store.transactions import log_inspection
from tinsmith.store import LoggedOperation, LogInspection, LogTotals, RunLog


class SqlLogInspection(Connections, LogInspection):
    async def run_log(self, model_id: str) -> RunLog:
        return await self._reader.read(log_inspection.run_log, model_id)

    async def list_log(self, model_id: str, *, from_seq_id: int | None, limit: int) -> list[LoggedOperation]:
        return await self._reader.read(log_inspection.list_log, model_id, from_seq_id=from_seq_id, limit=limit)

    async def log_totals(self, model_id: str) -> list[LogTotals]:
        return await self._reader.read(log_inspection.totals, model_id)
