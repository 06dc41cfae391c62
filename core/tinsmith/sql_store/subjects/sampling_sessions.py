"""Sampling sessions."""

from sqlalchemy import Connection

from tinsmith.sql_store.statements import Change, Query, fields_of, insert_into, values_of
from tinsmith.sql_store.subjects.transaction import Connections, Transaction
from tinsmith.store import SamplingSessionRecord
from tinsmith.store.refusals import missing

_GET = Query("SELECT FIELDS FROM sampling_sessions WHERE sampling_session_id = :wanted", SamplingSessionRecord)
_INSERT = Change(insert_into("sampling_sessions", *fields_of(SamplingSessionRecord)))
_IDS = Query(
    "SELECT sampling_session_id FROM sampling_sessions WHERE session_id = :session "
    "ORDER BY created_at, sampling_session_id",
    str,
)
_NUM_OPEN = Query(
    "SELECT count(*) FROM sessions JOIN sampling_sessions ON sampling_sessions.session_id = sessions.session_id "
    "WHERE sessions.tenant = :tenant AND sessions.ended IS NULL",
    int,
)


def create(tx: Transaction, sampler: SamplingSessionRecord) -> SamplingSessionRecord:
    first = _GET.first(tx.connection, wanted=sampler.sampling_session_id)
    if first is None:
        insert(tx.connection, sampler)
    return first or sampler


def insert(connection: Connection, sampler: SamplingSessionRecord) -> None:
    _INSERT.run(connection, **values_of(sampler))


async def get_sampling_session(connections: Connections, sampling_session_id: str) -> SamplingSessionRecord:
    found = connections.glance(get, sampling_session_id)
    return await connections.reader.read(get, sampling_session_id) if found is None else found


def get(connection: Connection, sampling_session_id: str) -> SamplingSessionRecord:
    found = _GET.first(connection, wanted=sampling_session_id)
    if found is None:
        raise missing("sampling session", sampling_session_id)
    return found


def ids_of(connection: Connection, session_id: str) -> list[str]:
    return _IDS.all(connection, session=session_id)


def count_open(connection: Connection, tenant: str) -> int:
    return _NUM_OPEN.one(connection, tenant=tenant)
