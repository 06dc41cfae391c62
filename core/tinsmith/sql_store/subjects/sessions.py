"""Clients' sessions. As in all modules of this package, `tx.session` and `session: Session` are SQLAlchemy's."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import sqlalchemy
from sqlalchemy import bindparam, case
from sqlmodel import Session, col, select

from tinsmith.errors import NotFoundError
from tinsmith.failpoints import durable_boundary
from tinsmith.sql_store.columns import Microseconds
from tinsmith.sql_store.prepared import Prepared
from tinsmith.sql_store.subjects import gaps, log, unloading
from tinsmith.sql_store.subjects.transaction import Connections, Transaction
from tinsmith.sql_store.tables import OPEN, SESSIONS, SessionRow, to_record, to_row
from tinsmith.store import SessionEnd, SessionRecord
from tinsmith.store.metadata import refuse_large_metadata
from tinsmith.store.unknown import no_such

_SILENT = (
    sqlalchemy.select(SESSIONS.c.session_id)
    .where(OPEN, SESSIONS.c.last_seen_at < bindparam("before", type_=Microseconds()))
    .order_by(SESSIONS.c.last_seen_at, SESSIONS.c.session_id)
)
_SILENT_OF = _SILENT.where(SESSIONS.c.heard_by == bindparam("server"))

_AT, _WANTED = bindparam("at", type_=Microseconds()), SESSIONS.c.session_id == bindparam("wanted")
_LATER, _BY = SESSIONS.c.last_seen_at < _AT, bindparam("server", type_=sqlalchemy.String())
_SILENT_BEFORE = SESSIONS.c.last_seen_at < bindparam("silent_since", type_=Microseconds())
_TOUCH = Prepared(
    SESSIONS.update()
    .where(_WANTED, OPEN)
    .values(
        heard_since=case((_SILENT_BEFORE, _AT), else_=SESSIONS.c.heard_since),
        last_seen_at=case((_LATER, _AT), else_=SESSIONS.c.last_seen_at),
        heard_by=case((_LATER, _BY), else_=SESSIONS.c.heard_by),
    )
)
_GET = Prepared(sqlalchemy.select(SESSIONS).where(_WANTED))


@durable_boundary("store.create_session")
async def create_session(
    connections: Connections, session: SessionRecord, *, idempotency_key: str | None
) -> SessionRecord:
    refuse_large_metadata(session.user_metadata)
    return await connections.durable.write(create, session, idempotency_key)


def create(tx: Transaction, session: SessionRecord, idempotency_key: str | None) -> SessionRecord:
    if idempotency_key is not None:
        same = select(SessionRow).where(
            SessionRow.tenant == session.tenant, SessionRow.idempotency_key == idempotency_key
        )
        if (first := tx.session.exec(same).first()) is not None:
            return to_record(first, SessionRecord)
    tx.session.add(to_row(session, SessionRow, idempotency_key=idempotency_key, heard_since=session.created_at))
    return session


def get(session: Session, session_id: str) -> SessionRecord:
    return to_record(_row(session, session_id), SessionRecord)


def list_all(session: Session, tenant: str | None, *, limit: int, offset: int) -> list[SessionRecord]:
    query = select(SessionRow).order_by(col(SessionRow.created_at).desc(), col(SessionRow.session_id).desc())
    if tenant is not None:
        query = query.where(SessionRow.tenant == tenant)
    return [to_record(row, SessionRecord) for row in session.exec(query.limit(limit).offset(offset))]


@dataclass(frozen=True, slots=True)
class Heartbeat:
    session_id: str
    at: datetime
    server_id: str | None  # which server heard it


def touch_all(tx: Transaction, heartbeats: Sequence[Heartbeat]) -> list[SessionRecord | None]:
    """Record heartbeats, and return their sessions, None for an unknown one.

    Each of a thousand clients sends one every ten seconds, so no row is mapped. Servers that hear the same sessions
    lock their rows in one order.
    """
    tx.session.flush()  # what other calls of the group have changed
    connection = tx.session.connection()
    changes = [
        {"wanted": each.session_id, "at": each.at, "server": each.server_id, "silent_since": each.at - gaps.SILENCE}
        for each in sorted(heartbeats, key=lambda each: each.session_id)
    ]
    _TOUCH.run(connection, *changes)
    rows = (_GET.first(connection, {"wanted": each.session_id}) for each in heartbeats)
    return [None if row is None else to_record(row, SessionRecord) for row in rows]


def update(tx: Transaction, session_id: str, *, project_id: str | None) -> SessionRecord:
    row = _row(tx.session, session_id, lock=True)
    row.project_id = project_id
    return to_record(row, SessionRecord)


@durable_boundary("store.end_session")
async def end_session(
    connections: Connections, session_id: str, reason: SessionEnd, detail: str | None
) -> SessionRecord:
    ended = await connections.durable.write_locking(_models_to_end, end, session_id, reason, detail)
    await _fail_what_is_left(connections, session_id)
    return ended


def _models_to_end(session: Session, session_id: str, *_: object) -> list[str]:
    return unloading.live_models_of(session, session_id)


async def _fail_what_is_left(connections: Connections, session_id: str) -> None:
    """If this process dies before the end, `fail_gaps` of the engine goes on."""
    for model_id in await connections.reader.read(gaps.left_by, session_id):
        await gaps.fail_in_parts(connections, model_id, None)


def end(tx: Transaction, session_id: str, reason: SessionEnd, detail: str | None) -> SessionRecord:
    row = _row(tx.session, session_id, lock=True)
    if row.ended is None:
        row.ended, row.end_detail = reason, detail
        unloading.unload_models(tx, session_id)
    return to_record(row, SessionRecord)


async def expire_sessions(connections: Connections, last_seen_before: datetime) -> list[str]:
    return await _expire_silent(connections, None, last_seen_before)


async def expire_sessions_of(connections: Connections, server_id: str, last_seen_before: datetime) -> list[str]:
    return await _expire_silent(connections, server_id, last_seen_before)


async def _expire_silent(connections: Connections, server_id: str | None, last_seen_before: datetime) -> list[str]:
    expired = []
    for session_id in await connections.reader.read(silent, last_seen_before, server_id):
        if await connections.durable.write_locking(_models_to_end, expire, session_id, last_seen_before):
            await _fail_what_is_left(connections, session_id)
            expired.append(session_id)
    return expired


def silent(session: Session, last_seen_before: datetime, server_id: str | None) -> list[str]:
    """Return the open sessions without a heartbeat since then: all, or those that one of several servers heard last."""
    if server_id is None or not log.locks_rows(session):
        return list(session.connection().execute(_SILENT, {"before": last_seen_before}).scalars())
    values = {"before": last_seen_before, "server": server_id}
    return list(session.connection().execute(_SILENT_OF, values).scalars())


def expire(tx: Transaction, session_id: str, last_seen_before: datetime) -> bool:
    """End a session, unless it has ended or been heard meanwhile. Return whether it was ended."""
    row = _row(tx.session, session_id, lock=True)
    if row.ended is not None or row.last_seen_at >= last_seen_before:
        return False
    end(tx, session_id, "expired", f"no heartbeat since {row.last_seen_at:%Y-%m-%d %H:%M:%S} UTC")
    return True


def _row(session: Session, session_id: str, *, lock: bool = False) -> SessionRow:
    row = session.get(SessionRow, session_id, with_for_update=True if lock else None)
    if row is None:
        raise NotFoundError(no_such("session", session_id))
    return row
