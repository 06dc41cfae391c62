"""Sampling sessions."""

from dataclasses import fields

import sqlalchemy
from sqlalchemy import Connection, bindparam
from sqlmodel import Session, col, select

from tinsmith.errors import NotFoundError
from tinsmith.sql_store.prepared import Prepared
from tinsmith.sql_store.subjects.transaction import Connections, Transaction
from tinsmith.sql_store.tables import SAMPLING_SESSIONS, SamplingSessionRow, to_record, to_row
from tinsmith.store import SamplingSessionRecord
from tinsmith.store.unknown import no_such

_GET = sqlalchemy.select(*(SAMPLING_SESSIONS.c[field.name] for field in fields(SamplingSessionRecord))).where(
    SAMPLING_SESSIONS.c.sampling_session_id == bindparam("wanted")
)

_GLANCE = Prepared(_GET)

_IDS = (
    sqlalchemy.select(SAMPLING_SESSIONS.c.sampling_session_id)
    .where(SAMPLING_SESSIONS.c.session_id == bindparam("session"))
    .order_by(SAMPLING_SESSIONS.c.created_at, SAMPLING_SESSIONS.c.sampling_session_id)
)


def create(tx: Transaction, sampler: SamplingSessionRecord) -> SamplingSessionRecord:
    first = tx.session.get(SamplingSessionRow, sampler.sampling_session_id)
    if first is not None:
        return to_record(first, SamplingSessionRecord)
    tx.session.add(to_row(sampler, SamplingSessionRow))
    return sampler


async def get_sampling_session(connections: Connections, sampling_session_id: str) -> SamplingSessionRecord:
    found = connections.glance(glance, sampling_session_id)
    return await connections.reader.read(get, sampling_session_id) if found is None else found


def get(session: Session, sampling_session_id: str) -> SamplingSessionRecord:
    found = session.connection().execute(_GET, {"wanted": sampling_session_id}).first()
    if found is None:
        raise NotFoundError(no_such("sampling session", sampling_session_id))
    return SamplingSessionRecord(**found._mapping)  # noqa: SLF001 - the public name of a row's mapping


def glance(connection: Connection, sampling_session_id: str) -> SamplingSessionRecord:
    """Return the sampling session as `get` does."""
    found = _GLANCE.first(connection, {"wanted": sampling_session_id})
    if found is None:
        raise NotFoundError(no_such("sampling session", sampling_session_id))
    return SamplingSessionRecord(**found._asdict())


def list_of(session: Session, session_id: str) -> list[SamplingSessionRecord]:
    rows = session.exec(
        select(SamplingSessionRow)
        .where(SamplingSessionRow.session_id == session_id)
        .order_by(col(SamplingSessionRow.created_at), col(SamplingSessionRow.sampling_session_id))
    )
    return [to_record(row, SamplingSessionRecord) for row in rows]


def ids_of(session: Session, session_id: str) -> list[str]:
    return list(session.connection().execute(_IDS, {"session": session_id}).scalars())
