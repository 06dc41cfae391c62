"""Clients' sessions: their beginning, their heartbeats, and their end, which unloads their models."""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

import sqlalchemy
from sqlalchemy import Connection, bindparam, func

from tinsmith.failpoints import durable_boundary
from tinsmith.operations import UnloadModel
from tinsmith.sql_store.columns import Microseconds
from tinsmith.sql_store.group_commit import Writer
from tinsmith.sql_store.statements import Change
from tinsmith.sql_store.subjects import gaps, log, models, submitting
from tinsmith.sql_store.subjects.models import Run
from tinsmith.sql_store.subjects.transaction import Connections, Transaction
from tinsmith.sql_store.tables import OPEN, RUNS, SESSIONS, columns_of, to_record, to_values
from tinsmith.store import NewOperation, SessionEnd, SessionRecord
from tinsmith.store.codec import encode_operation, kind_of
from tinsmith.store.refusals import missing, refuse_large_metadata
from tinsmith.store.sessions import SILENCE
from tinsmith.store.wakeups import work_topic

_PAUSE_S: Final = 0.02
"""After a transaction, heartbeats gather for this long. One that comes alone does not wait."""
_MOST: Final = 256  # heartbeats in one transaction

_SESSION = SESSIONS.c.session_id == bindparam("wanted")
_GET = sqlalchemy.select(*columns_of(SessionRecord, SESSIONS)).where(_SESSION)
_FIND = sqlalchemy.select(*columns_of(SessionRecord, SESSIONS)).where(
    SESSIONS.c.session_id.in_(bindparam("ids", expanding=True))
)
_SILENT = (
    sqlalchemy.select(SESSIONS.c.session_id)
    .where(OPEN, SESSIONS.c.last_seen_at < bindparam("before", type_=Microseconds()))
    .order_by(SESSIONS.c.last_seen_at, SESSIONS.c.session_id)
)
_SILENT_OF = _SILENT.where(SESSIONS.c.heard_by == bindparam("server"))
_TOUCH = Change(
    "UPDATE sessions SET heard_since = CASE WHEN last_seen_at < :silent_since THEN :at ELSE heard_since END, "
    "heard_by = CASE WHEN last_seen_at < :at THEN :server ELSE heard_by END, "
    "last_seen_at = CASE WHEN last_seen_at < :at THEN :at ELSE last_seen_at END "
    "WHERE session_id = :wanted AND sessions.ended IS NULL"
)
_NUM_LIVE = sqlalchemy.select(func.count()).select_from(SESSIONS).where(SESSIONS.c.tenant == bindparam("tenant"), OPEN)
_LIVE_MODELS = (
    sqlalchemy.select(RUNS.c.model_id)
    .where(RUNS.c.session_id == bindparam("session"), RUNS.c.state.in_(models.LIVE))
    .order_by(RUNS.c.model_id)
)


@durable_boundary("store.create_session")
async def create_session(
    connections: Connections, session: SessionRecord, *, idempotency_key: str | None
) -> SessionRecord:
    refuse_large_metadata(session.user_metadata)
    return await connections.durable.write(create, session, idempotency_key)


def create(tx: Transaction, session: SessionRecord, idempotency_key: str | None) -> SessionRecord:
    if idempotency_key is not None:
        same = SESSIONS.c.tenant == session.tenant, SESSIONS.c.idempotency_key == idempotency_key
        query = sqlalchemy.select(*columns_of(SessionRecord, SESSIONS)).where(*same)
        if (first := tx.connection.execute(query).first()) is not None:
            return to_record(first, SessionRecord)
    more = {"idempotency_key": idempotency_key, "heard_since": session.created_at}
    tx.connection.execute(SESSIONS.insert(), to_values(session) | more)
    return session


def get(connection: Connection, session_id: str, *, lock: bool = False) -> SessionRecord:
    row = connection.execute(_GET.with_for_update() if lock else _GET, {"wanted": session_id}).first()
    if row is None:
        raise missing("session", session_id)
    return to_record(row, SessionRecord)


def find(connection: Connection, session_ids: Collection[str]) -> dict[str, SessionRecord]:
    rows = connection.execute(_FIND, {"ids": list(session_ids)})
    return {row.session_id: to_record(row, SessionRecord) for row in rows}


def list_all(connection: Connection, tenant: str | None, *, limit: int, offset: int) -> list[SessionRecord]:
    newest = SESSIONS.c.created_at.desc(), SESSIONS.c.session_id.desc()
    query = sqlalchemy.select(*columns_of(SessionRecord, SESSIONS)).order_by(*newest)
    if tenant is not None:
        query = query.where(SESSIONS.c.tenant == tenant)
    return [to_record(row, SessionRecord) for row in connection.execute(query.limit(limit).offset(offset))]


def count_live(connection: Connection, tenant: str) -> int:
    return int(connection.execute(_NUM_LIVE, {"tenant": tenant}).scalar_one())


@dataclass(frozen=True, slots=True)
class Heartbeat:
    session_id: str
    at: datetime
    server_id: str | None  # which server heard it


def touch_all(tx: Transaction, heartbeats: Sequence[Heartbeat]) -> list[SessionRecord | None]:
    """Record heartbeats, and return their sessions, None for an unknown one.

    Each of a thousand clients sends one every ten seconds. Servers that hear the same sessions lock their rows in one
    order.
    """
    changes = [
        {"wanted": each.session_id, "at": each.at, "server": each.server_id, "silent_since": each.at - SILENCE}
        for each in sorted(heartbeats, key=lambda each: each.session_id)
    ]
    _TOUCH.run_each(tx.connection, changes)
    rows = (tx.connection.execute(_GET, {"wanted": each.session_id}).first() for each in heartbeats)
    return [None if row is None else to_record(row, SessionRecord) for row in rows]


class Heartbeats:
    """Records heartbeats some at a time: a transaction takes longer than the heartbeats in it.

    Belongs to one event loop. A transaction that fails fails all heartbeats in it.
    """

    def __init__(self, writer: Writer[Transaction]) -> None:
        self._writer = writer
        self._waiting: list[tuple[Heartbeat, asyncio.Future[SessionRecord]]] = []
        self._recorder: asyncio.Task[None] | None = None

    async def record(self, heartbeat: Heartbeat) -> SessionRecord:
        """Return the session once the heartbeat is committed. Raises NotFoundError if there is none."""
        recorded: asyncio.Future[SessionRecord] = asyncio.get_running_loop().create_future()
        self._waiting.append((heartbeat, recorded))
        if self._recorder is None:
            self._recorder = asyncio.create_task(self._record_waiting(), name="sql-heartbeats")
        return await recorded

    async def close(self) -> None:
        """Record those that wait."""
        while self._recorder is not None:
            await asyncio.wait([self._recorder])

    async def _record_waiting(self) -> None:
        try:
            while self._waiting:
                chunk, self._waiting = self._waiting[:_MOST], self._waiting[_MOST:]
                await self._record(chunk)
                await asyncio.sleep(_PAUSE_S)
        finally:
            self._recorder = None

    async def _record(self, chunk: list[tuple[Heartbeat, asyncio.Future[SessionRecord]]]) -> None:
        try:
            found = await self._writer.write(touch_all, [heartbeat for heartbeat, _ in chunk])
        except Exception as error:  # noqa: BLE001 - every caller gets it
            for _, recorded in chunk:
                if not recorded.done():
                    recorded.set_exception(error)
            return
        for (heartbeat, recorded), session in zip(chunk, found, strict=True):
            if recorded.done():  # its client has left
                continue
            if session is None:
                recorded.set_exception(missing("session", heartbeat.session_id))
            else:
                recorded.set_result(session)


def update(tx: Transaction, session_id: str, *, project_id: str | None) -> SessionRecord:
    session = get(tx.connection, session_id, lock=True)
    tx.connection.execute(SESSIONS.update().where(_SESSION).values(project_id=project_id), {"wanted": session_id})
    return replace(session, project_id=project_id)


@durable_boundary("store.end_session")
async def end_session(
    connections: Connections, session_id: str, reason: SessionEnd, detail: str | None
) -> SessionRecord:
    ended = await connections.durable.write_locking(_models_to_end, end, session_id, reason, detail)
    await _fail_what_is_left(connections, session_id)
    return ended


def _models_to_end(connection: Connection, session_id: str, *_: object) -> list[str]:
    return list(connection.execute(_LIVE_MODELS, {"session": session_id}).scalars())


async def _fail_what_is_left(connections: Connections, session_id: str) -> None:
    """If this process dies before the end, `fail_gaps` of the engine goes on."""
    for model_id in await connections.reader.read(gaps.left_by, session_id):
        await gaps.fail_in_chunks(connections, model_id, None)


def end(tx: Transaction, session_id: str, reason: SessionEnd, detail: str | None) -> SessionRecord:
    session = get(tx.connection, session_id, lock=True)
    if session.ended is not None:
        return session
    ended = SESSIONS.update().where(_SESSION).values(ended=reason, end_detail=detail)
    tx.connection.execute(ended, {"wanted": session_id})
    for model_id in _models_to_end(tx.connection, session_id):
        _unload(tx, model_id)
    return replace(session, ended=reason, end_detail=detail)


def _unload(tx: Transaction, model_id: str) -> None:
    """Queue an UnloadModel behind the last operation that can run.

    Later requests are refused, so a gap will never be filled: the UnloadModel takes its seq_id, and what is behind it
    fails (`gaps.fail_some`). What a model that waits for a place has accepted runs when it has one.
    """
    run = models.locked(tx.connection, model_id)
    assert run is not None
    run.unload_seq_id = _first_missing(tx, run)
    unload = UnloadModel(model_id=run.model_id)
    operation = NewOperation(
        base_model=run.base_model,
        kind=kind_of(unload),
        tenant=run.tenant,
        session_id=run.session_id,
        subject_id=run.model_id,
        seq_id=run.unload_seq_id,
        ordered=True,
        payload=encode_operation(unload),
        digest=b"",
    )
    submitting.insert(tx, operation, run, submitting.neighbours(tx.connection, operation))
    models.write(tx.connection, run)
    tx.wake.append(work_topic(run.base_model))


def _first_missing(tx: Transaction, run: Run) -> int:
    """While a gap is being failed, what is before `next_seq_id` does not count."""
    first = 0 if run.waits_for_place else max(run.arrived_seq_id + 1, run.next_seq_id)
    return submitting.last_before_a_gap(tx.connection, run, first) + 1


async def expire_sessions(
    connections: Connections, last_seen_before: datetime, *, heard_by: str | None = None
) -> list[str]:
    expired = []
    for session_id in await connections.reader.read(silent, last_seen_before, heard_by):
        if await connections.durable.write_locking(_models_to_end, expire, session_id, last_seen_before):
            await _fail_what_is_left(connections, session_id)
            expired.append(session_id)
    return expired


def silent(connection: Connection, last_seen_before: datetime, server_id: str | None) -> list[str]:
    """Return the open sessions without a heartbeat since then: all, or those that one of several servers heard last."""
    if server_id is None or not log.locks_rows(connection):
        return list(connection.execute(_SILENT, {"before": last_seen_before}).scalars())
    values = {"before": last_seen_before, "server": server_id}
    return list(connection.execute(_SILENT_OF, values).scalars())


def expire(tx: Transaction, session_id: str, last_seen_before: datetime) -> bool:
    """End a session, unless it has ended or been heard meanwhile. Return whether it was ended."""
    session = get(tx.connection, session_id, lock=True)
    if session.ended is not None or session.last_seen_at >= last_seen_before:
        return False
    end(tx, session_id, "expired", f"no heartbeat since {session.last_seen_at:%Y-%m-%d %H:%M:%S} UTC")
    return True
