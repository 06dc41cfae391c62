"""Sampling sessions."""

from dataclasses import fields

import sqlalchemy
from sqlalchemy import Connection, bindparam, func

from tinsmith.sql_store.statements import Change, Query, insert_into
from tinsmith.sql_store.subjects.transaction import Connections, Transaction
from tinsmith.sql_store.tables import OPEN, SAMPLING_SESSIONS, SESSIONS, to_values
from tinsmith.store import SamplingSessionRecord
from tinsmith.store.refusals import missing

_FIELDS = [each.name for each in fields(SamplingSessionRecord)]
_GET = Query(
    f"SELECT {', '.join(_FIELDS)} FROM sampling_sessions WHERE sampling_session_id = :wanted", SamplingSessionRecord
)
_INSERT = Change(insert_into("sampling_sessions", *_FIELDS))
_OF = SAMPLING_SESSIONS.c.session_id == bindparam("session")
_OLDEST = SAMPLING_SESSIONS.c.created_at, SAMPLING_SESSIONS.c.sampling_session_id
_IDS = sqlalchemy.select(SAMPLING_SESSIONS.c.sampling_session_id).where(_OF).order_by(*_OLDEST)
_NUM_OPEN = (
    sqlalchemy.select(func.count())
    .select_from(SESSIONS)
    .join(SAMPLING_SESSIONS, SAMPLING_SESSIONS.c.session_id == SESSIONS.c.session_id)
    .where(SESSIONS.c.tenant == bindparam("tenant"), OPEN)
)


def create(tx: Transaction, sampler: SamplingSessionRecord) -> SamplingSessionRecord:
    first = _GET.first(tx.connection, wanted=sampler.sampling_session_id)
    if first is None:
        insert(tx.connection, sampler)
    return first or sampler


def insert(connection: Connection, sampler: SamplingSessionRecord) -> None:
    _INSERT.run(connection, **to_values(sampler))


async def get_sampling_session(connections: Connections, sampling_session_id: str) -> SamplingSessionRecord:
    found = connections.glance(get, sampling_session_id)
    return await connections.reader.read(get, sampling_session_id) if found is None else found


def get(connection: Connection, sampling_session_id: str) -> SamplingSessionRecord:
    found = _GET.first(connection, wanted=sampling_session_id)
    if found is None:
        raise missing("sampling session", sampling_session_id)
    return found


def ids_of(connection: Connection, session_id: str) -> list[str]:
    return list(connection.execute(_IDS, {"session": session_id}).scalars())


def count_open(connection: Connection, tenant: str) -> int:
    return int(connection.execute(_NUM_OPEN, {"tenant": tenant}).scalar_one())
