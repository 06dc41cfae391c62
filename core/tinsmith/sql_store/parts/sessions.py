"""Clients' sessions."""

from datetime import datetime
from functools import partial

from tinsmith.failpoints import durable_boundary
from tinsmith.sql_store.parts.connections import Connections
from tinsmith.sql_store.parts.failing import fail_in_parts
from tinsmith.sql_store.transactions import counting, forgetting, gaps, sessions, unloading
from tinsmith.store import SessionEnd, SessionRecord, Sessions
from tinsmith.store.metadata import refuse_large_metadata


class SqlSessions(Connections, Sessions):
    @durable_boundary("store.create_session")
    async def create_session(self, session: SessionRecord, *, idempotency_key: str | None) -> SessionRecord:
        refuse_large_metadata(session.user_metadata)
        return await self._durable.write(sessions.create, session, idempotency_key)

    async def get_session(self, session_id: str) -> SessionRecord:
        return await self._reader.read(sessions.get, session_id)

    async def list_sessions(self, tenant: str | None, *, limit: int, offset: int) -> list[SessionRecord]:
        return await self._reader.read(sessions.list_all, tenant, limit=limit, offset=offset)

    async def count_live_sessions(self, tenant: str) -> int:
        return await self._reader.read(counting.live_sessions, tenant)

    async def touch_session(self, session_id: str, at: datetime) -> SessionRecord:
        return await self._heartbeats.record(sessions.Heartbeat(session_id, at, None))

    async def hear_session(self, session_id: str, at: datetime, *, server_id: str) -> SessionRecord:
        return await self._heartbeats.record(sessions.Heartbeat(session_id, at, server_id))

    async def update_session(self, session_id: str, *, project_id: str | None) -> SessionRecord:
        return await self._durable.write(sessions.update, session_id, project_id)

    @durable_boundary("store.end_session")
    async def end_session(self, session_id: str, reason: SessionEnd, detail: str | None) -> SessionRecord:
        models = partial(unloading.live_models_of, session_id=session_id)
        session = await self._durable.write_locking(models, sessions.end, session_id, reason, detail)
        await self._fail_what_is_left(session_id)
        return session

    async def expire_sessions(self, last_seen_before: datetime) -> list[str]:
        return await self._expire(last_seen_before, None)

    async def expire_sessions_of(self, server_id: str, last_seen_before: datetime) -> list[str]:
        return await self._expire(last_seen_before, server_id)

    async def _expire(self, last_seen_before: datetime, server_id: str | None) -> list[str]:
        expired = []
        for session_id in await self._reader.read(sessions.silent, last_seen_before, server_id):
            models = partial(unloading.live_models_of, session_id=session_id)
            if await self._durable.write_locking(models, sessions.expire, session_id, last_seen_before):
                await self._fail_what_is_left(session_id)
                expired.append(session_id)
        return expired

    async def forget_sessions(self, last_seen_before: datetime) -> int:
        forgotten = 0
        for rows in forgetting.ALL:
            while keys := await self._reader.read(forgetting.unneeded, rows, last_seen_before):
                forgotten += await self._durable.write(forgetting.delete, rows, keys)
        return forgotten

    async def _fail_what_is_left(self, session_id: str) -> None:
        """If this process dies before the end, `fail_gaps` of the engine goes on."""
        for model_id in await self._reader.read(gaps.left_by, session_id):
            await fail_in_parts(self._durable, model_id, None)
