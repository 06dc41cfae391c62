"""Sampling sessions."""

from tinsmith.failpoints import durable_boundary
from tinsmith.sql_store.parts.connections import Connections
from tinsmith.sql_store.transactions import counting, sampling_sessions
from tinsmith.store import SamplingSessionRecord, SamplingSessions


class SqlSamplingSessions(Connections, SamplingSessions):
    @durable_boundary("store.create_sampling_session")
    async def create_sampling_session(self, sampler: SamplingSessionRecord) -> SamplingSessionRecord:
        return await self._durable.write(sampling_sessions.create, sampler)

    async def get_sampling_session(self, sampling_session_id: str) -> SamplingSessionRecord:
        found = self._glance(sampling_sessions.glance, sampling_session_id)
        return await self._reader.read(sampling_sessions.get, sampling_session_id) if found is None else found

    async def count_open_sampling_sessions(self, tenant: str) -> int:
        return await self._reader.read(counting.open_sampling_sessions, tenant)

    async def list_sampling_sessions(self, session_id: str) -> list[SamplingSessionRecord]:
        return await self._reader.read(sampling_sessions.list_of, session_id)

    async def list_sampling_session_ids(self, session_id: str) -> list[str]:
        return await self._reader.read(sampling_sessions.ids_of, session_id)
