"""What engines report of themselves."""

from tinsmith.failpoints import durable_boundary
from tinsmith.sql_store.parts.connections import Connections
from tinsmith.sql_store.transactions import engine_states
from tinsmith.store import EngineRecord, EngineState, EngineStates, Lease


class SqlEngineStates(Connections, EngineStates):
    @durable_boundary("store.report_engine")
    async def report_engine(self, record: EngineRecord, *, lease: Lease | None = None) -> None:
        writer = self._durable if record.state == EngineState.FAILED else self._relaxed
        await writer.write(engine_states.report, record, lease)

    async def list_engines(self) -> list[EngineRecord]:
        return await self._reader.read(engine_states.list_all)
