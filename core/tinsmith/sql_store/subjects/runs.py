"""Models, which the REST API calls training runs."""

from dataclasses import fields

import sqlalchemy
from sqlalchemy import bindparam
from sqlmodel import Session, col, func, select

from tinsmith.errors import NotFoundError
from tinsmith.failpoints import durable_boundary
from tinsmith.sql_store.subjects import log, submitting
from tinsmith.sql_store.subjects.transaction import Connections, Transaction
from tinsmith.sql_store.tables import RUNS, RunRow, to_record, to_row
from tinsmith.store import NewOperation, RunRecord
from tinsmith.store.metadata import refuse_large_metadata
from tinsmith.store.unknown import no_such

_GET = sqlalchemy.select(*(RUNS.c[each.name] for each in fields(RunRecord))).where(
    RUNS.c.model_id == bindparam("model")
)


@durable_boundary("store.create_run")
async def create_run(connections: Connections, run: RunRecord, operation: NewOperation) -> str:
    refuse_large_metadata(run.user_metadata)
    return await connections.durable.write_locking(_model_to_create, create, run, operation)


def _model_to_create(session: Session, run: RunRecord, *_: object) -> list[str]:
    del session
    return [run.model_id]


def create(tx: Transaction, run: RunRecord, operation: NewOperation) -> str:
    if tx.session.get(RunRow, run.model_id) is None:
        submitting.refuse_ended_session(tx.session, run.session_id, lock=True)
        tx.session.add(to_row(run, RunRow, arrived_seq_id=run.next_seq_id - 1))
        tx.session.flush()
        tx.wake.append(log.places_topic(run.base_model))
    return submitting.submit(tx, operation)


def get(session: Session, model_id: str) -> RunRecord:
    row = session.connection().execute(_GET, {"model": model_id}).first()
    if row is None:
        raise NotFoundError(no_such("model", model_id))
    return RunRecord(**row._mapping)  # noqa: SLF001 - the public name of a row's mapping


def list_all(
    session: Session, tenant: str | None, *, session_id: str | None = None, limit: int, offset: int
) -> tuple[list[RunRecord], int]:
    conditions = [] if tenant is None else [RunRow.tenant == tenant]
    if session_id is not None:
        conditions.append(RunRow.session_id == session_id)
    newest = col(RunRow.created_at).desc(), col(RunRow.model_id).desc()
    rows = session.exec(select(RunRow).where(*conditions).order_by(*newest).limit(limit).offset(offset))
    total = session.exec(select(func.count()).select_from(RunRow).where(*conditions)).one()
    return [to_record(row, RunRecord) for row in rows], total
