"""Recovery points: which training states on disk a recovery can start from."""

import sqlalchemy
from sqlalchemy import Connection, bindparam

from tinsmith.sql_store.subjects import leases, models
from tinsmith.sql_store.subjects.transaction import Transaction
from tinsmith.sql_store.tables import RECOVERY_POINTS, columns_of, put, to_record, to_values
from tinsmith.store import Lease, RecoveryPointRecord
from tinsmith.store.refusals import ahead_of_results, model_not_live

_OF = (
    sqlalchemy.select(*columns_of(RecoveryPointRecord, RECOVERY_POINTS))
    .where(RECOVERY_POINTS.c.model_id == bindparam("model"))
    .order_by(RECOVERY_POINTS.c.seq_id.desc())
)


def add(tx: Transaction, lease: Lease, record: RecoveryPointRecord, *, keep: int) -> None:
    leases.fence(tx, lease)
    run = models.locked(tx.connection, record.model_id)
    if run is None or not run.is_live:
        raise model_not_live(record)
    if record.seq_id > run.applied_seq_id:
        raise ahead_of_results(record, run.applied_seq_id)
    keep_newest(tx.connection, record, keep)


def keep_newest(connection: Connection, record: RecoveryPointRecord, keep: int) -> None:
    put(connection, RECOVERY_POINTS, to_values(record))
    for each in list_of(connection, record.model_id)[keep:]:
        _delete(connection, each.model_id, each.seq_id)


def list_of(connection: Connection, model_id: str) -> list[RecoveryPointRecord]:
    return [to_record(row, RecoveryPointRecord) for row in connection.execute(_OF, {"model": model_id})]


def drop(tx: Transaction, lease: Lease, model_id: str, seq_id: int) -> None:
    leases.fence(tx, lease)
    _delete(tx.connection, model_id, seq_id)


def _delete(connection: Connection, model_id: str, seq_id: int) -> None:
    one = RECOVERY_POINTS.c.model_id == model_id, RECOVERY_POINTS.c.seq_id == seq_id
    connection.execute(RECOVERY_POINTS.delete().where(*one))


def drop_all(connection: Connection, model_id: str) -> None:
    connection.execute(RECOVERY_POINTS.delete().where(RECOVERY_POINTS.c.model_id == model_id))
