"""What engines report of themselves."""

from datetime import datetime
from functools import partial

from tinsmith.failpoints import durable_boundary
from tinsmith.sql_store.parts.connections import Connections
from tinsmith.sql_store.transactions import engine_states, leases
from tinsmith.store import EngineRecord, EngineState, EngineStates, Lease


class SqlEngineStates(Connections, EngineStates):
    @durable_boundary("store.report_engine")
    async def report_engine(self, record: EngineRecord, *, lease: Lease | None = None) -> None:
        writer = self._durable if record.state == EngineState.FAILED else self._relaxed
        if await writer.write(engine_states.report, record, lease):
            await self._fail_pending(record.base_model)

    async def _fail_pending(self, base_model: str) -> None:
        """In parts, so that other writes get their turn. If this process dies, the next engine runs what is left."""
        last: int | None = 0
        while last is not None:
            models = partial(engine_states.pending_models, base_model=base_model, after=last)
            last = await self._durable.write_locking(models, engine_states.fail_some, base_model, last)

    async def list_engines(self) -> list[EngineRecord]:
        return await self._reader.read(engine_states.list_all)

    async def overdue_engines(self) -> dict[str, float]:
        return await self._reader.read(leases.overdue)

    async def running_since(self) -> dict[str, datetime]:
        return await self._reader.read(engine_states.running_since)
